"""Length bucketing: a partition, deterministic, with little padding, and without effect on the
loss."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wellposed.tasks.batches import bucketed_batches, collate_causal_lm, collate_classification
from wellposed.tasks.objectives import (
    accuracy_sums,
    causal_cross_entropy_sum,
    cross_entropy_sum,
)


@settings(max_examples=100, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), max_size=300),
    size=st.integers(1, 40),
    key=st.text(max_size=5),
)
def test_batches_are_a_deterministic_partition(lengths: list[int], size: int, key: str) -> None:
    batches = bucketed_batches(lengths, size, shuffle=key)
    assert batches == bucketed_batches(lengths, size, shuffle=key)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    assert all(1 <= len(batch) <= size for batch in batches)
    assert sum(len(batch) < size for batch in batches) <= 1


def test_padding_is_a_fraction_of_that_of_unsorted_batches() -> None:
    generator = random.Random(0)
    lengths = [generator.randint(5, 500) for _ in range(3200)]
    plain = [list(range(i, i + 32)) for i in range(0, 3200, 32)]

    def padding(batches: list[list[int]]) -> int:
        return sum(
            max(lengths[i] for i in batch) * len(batch) - sum(lengths[i] for i in batch)
            for batch in batches
        )

    assert padding(bucketed_batches(lengths, 32, shuffle="x")) < 0.05 * padding(plain)


def test_batches_are_not_in_order_of_length() -> None:
    batches = bucketed_batches(list(range(3200)), 32, shuffle="x")
    means = [sum(batch) / len(batch) for batch in batches]
    rising = sum(a < b for a, b in itertools.pairwise(means))
    assert 25 < rising < 75


def _examples(count: int) -> list[dict[str, list[int]]]:
    generator = random.Random(1)
    lengths = [generator.randint(2, 30) for _ in range(count)]
    ids = [[generator.randrange(1, 11) for _ in range(length)] for length in lengths]
    return [{"input_ids": row, "labels": [i % 3]} for i, row in enumerate(ids)]


def same_in_buckets_and_alone(
    examples: list[dict[str, list[int]]], losses: Callable[[list[int]], tuple[float, ...]]
) -> None:
    """Compare the sums of ``losses`` over padded batches with those over single examples."""
    count = len(examples)
    batches = bucketed_batches([len(e["input_ids"]) for e in examples], 7, shuffle="x")
    bucketed = torch.tensor([losses(batch) for batch in batches]).double().sum(0)
    single = torch.tensor([losses([i]) for i in range(count)]).double().sum(0)
    rounding = count * torch.finfo(torch.float32).eps
    torch.testing.assert_close(bucketed, single, rtol=rounding, atol=0)


def test_padding_never_changes_a_classification_loss() -> None:
    examples = _examples(60)
    embedding, head = torch.nn.Embedding(11, 8).double(), torch.nn.Linear(8, 3).double()

    @torch.no_grad()
    def losses(indices: list[int]) -> tuple[float, float, float]:
        batch = collate_classification([examples[i] for i in indices], pad_id=0)
        mask = batch["attention_mask"].unsqueeze(-1)
        logits = head((embedding(batch["input_ids"]) * mask).sum(1) / mask.sum(1))
        total, count = cross_entropy_sum(logits, batch["labels"], label_smoothing=0.1)
        return float(total), float(count), accuracy_sums(logits, batch["labels"])[0]

    same_in_buckets_and_alone(examples, losses)


def test_padding_never_changes_a_language_model_loss() -> None:
    examples = [{"input_ids": example["input_ids"]} for example in _examples(40)]
    embedding, head = torch.nn.Embedding(11, 8).double(), torch.nn.Linear(8, 11).double()
    model = torch.nn.GRU(8, 8, batch_first=True).double()

    @torch.no_grad()
    def losses(indices: list[int]) -> tuple[float, float]:
        batch = collate_causal_lm([examples[i] for i in indices], pad_id=0)
        logits = head(model(embedding(batch["input_ids"]))[0])
        total, count = causal_cross_entropy_sum(logits, batch["labels"], label_smoothing=0.1)
        return float(total), float(count)

    same_in_buckets_and_alone(examples, losses)
    targets = sum(len(example["input_ids"]) - 1 for example in examples)
    assert losses(list(range(40)))[1] == targets
