"""Grids of runs: trained once, read back, told apart when they diverge, and cut short on test where
asked."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from wellposed.compare.runs import PlannedRun
from wellposed.recipes.reproduce import Request
from wellposed.training import ModelOptions, RunConfig, RunResult, TrainOptions
from wellposed_studies.study import FinishedRun, curves, mean_and_error, train_grid

SIZES = {"num_train": 32, "num_valid": 8, "num_test": 12}
BASE = RunConfig(
    task="listops",
    task_options={"min_length": 5, "max_length": 12, **SIZES},
    model=ModelOptions(hidden_size=8, num_hidden_layers=1, num_attention_heads=2),
    train=TrainOptions(steps=2, batch_size=4, eval_every=2, checkpoint_every=2, log_every=1),
)


def test_a_grid_is_trained_once_and_says_what_its_folders_say(tmp_path: Path) -> None:
    said: list[str] = []
    request = Request("toy", tmp_path, announce=said.append)
    wild = replace(BASE, train=replace(BASE.train, learning_rate=1e30, seed=1))
    planned = [
        PlannedRun(request.runs("grid") / name, name, config)
        for name, config in (("a", BASE), ("b", wild))
    ]
    first, diverged = train_grid(request, planned)
    assert said == ["a", "b"]
    assert first.folder == tmp_path / "runs" / "grid-toy" / "a"
    written = json.loads((first.folder / "result.json").read_text())
    assert first.metrics == written["results"]["listops"]
    assert first.reference == written["reference"]
    assert (first.config, first.seed, first.depth, first.failure) == (BASE, 0, 1, "")
    assert [step for step, _ in first.curve("train")] == [1, 2]
    assert [line.label for line in curves([first], "valid", lambda run: f"seed {run.seed}")] == [
        "seed 0"
    ]
    assert diverged.metrics == {}
    assert diverged.metric("loss,test", math.inf) == math.inf
    found = json.loads((diverged.folder / "result.json").read_text())
    assert diverged.failure == found["train_info"]["reason"] != ""
    before = (first.folder / "result.json").stat().st_mtime_ns
    assert train_grid(request, planned[:1]) == [first]
    assert (first.folder / "result.json").stat().st_mtime_ns == before


def test_the_test_split_is_cut_short_only_where_asked(tmp_path: Path) -> None:
    request = Request("toy", tmp_path)
    counts = {}
    for batches in (1, None):
        planned = [PlannedRun(tmp_path / f"{batches}", "", BASE)]
        (run,) = train_grid(request, planned, test_batches=batches)
        found = json.loads((run.folder / "result.json").read_text())
        counts[batches] = found["n-samples"]["listops"]
    assert counts == {1: {"valid": 8, "test": 4}, None: {"valid": 8, "test": 12}}


def test_a_cancelled_run_is_an_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt):
        FinishedRun.of(RunResult("cancelled", Path("runs/a")))


def test_mean_and_error_by_hand() -> None:
    assert mean_and_error([1.0, 2.0, 3.0]) == (2.0, pytest.approx(1 / math.sqrt(3)))
    assert mean_and_error([4.0]) == (4.0, pytest.approx(math.nan, nan_ok=True))
    mean, error = mean_and_error([1.0, math.nan])
    assert math.isnan(mean)
    assert math.isnan(error)
