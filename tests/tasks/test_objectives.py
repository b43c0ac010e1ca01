"""Losses against the formula, written out in float64."""

from __future__ import annotations

import math

import pytest
import torch

from wellposed.tasks.objectives import (
    accuracy_sums,
    causal_cross_entropy_sum,
    cross_entropy_sum,
    perplexity,
)


def reference(rows: list[list[float]], labels: list[int], smoothing: float) -> tuple[float, int]:
    """Sum over labelled rows of (1 - s)(-log p[y]) + s mean(-log p), in Python floats."""
    total, count = 0.0, 0
    for row, label in zip(rows, labels, strict=True):
        if label == -100:
            continue
        log_sum = math.log(sum(math.exp(value) for value in row))
        surprise = [log_sum - value for value in row]
        total += (1 - smoothing) * surprise[label] + smoothing * sum(surprise) / len(row)
        count += 1
    return total, count


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_cross_entropy_is_the_formula_in_float32(smoothing: float, dtype: torch.dtype) -> None:
    logits = (3 * torch.randn(50, 7)).to(dtype)
    labels = torch.randint(0, 7, (50,))
    labels[::4] = -100
    total, count = cross_entropy_sum(logits, labels, label_smoothing=smoothing)
    expected, expected_count = reference(logits.double().tolist(), labels.tolist(), smoothing)
    assert total.dtype == torch.float32
    assert float(total) == pytest.approx(expected, rel=50 * torch.finfo(torch.float32).eps)
    assert int(count) == expected_count


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_causal_loss_shifts_by_one_and_ignores_padding(smoothing: float) -> None:
    logits = torch.randn(2, 4, 5, dtype=torch.float64)
    labels = torch.tensor([[1, 2, 3, 4], [4, 0, -100, -100]])
    total, count = causal_cross_entropy_sum(logits, labels, label_smoothing=smoothing)
    rows = [*logits[0, :3].tolist(), logits[1, 0].tolist()]
    expected, _ = reference(rows, [2, 3, 4, 0], smoothing)
    assert float(total) == pytest.approx(expected, rel=20 * torch.finfo(torch.float32).eps)
    assert int(count) == 4


def test_padded_logits_get_no_gradient() -> None:
    logits = torch.randn(1, 4, 5, requires_grad=True)
    causal_cross_entropy_sum(logits, torch.tensor([[1, 2, -100, -100]]))[0].backward()
    assert logits.grad is not None
    assert bool(logits.grad[0, 0].any())
    assert not bool(logits.grad[0, 1:].any())


def test_accuracy_counts() -> None:
    logits = torch.eye(4)[[0, 1, 1, 3]]
    assert accuracy_sums(logits, torch.tensor([0, 1, 2, 0])) == (2.0, 4.0)


def test_perplexity_beyond_all_floats_is_infinite() -> None:
    assert (perplexity(1e6), perplexity(0.0)) == (math.inf, 1.0)
