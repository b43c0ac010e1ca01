"""Certificates of ball attention and its parts (B12) against slopes ascended over weights, masks,
norms and scales."""

import math
from functools import partial

import pytest
import torch
from tests.support.sample import ALL_NORMS
from tests.support.samples import SAMPLES
from torch import nn

from wellposed.attack import lipschitz_lower_bound
from wellposed.certification import certify
from wellposed.nn import (
    BallAttention,
    BallCrossAttention,
    BallProjection,
    Block,
    BudgetResidual,
    ConvexResidual,
    MaxMinFeedForward,
)

ROUNDING = 1 + 1e-9
MARGIN = 5e-6
"""Certified spectral norms add 1e-6 each for their rounding, in a product of at most five."""


def projections(layer):
    return [layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj]


def attention(width, heads, seed=0, **options):
    """Use orthogonal projections, in float64."""
    torch.manual_seed(seed)
    layer = BallAttention(width, heads, **{"max_temperature": 1e3, **options}).double().eval()
    for projection in projections(layer):
        nn.init.orthogonal_(projection.weight)
        if projection.bias is not None:
            nn.init.normal_(projection.bias)
    nn.init.normal_(layer.mix_logit)
    return layer


def ratio(module, tokens, width, norm="tok", **overrides):
    """Return attacked / certified slope, both under the same mask."""
    mask = "causal" if overrides.get("forward_kwargs", {}).get("is_causal") else "any"
    options = {"restarts": 6, "steps": 25, "scales": (0.3, 3.0), **overrides}
    attack = lipschitz_lower_bound(module, (tokens, width), norm=norm, **options)
    asked = {"norm": norm, "mask": mask, "radius": overrides.get("radius"), "cross_check": False}
    certificate = certify(module, seq_len=tokens, **asked)
    return max(attack.ratio(certificate), attack.slope / certificate.total)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ALL_NORMS)
@pytest.mark.parametrize("heads", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["full", "causal", "padding", "any"])
def test_heads_masks_and_norms(norm, heads, kind):
    width = 2 * heads
    tokens = 4
    options = {
        "full": {},
        "causal": {"is_causal": True},
        "padding": {"key_padding_mask": torch.tensor([[False, True, False, False]])},
        "any": {"key_padding_mask": torch.tensor([[True, False, False, True]]), "is_causal": True},
    }[kind]
    for unit in (True, False):
        layer = attention(width, heads, unit_lipschitz=unit, bias=not unit, temperature=1.0)
        assert ratio(layer, tokens, width, norm, forward_kwargs=options) <= ROUNDING


def test_in_norm_tok_the_number_of_tokens_is_free():
    layer = attention(4, 2, temperature=2.0)
    assert len({certify(layer, seq_len=n, cross_check=False).total for n in (1, 8, 10**6)}) == 1
    assert ratio(layer, 32, 4, steps=15) <= ROUNDING


@pytest.mark.parametrize("norm", ALL_NORMS)
def test_a_smaller_ball_gives_a_smaller_constant(norm):
    layer = attention(4, 1, temperature=3.0, unit_lipschitz=False)
    totals = [
        certify(layer, seq_len=4, norm=norm, radius=r, cross_check=False).total
        for r in (0.2, 0.5, 1.0, 7.0)
    ]
    assert totals[0] < totals[1] < totals[2] == totals[3]
    for radius in (0.2, 0.5):
        assert ratio(layer, 4, 4, norm, radius=radius) <= ROUNDING


def test_one_where_the_weights_have_norm_one():
    for heads in (1, 2, 4):
        layer = attention(8, heads, temperature=4.0)
        before = certify(layer, seq_len=100).total
        assert before <= 1 + MARGIN
        layer.q_proj.weight.data.mul_(1.5)
        assert certify(layer, seq_len=100).total > before


def called(layer, query, memory):
    """Return the layer as a function of one argument; the other is the same for the whole batch."""
    count = max(len(query), len(memory))
    return layer(query.expand(count, -1, -1), memory.expand(count, -1, -1))


def test_no_attack_on_cross_attention_exceeds_the_constants_that_its_class_states():
    torch.manual_seed(0)
    layer = BallCrossAttention(4, 2, memory_dim=3, temperature=1.5, unit_lipschitz=False).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter))
    parts = (linear.weight.detach().unflatten(0, (2, -1)) for linear in projections(layer)[:3])
    query, key, value = parts
    output = layer.o_proj.weight.detach().unflatten(1, (2, -1)).movedim(1, 0)
    temperature, share = (scale.detach() for scale in layer.head_scales(torch.float64))
    share = share * torch.linalg.matrix_norm(output @ value, 2)
    sharp = temperature * torch.linalg.matrix_norm(key.mT @ query, 2)
    x = torch.randn(1, 3, 4).double()
    memory = torch.randn(1, 5, 3).double()
    options = {"restarts": 6, "steps": 40, "scales": (0.3, 3.0)}
    for fixed in (0.5, 5.0):
        of_x = partial(called, layer, memory=fixed * memory)
        of_y = partial(called, layer, fixed * x)
        slope = lipschitz_lower_bound(of_x, (3, 4), **options).value
        assert 0 < slope <= float((share * sharp).sum()) * ROUNDING
        slope = lipschitz_lower_bound(of_y, (5, 3), **options).value
        assert 0 < slope <= float((share * (1 + sharp)).sum()) * ROUNDING


@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
def test_cross_attention_attains_its_constants(temperature):
    """Two opposite keys with equal weights: the covariance of the values is as large as the ball
    allows."""
    layer = BallCrossAttention(2, 1, temperature=temperature, unit_lipschitz=False).double()
    for projection in projections(layer):
        nn.init.eye_(projection.weight)
    memory = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]]).double()
    bounds = [temperature, 1 + temperature]
    with torch.no_grad():
        step = torch.tensor([[[1e-6, 0.0]]]).double()
        slope = (layer(step, memory) - layer(-step, memory)).norm() / (2 * step.norm())
    assert float(slope) / bounds[0] == pytest.approx(1.0, rel=2 * MARGIN)
    query = torch.tensor([[[0.3, 0.0]]]).double()
    options = {"restarts": 16, "steps": 150, "scales": (0.3, 1.0)}
    attained = max(
        lipschitz_lower_bound(partial(called, layer, q), (2, 2), **options).value
        for q in (query, 3 * query)
    )
    assert 0.5 < attained / bounds[1] <= ROUNDING


@pytest.mark.parametrize("width", [1, 2, 4, 9])
@pytest.mark.parametrize("norm", ALL_NORMS)
def test_the_projection_attains_its_constant(norm, width):
    module = BallProjection(width, radius=0.7)
    assert certify(module, seq_len=2, norm=norm, radius=0.7).total == 1.0
    total = certify(module, seq_len=2, norm=norm).total
    assert total == pytest.approx((1 + math.sqrt(width)) / 2 if norm == "inf" else 1.0)
    # Just outside the ball, one large entry of squared length (1 - 1/sqrt D)/2 beside equal others.
    x = torch.full(
        (32, 2, width), math.sqrt((1 + width**-0.5) / 2 / max(width - 1, 1)), dtype=torch.float64
    )
    x[..., 0] = math.sqrt((1 - width**-0.5) / 2) if width > 1 else 0.5
    start = 0.7 * (1 + 1e-9) * x
    options = {"restarts": 32, "steps": 0, "inner": 4, "start": start}
    attack = lipschitz_lower_bound(module, (2, width), norm=norm, **options)
    assert 0.999 < attack.value / total <= 1 + 1e-6
    assert ratio(module, 2, width, norm) <= ROUNDING


def block(residuals, width=4):
    made = SAMPLES[Block][0].build(8)
    made.attention = attention(width, 2)
    made.feedforward = MaxMinFeedForward(width, 2 * width)
    for projection in (made.feedforward.up_proj, made.feedforward.down_proj):
        nn.init.orthogonal_(projection.weight)
    made.attention_residual, made.feedforward_residual = residuals
    return made.double().eval()


@pytest.mark.parametrize("norm", ["tok", 2])
def test_blocks_keep_their_budget(norm):
    """Depth 6: convex blocks stay at 1 in norm tok, budgeted ones at L; the attack reaches most of
    it."""
    convex = nn.Sequential(*(block((ConvexResidual(0.3), ConvexResidual(0.6))) for _ in range(3)))
    spent = nn.Sequential(
        *(block((BudgetResidual(4.0, 6), BudgetResidual(4.0, 6, share=0.9))) for _ in range(3))
    )
    for stack, budget in ((convex, 1.0), (spent, 4.0)):
        if norm == "tok":
            assert certify(stack, seq_len=3).total <= budget * (1 + 6 * MARGIN)
        share = ratio(stack, 3, 4, norm, steps=15)
        assert 0.1 < share <= ROUNDING


def test_a_divisor_that_is_too_small_is_counted():
    made = block((ConvexResidual(0.5, divisor=0.25), ConvexResidual(0.5)))
    branch = certify(made.attention, seq_len=3).total
    assert certify(made, seq_len=3).total == pytest.approx(0.5 + 0.5 * 4 * branch, rel=2 * MARGIN)
    made.attention_residual.divisor.fill_(1.0)
    made.attention.v_proj.weight.data.mul_(100)
    assert certify(made, seq_len=3).total > 10
