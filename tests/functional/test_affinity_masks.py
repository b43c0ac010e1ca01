"""A padded sequence costs what it costs alone, whatever number a mask adds to closed keys."""

import math

import pytest
import torch

from wellposed.functional import affinity_penalty, affinity_penalty_from_logits, unattended

LOWEST = torch.finfo(torch.float32).min
MASKED = {
    "-inf": -math.inf, "lowest": LOWEST, "lowest / 8": LOWEST / 8, "half": -65504.0, "-1e9": -1e9, "-1e4": -1e4,
    "-1e3": -1e3,
}  # fmt: skip
REAL = 6
PADDED = 3
TOKENS = REAL + PADDED


def real_tokens(left):
    real = torch.arange(TOKENS) < REAL
    return real.flip(0) if left else real


def mask_of(real, causal, value):
    """Padded keys and later ones get ``value``, added once for each reason, as many models do."""
    bias = torch.where(real, 0.0, value).expand(TOKENS, TOKENS)
    later = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    return bias + torch.where(later, value, 0.0) if causal else bias


def slow(query, key, causal, bias=None):
    """|A^T A - I|_F^2 of the real tokens alone, spelled out in float64."""
    scores = query.double() @ key.double().mT / math.sqrt(query.shape[-1])
    scores = scores if bias is None else scores + bias
    if causal:
        later = torch.ones(REAL, REAL, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    affinity = scores.softmax(-1)
    return (affinity.mT @ affinity - torch.eye(REAL)).square().sum((-2, -1))


def by_probes(*tensors, **masks):
    generator = torch.Generator().manual_seed(0)
    probes = {"estimator": "probes", "num_probes": 400, "generator": generator}
    return affinity_penalty(*tensors, **probes, **masks)


def from_logits(query, key, attn_mask):
    return affinity_penalty_from_logits(query @ key.mT / math.sqrt(query.shape[-1]) + attn_mask)


ESTIMATORS = {
    "exact": (affinity_penalty, 1e-5),
    "probes": (by_probes, 0.2),
    "logits": (from_logits, 1e-5),
}


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("biased", [False, True], ids=["", "alibi"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("kind", MASKED)
def test_every_mask_removes_padding_and_no_bias_does(kind, left, causal, biased, estimator):
    if kind == "-1e3" and left and causal:
        pytest.skip("rows that are masked as a whole by -1,000 are even, as in the model")
    query, key = torch.randn(2, 2, 3, TOKENS, 8).unbind()
    real = real_tokens(left)
    places = torch.arange(TOKENS)
    alibi = -0.5 * (places[:, None] - places).abs().float() if biased else torch.zeros(1)
    penalty, tolerance = ESTIMATORS[estimator]
    cost = penalty(query, key, attn_mask=mask_of(real, causal, MASKED[kind]) + alibi)
    inner = alibi[:REAL, :REAL] if biased else None
    expected = slow(query[:, :, real], key[:, :, real], causal, inner).float()
    torch.testing.assert_close(cost, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("slope", [0.5, 100.0])
def test_a_bias_of_distance_masks_no_token(slope):
    """Far keys get weight zero in their rows, and each token is near itself."""
    distance = (torch.arange(40)[:, None] - torch.arange(40)).abs()
    bias = -slope * distance.float()
    assert not unattended(bias, torch.float32).any()
    assert affinity_penalty(torch.zeros(40, 8), torch.zeros(40, 8), attn_mask=bias).isfinite()


def test_sharp_attention_without_a_mask_is_not_taken_for_one():
    """All queries attend to the first key alone: |A^T A - I|^2 = (N - 1)^2 + N - 1."""
    query = torch.ones(1, 1, 5, 4)
    key = torch.zeros(1, 1, 5, 4)
    key[:, :, 0] = 150
    expected = torch.tensor([[20.0]])
    assert torch.equal(affinity_penalty(query, key), expected)
    assert torch.equal(affinity_penalty(query, key, attn_mask=torch.zeros(5, 5)), expected)
    assert torch.equal(from_logits(query, key, torch.zeros(5, 5)), expected)


def test_nan_is_noticed():
    logits = torch.zeros(3, 3)
    logits[:, 1] = math.nan
    assert affinity_penalty_from_logits(logits).isnan()


@pytest.mark.parametrize("attention", [None, "bool", "float", "causal"])
@pytest.mark.parametrize("estimator", ["exact", "probes"])
def test_numbers_of_a_padding_mask_are_a_mask_that_is_added(estimator, attention):
    query, key = torch.randn(2, 2, 3, TOKENS, 8).unbind()
    query.requires_grad_()
    padding = torch.linspace(-3.0, 2.0, 2 * TOKENS).view(2, TOKENS)
    padding[0, REAL:] = -1e4
    padding[1, :2] = -math.inf
    earlier = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    bias = torch.zeros(TOKENS, TOKENS).masked_fill(~earlier, -math.inf)
    masks = {
        "bool": {"attn_mask": earlier},
        "float": {"attn_mask": bias},
        "causal": {"is_causal": True},
    }
    penalty, _ = ESTIMATORS[estimator]
    cost = penalty(query, key, key_padding_mask=padding, **masks.get(attention, {}))
    alone = padding[:, None, None] + (0.0 if attention is None else bias)
    expected = penalty(query, key, attn_mask=alone)
    torch.testing.assert_close(cost, expected)
    slopes = [torch.autograd.grad(value.sum(), query)[0] for value in (cost, expected)]
    torch.testing.assert_close(*slopes)


def test_a_sequence_of_padding_alone_costs_nothing():
    query, key = torch.randn(2, 2, 3, TOKENS, 8).unbind()
    padding = torch.zeros(2, TOKENS)
    padding[1] = -1e9
    for penalty in (affinity_penalty, by_probes):
        cost = penalty(query, key, key_padding_mask=padding)
        assert torch.equal(cost[1], torch.zeros(3))
        assert (cost[0] > 0).all()
