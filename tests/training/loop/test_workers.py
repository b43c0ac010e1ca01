"""Batches that workers make are those of this process, and a worker that is lost is one line."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from wellposed.errors import DataError, WellposedError
from wellposed.training import read_metrics
from wellposed.training.loop.batches import MicroBatches


@pytest.mark.parametrize(("rank", "world"), [(0, 1), (1, 3)])
def test_workers_give_the_same_batches_at_the_same_positions(
    stub: ModuleType, rank: int, world: int
) -> None:
    before = torch.get_rng_state()
    kinds = [
        MicroBatches(
            stub.StubTask(), 4, seed=3, epoch=1, index=2, rank=rank, world=world, workers=workers
        )
        for workers in (0, 2)
    ]
    for count in (1, 3, 0, 9):
        one, other = (stream.take(count) for stream in kinds)
        for left, right in zip(one, other, strict=True):
            assert left.keys() == right.keys()
            assert all(torch.equal(left[name], right[name]) for name in left)
        assert len({(stream.epoch, stream.index) for stream in kinds}) == 1
    kinds[1].close()
    assert torch.equal(torch.get_rng_state(), before)


def test_a_run_has_the_same_weights_with_and_without_workers_and_may_change_their_number(
    stub: ModuleType, tmp_path: Path
) -> None:
    stub.run(stub.make_config(dropout=0.1, log_every=1, steps=6), tmp_path / "none")
    stub.run(stub.make_config(dropout=0.1, log_every=1, steps=3, num_workers=1), tmp_path / "some")
    longer = stub.make_config(dropout=0.1, log_every=1, steps=6, num_workers=2)
    stub.run(longer, tmp_path / "some", resume="auto", longer=True)
    weights = [
        (tmp_path / name / "checkpoint-6" / "model.safetensors").read_bytes()
        for name in ("none", "some")
    ]
    assert weights[0] == weights[1]
    losses = [
        [(row["step"], row["loss"]) for row in read_metrics(tmp_path / name)]
        for name in ("none", "some")
    ]
    assert set(losses[0]) <= set(losses[1])


def test_what_a_task_raises_in_a_worker_is_raised_as_it_is(
    stub: ModuleType, tmp_path: Path
) -> None:
    class Damaged(stub.StubTask):
        def collate(self, examples: Any) -> Any:
            raise DataError("rows.tsv:7: no label")

    with pytest.raises(DataError, match=r"^rows\.tsv:7: no label$"):
        stub.run(stub.make_config(num_workers=1), tmp_path / "run", task=Damaged())


def test_a_worker_that_is_killed_ends_the_run_in_one_line(stub: ModuleType, tmp_path: Path) -> None:
    class Killed(stub.StubTask):
        def collate(self, examples: Any) -> Any:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(
        WellposedError, match=r"num_workers = 1: fewer need less memory.*--resume auto"
    ) as lost:
        stub.run(stub.make_config(num_workers=1), tmp_path / "run", task=Killed())
    assert "\n" not in str(lost.value)
