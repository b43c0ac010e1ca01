"""Length bucketing: a partition, deterministic, with little padding, and without effect on the loss;
losses against the formula, written out in float64."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wellposed_lab.tasks.batches import bucketed_batches, pad_examples
from wellposed_lab.tasks.task import accuracy_sums, causal_cross_entropy_sum, cross_entropy_sum


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), max_size=300),
    size=st.integers(1, 40),
    key=st.text(max_size=5),
)
def test_batches_are_a_deterministic_partition(lengths, size, key):
    batches = bucketed_batches(lengths, size, shuffle=key)
    assert batches == bucketed_batches(lengths, size, shuffle=key)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(1 <= len(batch) <= size for batch in batches)
    assert sum(len(batch) < size for batch in batches) <= 1


def test_padding_is_a_fraction_of_that_of_unsorted_batches():
    generator = random.Random(0)
    lengths = [generator.randint(5, 500) for _ in range(3200)]
    plain = [list(range(i, i + 32)) for i in range(0, 3200, 32)]

    def padding(batches):
        sizes = [[lengths[i] for i in batch] for batch in batches]
        return sum(max(row) * len(row) - sum(row) for row in sizes)

    assert padding(bucketed_batches(lengths, 32, shuffle="x")) < 0.05 * padding(plain)


def test_padding_never_changes_a_classification_loss():
    generator = random.Random(1)
    rows = [generator.choices(range(1, 11), k=generator.randint(2, 30)) for _ in range(60)]
    examples = [{"input_ids": row, "labels": [i % 3]} for i, row in enumerate(rows)]
    embedding = torch.nn.Embedding(11, 8).double()
    head = torch.nn.Linear(8, 3).double()

    @torch.no_grad()
    def losses(indices):
        batch = pad_examples([examples[i] for i in indices], pad_id=0)
        labels = batch["labels"][:, 0]
        mask = batch["attention_mask"].unsqueeze(-1)
        logits = head((embedding(batch["input_ids"]) * mask).sum(1) / mask.sum(1))
        total, count = cross_entropy_sum(logits, labels, label_smoothing=0.1)
        return float(total), float(count), accuracy_sums(logits, labels)[0]

    in_buckets = map(losses, bucketed_batches(list(map(len, rows)), 7, shuffle="x"))
    alone = (losses([index]) for index in range(60))
    summed, expected = (torch.tensor([*sums]).double().sum(0) for sums in (in_buckets, alone))
    torch.testing.assert_close(summed, expected, rtol=60 * torch.finfo(torch.float32).eps, atol=0)


def by_formula(rows, labels, smoothing):
    """Sum over labelled rows of (1 - s)(-log p[y]) + s mean(-log p), in Python floats."""
    total = 0.0
    count = 0
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
def test_cross_entropy_is_the_formula_in_float32(smoothing, dtype):
    logits = (3 * torch.randn(50, 7)).to(dtype)
    labels = torch.randint(0, 7, (50,))
    labels[::4] = -100
    total, count = cross_entropy_sum(logits, labels, label_smoothing=smoothing)
    expected, expected_count = by_formula(logits.double().tolist(), labels.tolist(), smoothing)
    assert total.dtype == torch.float32
    assert float(total) == pytest.approx(expected, rel=50 * torch.finfo(torch.float32).eps)
    assert int(count) == expected_count


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_causal_loss_shifts_by_one_and_ignores_padding(smoothing):
    logits = torch.randn(2, 4, 5, dtype=torch.float64)
    labels = torch.tensor([[1, 2, 3, 4], [4, 0, -100, -100]])
    total, count = causal_cross_entropy_sum(logits, labels, label_smoothing=smoothing)
    rows = [*logits[0, :3].tolist(), logits[1, 0].tolist()]
    expected, _ = by_formula(rows, [2, 3, 4, 0], smoothing)
    assert float(total) == pytest.approx(expected, rel=20 * torch.finfo(torch.float32).eps)
    assert int(count) == 4
