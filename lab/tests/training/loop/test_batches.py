"""The stream of micro-batches: a function of task, batch size and seed; resumable; shared out
between processes."""

import os
import signal
from typing import ClassVar

import pytest
import torch
from lab.tests.support import stub_task as stub
from lab.tests.support.runs import rows, same
from tests.support.refusal import refuses

from wellposed.errors import ConfigError, DataError, WellposedError
from wellposed_lab.training.loop.batches import MicroBatches, check_target_count, token_count


def stream(**options):
    return MicroBatches(stub.StubTask(), 4, **{"seed": 0, **options})


def ids(batches):
    return [batch["input_ids"].tolist() for batch in batches]


def test_the_stream_goes_through_every_epoch_in_the_order_of_the_task():
    task = stub.StubTask()
    found = ids(stream(seed=3).take(14))
    data = task.dataset("train")
    expected = [
        task.collate([data[i] for i in members])["input_ids"].tolist()
        for epoch in range(3)
        for members in task.batches("train", 4, seed=3, epoch=epoch)
    ]
    assert found == expected[:14]
    assert found != ids(stream(seed=4).take(14))


@pytest.mark.parametrize("taken", [0, 1, 5, 6, 7, 13])
def test_a_stream_resumes_from_its_position(taken):
    whole, first = ids(stream().take(20)), stream()
    first.take(taken)
    second = stream(start=(first.epoch, first.index))
    assert ids(second.take(20 - taken)) == whole[taken:]


def test_processes_share_one_stream():
    whole = ids(stream().take(12))
    parts = [ids(stream(process=(rank, 3)).take(4)) for rank in range(3)]
    assert [batch for step in zip(*parts, strict=True) for batch in step] == whole


def test_targets_are_counted_as_the_loss_counts_them():
    task = stub.StubTask()
    for batch in MicroBatches(task, 5, seed=0).take(6):
        logits = torch.zeros(*batch["input_ids"].shape, stub.VOCABULARY)
        assert task.target_count(batch) == int(task.loss_sum(logits, batch)[1])
        assert token_count(batch) == int((batch["input_ids"] != 0).sum())


def test_a_task_that_counts_otherwise_is_told_what_to_do():
    expected = "loss_sum reports 7 targets, but the labels hold 9; define target_count"
    refuses(ConfigError, expected, check_target_count, stub.StubTask(), 9, 7.0)


def test_a_split_without_batches_is_an_error():
    class Empty(stub.StubTask):
        sizes: ClassVar = {"train": 0, "valid": 1, "test": 1}

    refuses(DataError, "train split has 0 examples", MicroBatches, Empty(), 4, seed=0)


@pytest.mark.parametrize("process", [(0, 1), (1, 3)])
def test_workers_give_the_same_batches_at_the_same_positions(process):
    before = torch.get_rng_state()
    at = {"seed": 3, "start": (1, 2), "process": process}
    kinds = [stream(**at, workers=workers) for workers in (0, 2)]
    for count in (1, 3, 0, 9):
        one, other = (each.take(count) for each in kinds)
        assert all(same(left, right) for left, right in zip(one, other, strict=True))
        assert len({(each.epoch, each.index) for each in kinds}) == 1
    kinds[1].close()
    assert torch.equal(torch.get_rng_state(), before)


def test_weights_do_not_depend_on_workers_whose_number_may_change(tmp_path):
    stub.run(stub.make_config(dropout=0.1, log_every=1, steps=6), tmp_path / "none")
    stub.run(stub.make_config(dropout=0.1, log_every=1, steps=3, num_workers=1), tmp_path / "some")
    longer = stub.make_config(dropout=0.1, log_every=1, steps=6, num_workers=2)
    stub.run(longer, tmp_path / "some", resume="auto", longer=True)
    folders = [tmp_path / name for name in ("none", "some")]
    weights = [out / "checkpoint-6" / "model.safetensors" for out in folders]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    losses = [[(row["step"], row["loss"]) for row in rows(out)] for out in folders]
    assert set(losses[0]) <= set(losses[1])


def test_what_a_task_raises_in_a_worker_is_raised_as_it_is(tmp_path):
    class Damaged(stub.StubTask):
        def collate(self, examples):
            raise DataError("rows.tsv:7: no label")

    with pytest.raises(DataError, match=r"^rows\.tsv:7: no label$"):
        stub.run(stub.make_config(num_workers=1), tmp_path / "run", task=Damaged())


def test_a_worker_that_is_killed_ends_the_run_in_one_line(tmp_path):
    class Killed(stub.StubTask):
        def collate(self, examples):
            os.kill(os.getpid(), signal.SIGKILL)

    expected = r"num_workers = 1: fewer need less memory.*--resume auto"
    with pytest.raises(WellposedError, match=expected) as lost:
        stub.run(stub.make_config(num_workers=1), tmp_path / "run", task=Killed())
    assert "\n" not in str(lost.value)
