"""Grids of runs are trained once and read back, with few batches of test if asked. A run that diverged
has its reason written down, and no verdict is drawn from the survivors."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from studies.tests.support.finished_runs import finished

from wellposed.model_options import ModelOptions
from wellposed_lab.compare.runs import PlannedRun
from wellposed_lab.training.config import RunConfig, TrainOptions
from wellposed_lab.training.folder.result import RunResult
from wellposed_studies.huang2020.depth import summarise, train_depths
from wellposed_studies.recipe import Request
from wellposed_studies.study import FinishedRun, Sizes, curves, train_grid
from wellposed_studies.zhang2021 import tables

SIZES = {"num_train": 32, "num_valid": 8, "num_test": 12}
BASE = RunConfig(
    task="listops",
    task_options={"min_length": 5, "max_length": 12, **SIZES},
    model=ModelOptions(hidden_size=8, num_hidden_layers=1, num_attention_heads=2),
    train=TrainOptions(steps=2, batch_size=4, eval_every=2, checkpoint_every=2, log_every=1),
)


def test_a_grid_is_trained_once_and_says_what_its_folders_say(tmp_path):
    lines = []
    request = Request("toy", tmp_path, announce=lines.append)
    wild = replace(BASE, train=replace(BASE.train, learning_rate=1e30, seed=1))
    grid = request.runs("grid")
    configs = {"a": BASE, "b": wild}
    planned = [PlannedRun(grid / name, name, config) for name, config in configs.items()]
    first, diverged = train_grid(request, planned)
    assert lines == ["a", "b"]
    assert first.folder == tmp_path / "runs" / "grid-toy" / "a"
    written = json.loads((first.folder / "result.json").read_text())
    assert first.metrics == written["results"]["listops"]
    assert first.reference == written["reference"]
    assert (first.config, first.seed, first.depth, first.failure) == (BASE, 0, 1, "")
    assert [step for step, _ in first.curve("train")] == [1, 2]
    (line,) = curves([first], "valid", lambda run: f"seed {run.seed}")
    assert line.label == "seed 0"
    assert diverged.metrics == {}
    assert diverged.metric("loss,test", math.inf) == math.inf
    result = json.loads((diverged.folder / "result.json").read_text())
    assert diverged.failure == result["train_info"]["reason"] != ""
    before = (first.folder / "result.json").stat().st_mtime_ns
    assert train_grid(request, planned[:1]) == [first]
    assert (first.folder / "result.json").stat().st_mtime_ns == before


def test_the_test_split_is_cut_short_only_where_asked(tmp_path):
    request = Request("toy", tmp_path)
    counts = {}
    for batches in (1, None):
        planned = [PlannedRun(tmp_path / f"{batches}", "", BASE)]
        (run,) = train_grid(request, planned, test_batches=batches)
        result = json.loads((run.folder / "result.json").read_text())
        counts[batches] = result["n-samples"]["listops"]
    assert counts == {1: {"valid": 8, "test": 4}, None: {"valid": 8, "test": 12}}


def test_a_cancelled_run_is_an_interrupt():
    with pytest.raises(KeyboardInterrupt):
        FinishedRun.from_result(RunResult("cancelled", Path("runs/a")))


def test_a_depth_that_diverged_says_why(tmp_path):
    request = Request("toy", tmp_path)
    sizes = Sizes(4, 1, 8, batch_size=4, pairs=40, depths=(1,), rates=(1e30,))
    fixup, post_ln = train_depths(request, sizes)
    files = tmp_path.rglob("result.json")
    reasons = {json.loads(file.read_text())["train_info"]["reason"] for file in files}
    assert {fixup.failure, post_ln.failure} == reasons
    assert "" not in reasons
    rows = summarise(request, sizes, [fixup, post_ln]).rows
    assert [row["error"] for row in rows] == [fixup.failure, post_ln.failure]
    assert not any(row["trains"] for row in rows)


def study_runs(folder, **scores):
    """Runs with these BLEU scores by variant and seed; None is a run that failed."""
    return [
        finished(
            "translation",
            variant.replace("_at_", ":"),
            {} if value is None else {"bleu,test": value, "perplexity,valid": 9.0},
            seed=seed,
            folder=folder,
        )
        for variant, values in scores.items()
        for seed, value in enumerate(values)
    ]


def test_a_failed_transformer_does_not_count_as_a_score_of_zero(tmp_path):
    plain = tables.TRANSFORMER
    oc3 = f"{tables.OC3}_at_1e-06"

    def compared(**scores):
        runs = study_runs(tmp_path, **scores)
        chosen = {
            one_label: [r for r in runs if r.variant.startswith(one_label)]
            for one_label in ("post_ln", "oc3")
        }
        return tables.compare_variants("corpus", ["bleu"], chosen)

    assert compared(**{plain: (20.0, 20.1, 20.3), oc3: (25.0, 25.2, 25.1)})[1] is True
    for failed in ((None, None, None), (20.0, None, 20.3)):
        text, better = compared(**{plain: failed, oc3: (25.0, 25.2, 25.1)})
        assert better is None
        assert "undecided: the baseline" in text
    text, better = compared(**{plain: (20.0, 20.1, 20.3), oc3: (25.0, None, 25.1)})
    assert better is None
    assert "undecided: 1 of 3 seeds failed" in text
    assert compared(**{plain: (None,), oc3: (25.0,)})[1] is None
    assert compared(**{plain: (20.0,), oc3: (25.0,)})[1] is None
