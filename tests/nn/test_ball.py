"""Ball attention and its parts against explicit float64 sums; masks, caches, options, saving, bad
input."""

import math
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load, save
from tests.support.close import within
from tests.support.layers import built, draw, gradients_are_right, heads_of
from tests.support.refusal import bad_shape
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from wellposed.nn import (
    AttentionMask,
    BallAttention,
    BallCrossAttention,
    BallProjection,
    BudgetResidual,
    ConvexResidual,
    MaxMin,
    MaxMinFeedForward,
    UnitEmbedding,
)

D = 8
CHANGES = [{"heads": 4}, {"temperature": 1.0}, {"unit_lipschitz": False}, {"bias": True}]
OPTIONS = [
    {}, {"temperature": 0.5}, {"max_temperature": 3.0}, {"unit_lipschitz": False}, {"bias": True},
]  # fmt: skip


def build(kind, heads=2, **options):
    return built(kind, D, heads, **options)


def inside(x):
    return torch.stack(
        [row / max(1.0, float(row.norm())) for row in x.reshape(-1, x.shape[-1])]
    ).reshape(x.shape)


def reference(layer, x, memory, allowed):
    """`sum_h w_h W_o,h f_h`, one head after the other, from the stored weights alone."""
    state = {name: weight.detach().double() for name, weight in layer.state_dict().items()}
    q, k, v = heads_of(layer, inside(x), inside(memory))
    weights = state["mix_logit"].exp() / state["mix_logit"].exp().sum()
    temperatures = layer.max_temperature / (1 + (-state["temperature_logit"]).exp())
    total, divisor = torch.zeros(*x.shape[:-1], D, dtype=torch.float64), 0.0
    for h, output in enumerate(state["o_proj.weight"].chunk(layer.num_heads, 1)):
        logits = temperatures[h] * q[h] @ k[h].transpose(-1, -2)
        head = logits.masked_fill(~allowed, -math.inf).softmax(-1) @ v[h]
        total = total + weights[h] * head @ output.T
        divisor += float(weights[h] * (1 + 2 * temperatures[h]))
    return total / (divisor if layer.unit_lipschitz else 1.0) + state.get("o_proj.bias", 0)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize("size", [1e-3, 0.3, 1e3])
def test_self_attention_matches_the_reference(options, heads, size):
    layer, x = build(BallAttention, heads, **options), draw(2, 6, D, size=size)
    full, causal = torch.ones(6, 6).bool(), torch.ones(6, 6).tril().bool()
    kept = torch.rand(1, 1, 6, 6, generator=torch.Generator().manual_seed(3)) < 0.5
    kept = kept | torch.eye(6).bool()
    within(layer(x), reference(layer, x, x, full), 1e-12)
    within(layer(x, is_causal=True), reference(layer, x, x, causal), 1e-12)
    by_hand = layer(x, key_padding_mask=AttentionMask(kept, False))
    within(by_hand, reference(layer, x, x, kept[0]), 1e-12)


@pytest.mark.parametrize("options", [*OPTIONS, {"memory_dim": 5}])
def test_cross_attention_matches_the_reference(options):
    layer = build(BallCrossAttention, **options)
    x, memory = draw(2, 4, D), draw(2, 7, options.get("memory_dim", D), seed=2)
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[0, 5:] = True
    out = layer(x, memory, key_padding_mask=padding)
    within(out, reference(layer, x, memory, ~padding[:, None, :]), 1e-12)
    within(out[:1], layer(x[:1], memory[:1, :5]), 1e-12)
    stored = []
    cache = SimpleNamespace(
        once=lambda project: stored[0] if stored else stored.append(project()) or stored[0]
    )
    for _ in range(2):
        within(layer(x, memory, key_padding_mask=padding, cache=cache), out, 1e-12)


class LargestTensor(TorchDispatchMode):
    """Watches the number of entries of every tensor that an operation returns."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [
            part for part in (out if isinstance(out, tuple) else (out,)) if isinstance(part, Tensor)
        ]
        self.entries = max([self.entries, *(part.numel() for part in made)])
        return out


@pytest.mark.parametrize("is_causal", [False, True])
def test_no_matrix_of_tokens_by_tokens_is_made(is_causal):
    tokens, layer = 2**11, BallAttention(D, 1)
    x = torch.randn(1, tokens, D, requires_grad=True)
    with LargestTensor() as largest:
        layer(x, is_causal=is_causal).sum().backward()
    assert tokens * D <= largest.entries <= 4 * tokens * D


PARTS = {
    "attention with biases": (lambda: BallAttention(D, 4, bias=True, unit_lipschitz=False), 1),
    "cross": (lambda: BallCrossAttention(D, 2), 2),
    "projection": (lambda: BallProjection(D), 1),
    "maxmin": (MaxMin, 1),
    "feed-forward": (lambda: MaxMinFeedForward(D, 16), 1),
    "convex": (lambda: ConvexResidual(0.3, divisor=2.0), 2),
    "budget": (lambda: BudgetResidual(4.0, blocks=3, divisor=2.0), 2),
}


@pytest.mark.parametrize("name", PARTS)
def test_saved_and_loaded_it_is_the_same(name):
    build_part, inputs = PARTS[name]
    first, second = build_part(), build_part()
    with torch.no_grad():
        for parameter in first.parameters():
            parameter.normal_()
        for buffer in first.buffers():
            buffer.fill_(3.0)
    second.load_state_dict(load(save(first.state_dict())) if first.state_dict() else {})
    x = [draw(2, 5, D, seed=seed).float() for seed in range(inputs)]
    assert torch.equal(first(*x), second(*x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", PARTS)
def test_half_precision(name, dtype):
    """Close to float64 by the rounding of a few products; large tokens, whose squares overflow
    float16, included."""
    torch.manual_seed(0)
    build_part, inputs = PARTS[name]
    part = build_part().to(dtype)
    for size in (1.0, 300.0 if name.startswith(("attention", "cross", "projection")) else 1.0):
        x = [
            draw(2, 5, D, seed=seed, size=size).to(dtype).requires_grad_() for seed in range(inputs)
        ]
        out = part(*x)
        assert out.dtype is dtype
        expected = build_part().double()
        expected.load_state_dict(part.state_dict())
        right = expected(*(tokens.detach().double() for tokens in x))
        off = (out.detach().double() - right.detach()).abs().max()
        assert float(off) <= 16 * torch.finfo(dtype).eps * float(right.detach().abs().max())
        out.square().sum().backward()
        assert all(bool(tokens.grad is not None and tokens.grad.isfinite().all()) for tokens in x)


@pytest.mark.parametrize(
    "name", ["attention with biases", "cross", "projection", "feed-forward", "convex", "budget"]
)
def test_gradcheck(name):
    torch.manual_seed(0)
    build_part, inputs = PARTS[name]
    part = build_part().double()
    x = [draw(1, 3, D, seed=seed).requires_grad_() for seed in range(inputs)]
    assert gradients_are_right(part, *x)


def test_tokens_of_zeros_have_finite_gradients():
    layer, x = BallAttention(D, 2), torch.zeros(1, 3, D, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_every_option_of_the_attentions_changes_something():
    x = draw(2, 5, D).float()

    def out(kind=BallAttention, heads=2, **options):
        torch.manual_seed(0)
        layer = kind(D, heads, **options)
        return (
            layer(x) if kind is BallAttention else layer(x, x[..., : options.get("memory_dim", D)])
        )

    for kind in (BallAttention, BallCrossAttention):
        plain = out(kind)
        for options in CHANGES:
            assert not torch.allclose(out(kind, **options), plain)
    assert not torch.allclose(out(BallCrossAttention, memory_dim=5), out(BallCrossAttention))
    # The largest temperature does not move the start; it bounds what is learnt.
    for largest in (3.0, 10.0):
        layer = BallAttention(D, 2, max_temperature=largest)
        assert_close(layer.head_scales()[0], torch.full((2,), 2.0))
        layer.temperature_logit.data.fill_(1e4)
        assert_close(layer.head_scales()[0], torch.full((2,), largest))


def test_temperatures_and_mixture_learn():
    layer, x = build(BallAttention), draw(2, 5, D)
    layer(x).square().sum().backward()
    assert bool((layer.temperature_logit.grad != 0).all())
    assert bool((layer.mix_logit.grad != 0).all())


def test_maxmin_sorts_pairs_and_keeps_norms():
    x = draw(3, 5, D)
    out = MaxMin()(x)
    for i in range(D // 2):
        pair = torch.stack([x[..., i], x[..., i + D // 2]], -1).sort(-1, descending=True).values
        assert torch.equal(torch.stack([out[..., i], out[..., i + D // 2]], -1), pair)
    assert_close(out.norm(dim=-1), x.norm(dim=-1))
    layer = MaxMinFeedForward(D, 6).double()
    up, down = (x @ layer.up_proj.weight.T + layer.up_proj.bias), layer.down_proj
    high, low = torch.maximum(up[..., :3], up[..., 3:]), torch.minimum(up[..., :3], up[..., 3:])
    assert_close(layer(x), torch.cat([high, low], -1) @ down.weight.T + down.bias)
    assert MaxMinFeedForward(D, 6, bias=False).up_proj.bias is None


def test_residuals_are_what_they_say():
    x, branch = draw(2, 5, D), draw(2, 5, D, seed=2)
    convex = ConvexResidual(0.3, divisor=2.0).double()
    assert_close(convex(x, branch), 0.7 * x + 0.15 * branch)
    budget = BudgetResidual(5.0, blocks=4, share=0.25, divisor=2.0).double()
    assert_close(budget(x, branch), x + (5 ** (1 / 16) - 1) / 2 * branch)
    for logit in (-1e4, -3.0, 0.0, 3.0, 1e4):
        product = 1.0
        for _ in range(4):
            residual = BudgetResidual(5.0, blocks=4).double()
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
    torch.manual_seed(0)
    embedding = UnitEmbedding(7, D, padding_idx=2)
    embedding.weight.data.mul_(size)
    ids = torch.tensor([[0, 1, 2], [6, 5, 4]])
    lengths = embedding(ids).norm(dim=-1)
    assert_close(lengths, torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]))
    out = embedding(ids)
    assert_close(out[0, 0], embedding.weight[0] / embedding.weight[0].norm())
    fresh = UnitEmbedding(7, D, padding_idx=2)
    fresh.load_state_dict(embedding.state_dict())
    assert torch.equal(fresh(ids), out)


@pytest.mark.parametrize("size", [0.0, 1e-3, 0.999, 1.001, 1e6])
def test_projection(size):
    x = draw(4, D)
    x = size * x / x.norm(dim=-1, keepdim=True)
    assert_close(
        BallProjection(D)(x), min(size, 1.0) * draw(4, D) / draw(4, D).norm(dim=-1)[:, None]
    )
    assert_close(
        BallProjection(D, radius=3.0)(x).norm(dim=-1), torch.full((4,), min(size, 3.0)).double()
    )


def test_a_mask_that_does_not_fit_is_refused():
    x = draw(2, 5, D).float()
    with bad_shape(match="key_padding_mask"):
        BallAttention(D, 2)(x, key_padding_mask=torch.zeros(2, 4, dtype=torch.bool))
    with bad_shape(match="key_padding_mask"):
        BallCrossAttention(D, 2)(x, x, key_padding_mask=torch.zeros(2, 5))
