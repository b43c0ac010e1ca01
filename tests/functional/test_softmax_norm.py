"""The spectral norm of the softmax Jacobian against eigenvalues in float64, and its penalty by loops."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wellposed.errors import ConfigError, ShapeError
from wellposed.functional import (
    softmax_jacobian_norm,
    softmax_norm_penalty,
    softmax_norm_penalty_from_logits,
    softmax_sensitivity,
)


def jacobian_norm(row):
    row = row.double()
    return float(torch.linalg.eigvalsh(torch.diag(row) - torch.outer(row, row))[-1])


def seeded(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(st.integers(1, 12), st.sampled_from([0.01, 1.0, 10.0, 100.0]), st.integers(0, 10**6))
@settings(max_examples=80, deadline=None)
def test_the_norm_is_the_largest_eigenvalue_and_below_the_bound(keys, sharpness, seed):
    rows = (sharpness * seeded(5, keys, seed=seed)).softmax(-1)
    norms = softmax_jacobian_norm(rows)
    expected = torch.tensor([jacobian_norm(row) for row in rows], dtype=torch.float64)
    torch.testing.assert_close(norms, expected, atol=1e-12, rtol=1e-9)
    assert bool((norms <= softmax_sensitivity(rows) * (1 + 1e-12) + 1e-15).all())


@pytest.mark.parametrize(
    "row", [[1.0], [1.0, 0.0], [0.5, 0.5], [0.5, 0.5, 0.0], [0.25] * 4, [0.4, 0.4, 0.1, 0.1], [0.6, 0.4, 0.0]]
)  # fmt: skip
def test_ties_zeros_and_single_keys(row):
    norms = softmax_jacobian_norm(torch.tensor([row, row]))
    assert norms.tolist() == pytest.approx([jacobian_norm(torch.tensor(row))] * 2, abs=1e-6)


def slow_penalty(query, key, allowed, left_out, scale):
    """The mean over rows of one head, row by row."""
    bounds = []
    for i in range(len(query)):
        keys = [j for j in range(len(key)) if allowed(i, j)]
        if left_out(i) or not keys:
            continue
        weights = [math.exp(scale * float(query[i] @ key[j])) for j in keys]
        rows = sorted((weight / sum(weights) for weight in weights), reverse=True)
        second = rows[1] if len(rows) > 1 else 0.0
        bounds.append(rows[0] * (1 - rows[0] + second))
    return sum(bounds) / max(1, len(bounds))


PADDED = torch.tensor([[False] * 6, [False] * 4 + [True] * 2])
MASK = seeded(6, 6, seed=9) > -0.5
CALLS = {
    "plain": ({}, lambda b, i, j: True, lambda b, i: False),
    "causal": ({"is_causal": True}, lambda b, i, j: j <= i, lambda b, i: False),
    "padded": ({"key_padding_mask": PADDED}, lambda b, i, j: not PADDED[b, j], lambda b, i: PADDED[b, i]),
    "mask": ({"attn_mask": MASK | torch.eye(6, dtype=torch.bool)}, lambda b, i, j: bool(MASK[i, j]) or i == j,
             lambda b, i: False),
}  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_the_penalty_is_the_mean_over_real_rows(call):
    keywords, allowed, left_out = CALLS[call]
    query = seeded(2, 4, 6, 3)
    key = seeded(2, 2, 6, 3, seed=1)
    values = softmax_norm_penalty(query, key, scale=0.7, **keywords)
    assert values.shape == (2, 4)
    for b in range(2):
        for h in range(4):
            one = query[b, h], key[b, h // 2]
            masks = partial(allowed, b), partial(left_out, b)
            expected = slow_penalty(*one, *masks, 0.7)
            assert values[b, h].item() == pytest.approx(expected, rel=1e-9)


def test_logits_give_the_same_and_the_gradient_is_that_of_differences():
    query, key = (seeded(1, 1, 5, 3, seed=seed).requires_grad_() for seed in (0, 1))
    logits = (query @ key.mT / math.sqrt(3)).detach()
    logits = logits.masked_fill(torch.ones(5, 5).triu(1).bool(), -1e9)
    both = (
        softmax_norm_penalty_from_logits(logits),
        softmax_norm_penalty(query, key, is_causal=True),
    )
    torch.testing.assert_close(*both)
    assert torch.autograd.gradcheck(
        lambda q, k: softmax_norm_penalty(q, k, is_causal=True), (query, key)
    )


def test_rows_that_are_masked_as_a_whole_are_left_out():
    logits = torch.zeros(3, 3)
    logits[2] = -1e9
    logits[:, 2] = -1e9
    assert softmax_norm_penalty_from_logits(logits).item() == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda: softmax_norm_penalty(torch.ones(3, 2), torch.ones(4, 2)), ShapeError),
        (lambda: softmax_norm_penalty_from_logits(torch.ones(3, 4)), ShapeError),
        (lambda: softmax_jacobian_norm(torch.tensor(1.0)), ShapeError),
        (
            lambda: softmax_norm_penalty(torch.ones(3, 2).half(), torch.ones(3, 2).half()),
            ConfigError,
        ),
    ],
)
def test_other_shapes_and_dtypes_are_refused(call, kind):
    with pytest.raises(kind, match=r"softmax_norm_penalty|expected"):
        call()
