"""The stream of micro-batches: a function of task, batch size and seed; resumable; shared out
between processes."""

from typing import ClassVar

import pytest
import torch
from lab.tests.support import stub_task as stub

from wellposed.errors import ConfigError, DataError
from wellposed_lab.training.loop.batches import MicroBatches, check_target_count, token_count


def stream(**options):
    return MicroBatches(stub.StubTask(), 4, **{"seed": 0, **options})


def ids(batches):
    return [batch["input_ids"].tolist() for batch in batches]


def test_the_stream_goes_through_every_epoch_in_the_order_of_the_task():
    task = stub.StubTask()
    taken = ids(stream(seed=3).take(14))
    data = task.dataset("train")
    expected = [
        task.collate([data[i] for i in members])["input_ids"].tolist()
        for epoch in range(3)
        for members in task.batches("train", 4, seed=3, epoch=epoch)
    ]
    assert taken == expected[:14]
    assert taken != ids(stream(seed=4).take(14))


@pytest.mark.parametrize("taken", [0, 1, 5, 6, 7, 13])
def test_a_stream_resumes_from_its_position(taken):
    uninterrupted = ids(stream().take(20))
    first = stream()
    first.take(taken)
    second = stream(start=(first.epoch, first.index))
    assert ids(second.take(20 - taken)) == uninterrupted[taken:]


def test_processes_share_one_stream():
    alone = ids(stream().take(12))
    parts = [ids(stream(process=(rank, 3)).take(4)) for rank in range(3)]
    assert [batch for step in zip(*parts, strict=True) for batch in step] == alone


def test_targets_are_counted_as_the_loss_counts_them():
    task = stub.StubTask()
    for batch in MicroBatches(task, 5, seed=0).take(6):
        logits = torch.zeros(*batch["input_ids"].shape, stub.VOCABULARY)
        assert task.target_count(batch) == int(task.loss_sum(logits, batch)[1])
        assert token_count(batch) == int((batch["input_ids"] != 0).sum())


def test_a_task_that_counts_otherwise_is_told_what_to_do():
    expected = "loss_sum reports 7 targets, but the labels hold 9; define target_count"
    with pytest.raises(ConfigError, match=expected):
        check_target_count(stub.StubTask(), 9, 7.0)


def test_a_split_without_batches_is_an_error():
    class Empty(stub.StubTask):
        sizes: ClassVar = {"train": 0, "valid": 1, "test": 1}

    with pytest.raises(DataError, match="train split has 0 examples"):
        MicroBatches(Empty(), 4, seed=0)
