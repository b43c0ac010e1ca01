"""The stream of micro-batches: a function of task, batch size and seed; resumable; shared out
between processes."""

from __future__ import annotations

from types import ModuleType
from typing import ClassVar

import pytest
import torch

from wellposed.errors import ConfigError, DataError
from wellposed.training.loop.batches import MicroBatches, check_target_count, token_count


def ids(batches: list[dict[str, torch.Tensor]]) -> list[list[list[int]]]:
    return [batch["input_ids"].tolist() for batch in batches]


def test_the_stream_goes_through_every_epoch_in_the_order_of_the_task(stub: ModuleType) -> None:
    task = stub.StubTask()
    stream = ids(MicroBatches(task, 4, seed=3).take(14))
    data = task.dataset("train")
    expected = [
        task.collate([data[i] for i in members])["input_ids"].tolist()
        for epoch in range(3)
        for members in task.batches("train", 4, seed=3, epoch=epoch)
    ]
    assert stream == expected[:14]
    assert stream != ids(MicroBatches(task, 4, seed=4).take(14))


@pytest.mark.parametrize("taken", [0, 1, 5, 6, 7, 13])
def test_a_stream_resumes_from_its_position(stub: ModuleType, taken: int) -> None:
    whole = ids(MicroBatches(stub.StubTask(), 4, seed=0).take(20))
    first = MicroBatches(stub.StubTask(), 4, seed=0)
    first.take(taken)
    second = MicroBatches(stub.StubTask(), 4, seed=0, epoch=first.epoch, index=first.index)
    assert ids(second.take(20 - taken)) == whole[taken:]


def test_processes_share_one_stream(stub: ModuleType) -> None:
    whole = ids(MicroBatches(stub.StubTask(), 4, seed=0).take(12))
    parts = [
        ids(MicroBatches(stub.StubTask(), 4, seed=0, rank=rank, world=3).take(4))
        for rank in range(3)
    ]
    assert [batch for step in zip(*parts, strict=True) for batch in step] == whole


def test_targets_are_counted_as_the_loss_counts_them(stub: ModuleType) -> None:
    task = stub.StubTask()
    for batch in MicroBatches(task, 5, seed=0).take(6):
        logits = torch.zeros(*batch["input_ids"].shape, stub.VOCABULARY)
        assert task.target_count(batch) == int(task.loss_sum(logits, batch)[1])
        assert token_count(batch) == int((batch["input_ids"] != 0).sum())


def test_a_task_that_counts_otherwise_is_told_what_to_do(stub: ModuleType) -> None:
    with pytest.raises(
        ConfigError, match=r"loss_sum reports 7 targets, but the labels hold 9; define target_count"
    ):
        check_target_count(stub.StubTask(), 9, 7.0)


def test_a_split_without_batches_is_an_error(stub: ModuleType) -> None:
    class Empty(stub.StubTask):
        sizes: ClassVar = {"train": 0, "valid": 1, "test": 1}

    with pytest.raises(DataError, match="train split has 0 examples"):
        MicroBatches(Empty(), 4, seed=0)
