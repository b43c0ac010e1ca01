"""Norm sum for replaced words (B14): bounds against ascended and measured slopes, and refusals."""

import math

import pytest
import torch
from tests.certification.test_ball import MARGIN, attention, block, ratio
from torch import nn

from wellposed.attack import lipschitz_lower_bound
from wellposed.certification import LayerBound, certify, register_rule
from wellposed.models import WellposedConfig, WellposedForSequenceClassification
from wellposed.nn import BudgetResidual, ConvexResidual, L2SelfAttention

ROUNDING = 1 + 1e-9


def classifier(blocks=1, **options):
    """Return a certifiable classifier of texts with random tables, in eval mode."""
    torch.manual_seed(blocks)
    defaults = {"vocab_size": 24, "hidden_size": 8, "num_hidden_layers": blocks, "num_labels": 3}
    parts = {"attention": "ball", "feedforward": "maxmin", "norm": "none", "residual": "convex"}
    sizes: dict = {"num_attention_heads": 2, "max_position_embeddings": 16}
    if options.get("attention", "ball") == "ball":
        sizes["ball_temperature"] = 0.5
    config = WellposedConfig(**{**defaults, **parts, **sizes, "unit_embeddings": True, **options})
    model = WellposedForSequenceClassification(config).eval()
    table = model.get_input_embeddings()
    nn.init.normal_(table.get_parameter("weight"))
    return model


def test_the_attack_finds_the_norm_of_a_linear_map_of_all_tokens():
    """Compute independently: the largest sum of output norms over unit vectors in one token."""
    mixing = torch.randn(3, 3, dtype=torch.float64)

    def mix(x):
        return torch.einsum("ij,bjd->bid", mixing.to(x), x)

    attack = lipschitz_lower_bound(mix, (3, 2), norm="sum", steps=20)
    expected = float(mixing.abs().sum(0).max())
    assert attack.value == pytest.approx(expected, rel=1e-6)
    assert attack.slope == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mask", ["full", "causal", "any"])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("temperature", [0.1, 0.5, 1.0, 3.0])
def test_ball_attention_is_below_its_bound(mask, heads, temperature):
    for tokens in (1, 2, 5, 9):
        unit = heads == 1
        layer = attention(2 * heads, heads, temperature=temperature, unit_lipschitz=unit)
        causal: dict = {"forward_kwargs": {"is_causal": True}} if mask == "causal" else {}
        certificate = certify(layer, seq_len=tokens, norm="sum", mask=mask)
        attacked = {"restarts": 6, "steps": 25, "scales": (0.3, 3.0)}
        attack = lipschitz_lower_bound(layer, (tokens, 2 * heads), norm="sum", **attacked, **causal)
        assert 0.02 < max(attack.value, attack.slope) / certificate.total <= ROUNDING


@pytest.mark.parametrize("tokens", [2, 8, 64])
@pytest.mark.parametrize("temperature", [0.1, 0.5, 1.0, 2.0])
def test_the_bound_is_the_formula(tokens, temperature):
    layer = attention(4, 1, temperature=temperature, unit_lipschitz=False)
    t = temperature
    column = tokens * math.exp(2 * t) / (tokens - 1 + math.exp(2 * t))
    total = certify(layer, seq_len=tokens, norm="sum", mask="full").total
    assert total == pytest.approx(column * (1 + 2 * t) + t, rel=MARGIN)
    assert column <= min(tokens, math.exp(2 * t))


def test_blocks_and_both_residuals():
    convex = (ConvexResidual(0.3), ConvexResidual(0.6))
    budget = (BudgetResidual(4.0, 2), BudgetResidual(4.0, 2, share=0.9))
    for residuals in (convex, budget):
        assert 0.02 < ratio(block(residuals), 3, 4, "sum", steps=15) <= ROUNDING


def test_what_stands_behind_the_pool_leaves_no_share_of_a_token_its_own():
    model = classifier()
    assert certify(model, seq_len=4, norm="sum").skip > 0
    model.dropout = nn.Linear(8, 8)
    assert certify(model, seq_len=4, norm="sum").skip == 0


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("blocks", [0, 1, 2])
def test_a_classifier_moves_by_no_more_than_its_share_of_the_words(blocks, padded):
    """Pooling divides by the number of real tokens; padding changes neither side."""
    model = classifier(blocks, position="none").double()
    total = certify(model, seq_len=9, norm="sum", min_tokens=6).total
    mask = torch.ones(1, 9, dtype=torch.bool)
    mask[:, 6:] = not padded
    options: dict = {"forward_kwargs": {"attention_mask": mask.long()}}
    attack = lipschitz_lower_bound(model, (9, 8), norm="sum", steps=15, **options)
    assert max(attack.value, attack.slope) <= total * ROUNDING
    if blocks == 0:
        assert attack.value > 0.5 * total
    assert certify(model, seq_len=9, norm="sum").total == pytest.approx(6 * total, rel=1e-9)


@pytest.mark.parametrize("blocks", [0, 1, 3])
def test_the_skip_is_the_part_of_a_state_that_is_its_own_token(blocks):
    """The rest of a state without its own token is ``body - skip`` Lipschitz."""
    model = classifier(blocks, position="none").double()
    certificate = certify(model, seq_len=5, norm="sum")
    assert certificate.skip is not None
    skip = certificate.skip
    rest = certificate.head[1] - skip
    assert (rest == pytest.approx(0, abs=1e-12)) == (blocks == 0)

    def residue(x):
        return model.model(inputs_embeds=x).last_hidden_state - skip * x

    attack = lipschitz_lower_bound(residue, (5, 8), norm="sum", steps=15, scales=(0.2, 1.0))
    assert attack.value <= rest * (1 + 1e-9) + 1e-12


UNPROVED = [nn.LayerNorm(4), nn.MultiheadAttention(4, 2, batch_first=True), L2SelfAttention(4, 2)]


@pytest.mark.parametrize("module", UNPROVED, ids=lambda module: type(module).__name__)
def test_what_is_not_proved_is_infinite(module):
    certificate = certify(module.eval(), seq_len=3, norm="sum", radius=1.0)
    assert math.isinf(certificate.total)
    assert type(module).__name__ in certificate.uncertified[0].reason


def test_a_rule_of_ones_own_is_asked_only_where_it_says_so():
    class Halve(nn.Module):
        def forward(self, x):
            return x / 2

    def halve(module, site):
        return LayerBound(0.5, "definition", "exact")

    register_rule(Halve)(halve)
    assert math.isinf(certify(Halve(), seq_len=2, norm="sum").total)
    register_rule(Halve, sums=True)(halve)
    assert certify(Halve(), seq_len=2, norm="sum").total == 0.5
