"""Attentions other than L2: bounds, parts, builders, and what goes with them."""

import math

import pytest
import torch
from tests.support.layers import built, draw, stack_config
from tests.support.tiny import tiny
from torch.testing import assert_close

from wellposed import nn as wn
from wellposed.certification import certify
from wellposed.errors import ConfigError, ShapeError
from wellposed.models import WellposedConfig, WellposedForCausalLM

INVERSE_D = dict(
    attention="inverse_d", residual="mean", norm="none", activation="unit_gelu", position="none"
)


def test_without_a_position_code_the_order_of_tokens_is_still_seen():
    model = tiny(WellposedForCausalLM, **INVERSE_D).eval()
    ends = [model(input_ids=torch.tensor([ids])).logits[0, -1] for ids in ([3, 4, 5], [4, 3, 5])]
    assert not torch.allclose(ends[0], ends[1], atol=1e-6)


def test_the_largest_slope_of_unit_gelu_is_one():
    x = torch.linspace(-6, 6, 20001, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(wn.unit_gelu(x).sum(), x)
    assert 1 - 1e-6 < float(slope.abs().max()) <= 1


def test_the_share_of_a_mean_is_one_over_the_residuals_and_is_not_learnt():
    residual = wn.RESIDUALS.get("mean")(WellposedConfig(num_hidden_layers=3))
    assert isinstance(residual, wn.ConvexResidual)
    assert residual.coefficients() == (pytest.approx(5 / 6), pytest.approx(1 / 6))
    assert not any(parameter.requires_grad for parameter in residual.parameters())


def test_heads_count_in_the_certificate_and_nothing_is_certified_without_a_ball():
    totals = []
    for heads in (1, 4):
        attention = wn.InverseDAttention(16, heads).double()
        for part in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
            torch.nn.init.eye_(part.weight)
        totals.append(certify(attention, seq_len=4, radius=4.0).total)
        assert certify(attention, seq_len=4).total == math.inf
    assert totals[0] == pytest.approx(1, rel=1e-4)
    assert totals[1] > 1 + 1 / 3


@pytest.mark.parametrize("lacking", [{"attention_dropout": 0.1}, {"qk_norm": True}])
def test_what_it_lacks_is_refused(lacking):
    with pytest.raises(ConfigError, match="attention 'inverse_d' with"):
        tiny(WellposedForCausalLM, **INVERSE_D, **lacking)


def test_heads_of_odd_width_are_refused():
    with pytest.raises(ShapeError, match="heads of width 3; expected an even width"):
        wn.InverseDAttention(6, 2)


def test_builder_and_bad_options():
    layer = wn.ATTENTIONS.get("cosine")(stack_config(attention_dropout=0.1))
    assert isinstance(layer, wn.CosineSelfAttention)
    assert (layer.dropout, layer.eps) == (0.1, 0.01)
    with pytest.raises(ConfigError, match="qk_norm"):
        wn.ATTENTIONS.get("cosine")(stack_config(qk_norm=True))


D = 8


PARTS = {
    "cross": (lambda: wn.BallCrossAttention(D, 2), 2),
    "projection": (lambda: wn.BallProjection(D), 1),
    "maxmin": (wn.MaxMin, 1),
    "feed-forward": (lambda: wn.MaxMinFeedForward(D, 16), 1),
    "convex": (lambda: wn.ConvexResidual(0.3, divisor=2.0), 2),
    "budget": (lambda: wn.BudgetResidual(4.0, blocks=3, divisor=2.0), 2),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PARTS)
def test_half_precision(name, dtype):
    """Close to float64 by the rounding of a few products; large tokens, whose squares overflow
    float16, included."""
    build_part, inputs = PARTS[name]
    part = build_part().to(dtype)
    for size in (1.0, 300.0 if name.startswith(("cross", "projection")) else 1.0):
        drawn = (draw(2, 5, D, seed=seed, size=size) for seed in range(inputs))
        x = [tokens.to(dtype).requires_grad_() for tokens in drawn]
        out = part(*x)
        assert out.dtype is dtype
        expected = build_part().double()
        expected.load_state_dict(part.state_dict())
        right = expected(*(tokens.detach().double() for tokens in x))
        off = (out.detach().double() - right.detach()).abs().max()
        assert float(off) <= 16 * torch.finfo(dtype).eps * float(right.detach().abs().max())
        out.square().sum().backward()
        assert all(bool(tokens.grad is not None and tokens.grad.isfinite().all()) for tokens in x)


def test_tokens_of_zeros_have_finite_gradients():
    layer = wn.BallAttention(D, 2)
    x = torch.zeros(1, 3, D, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.isfinite().all()


def test_temperatures_and_mixture_learn():
    # The largest temperature does not move the start; it bounds what is learnt.
    for largest in (3.0, 10.0):
        layer = wn.BallAttention(D, 2, max_temperature=largest)
        assert_close(layer.head_scales()[0], torch.full((2,), 2.0))
        layer.temperature_logit.data.fill_(1e4)
        assert_close(layer.head_scales()[0], torch.full((2,), largest))
    layer = built(wn.BallAttention, D, 2)
    x = draw(2, 5, D)
    layer(x).square().sum().backward()
    assert bool((layer.temperature_logit.grad != 0).all())
    assert bool((layer.mix_logit.grad != 0).all())


def test_maxmin_sorts_pairs_and_keeps_norms():
    x = draw(3, 5, D)
    out = wn.MaxMin()(x)
    for i in range(D // 2):
        pair = torch.stack([x[..., i], x[..., i + D // 2]], -1).sort(-1, descending=True).values
        assert torch.equal(torch.stack([out[..., i], out[..., i + D // 2]], -1), pair)
    assert_close(out.norm(dim=-1), x.norm(dim=-1))
    layer = wn.MaxMinFeedForward(D, 6).double()
    up = x @ layer.up_proj.weight.T + layer.up_proj.bias
    down = layer.down_proj
    high = torch.maximum(up[..., :3], up[..., 3:])
    low = torch.minimum(up[..., :3], up[..., 3:])
    assert_close(layer(x), torch.cat([high, low], -1) @ down.weight.T + down.bias)
    assert wn.MaxMinFeedForward(D, 6, bias=False).up_proj.bias is None


def test_residuals_are_what_they_say():
    x = draw(2, 5, D)
    branch = draw(2, 5, D, seed=2)
    convex = wn.ConvexResidual(0.3, divisor=2.0).double()
    assert_close(convex(x, branch), 0.7 * x + 0.15 * branch)
    budget = wn.BudgetResidual(5.0, blocks=4, share=0.25, divisor=2.0).double()
    assert_close(budget(x, branch), x + (5 ** (1 / 16) - 1) / 2 * branch)
    for logit in (-1e4, -3.0, 0.0, 3.0, 1e4):
        product = 1.0
        for _ in range(4):
            residual = wn.BudgetResidual(5.0, blocks=4).double()
            residual.logit.data.fill_(logit)
            product *= 1 + residual.coefficients()[1]
        assert product <= 5.0 * (1 + 1e-14)
        convex.logit.data.fill_(logit)
        skip, scale = convex.coefficients()
        assert skip >= 0
        assert scale >= 0
        assert skip + 2.0 * scale == pytest.approx(1.0, abs=1e-15)


@pytest.mark.parametrize("size", [1e-20, 1.0, 1e15])
def test_unit_embedding(size):
    embedding = wn.UnitEmbedding(7, D, padding_idx=2)
    embedding.weight.data.mul_(size)
    ids = torch.tensor([[0, 1, 2], [6, 5, 4]])
    lengths = embedding(ids).norm(dim=-1)
    assert_close(lengths, torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]))
    out = embedding(ids)
    assert_close(out[0, 0], embedding.weight[0] / embedding.weight[0].norm())
    fresh = wn.UnitEmbedding(7, D, padding_idx=2)
    fresh.load_state_dict(embedding.state_dict())
    assert torch.equal(fresh(ids), out)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_ball_embedding(size):
    """Every length below 1 is kept apart from every other, and has a gradient along it."""
    embedding = wn.BallEmbedding(5, D, padding_idx=2).double()
    embedding.weight.data.mul_(size)
    rows = embedding.weight.detach()
    lengths = rows.norm(dim=-1, keepdim=True)
    expected = rows / torch.hypot(lengths, torch.ones_like(lengths))
    out = embedding(torch.arange(5))
    assert_close(out.detach(), expected)
    assert float(out.detach().norm(dim=-1).max()) < 1
    out.norm(dim=-1).sum().backward()
    along = (embedding.weight.grad * rows).sum(-1)
    assert bool((along[lengths[:, 0] > 0] > 0).all())


@pytest.mark.parametrize("size", [0.0, 1e-3, 0.999, 1.001, 1e6])
def test_projection(size):
    x = draw(4, D)
    units = x / x.norm(dim=-1, keepdim=True)
    assert_close(wn.BallProjection(D)(size * units), min(size, 1.0) * units)
    lengths = wn.BallProjection(D, radius=3.0)(size * units).norm(dim=-1)
    assert_close(lengths, torch.full((4,), min(size, 3.0)).double())
