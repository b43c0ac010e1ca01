"""Recipes and sweeps with failed seeds: the reason is written down, and no verdict is drawn from
the survivors."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from wellposed.compare.compare import compare
from wellposed.recipes.reproduce import Request
from wellposed.report import aggregate, build_report
from wellposed.training import ModelOptions, RunConfig, TrainOptions
from wellposed_studies.huang2020.depth import Sizes, summarise, train_depths
from wellposed_studies.mcgrath2024 import output, sweep
from wellposed_studies.mcgrath2024.grid import chosen_cells
from wellposed_studies.mcgrath2024.multitask_options import MultiTaskOptions
from wellposed_studies.runs import FinishedRun
from wellposed_studies.zhang2021 import tables_1_2_3_4 as tables

GOOD = {
    "baseline": (0.50, 0.51, 0.52),
    "key:1e-2": (0.60, 0.62, 0.63),
    "query:1e-2": (0.55, 0.56, 0.58),
}


def test_a_depth_that_diverged_says_why(tmp_path: Path) -> None:
    request = Request("toy", tmp_path)
    sizes = Sizes((1,), steps=4, seeds=1, width=8, batch_size=4, pairs=40, learning_rates=(1e30,))
    fixup, post_ln = train_depths(request, sizes)
    reasons = {
        json.loads(file.read_text())["train_info"]["reason"]
        for file in tmp_path.rglob("result.json")
    }
    assert {fixup.failure, post_ln.failure} == reasons
    assert "" not in reasons
    rows = summarise(sizes, [fixup, post_ln]).rows
    assert [row["error"] for row in rows] == [fixup.failure, post_ln.failure]
    assert not any(row["trains"] for row in rows)


def test_a_real_comparison_whose_baseline_diverges_says_so_everywhere(tmp_path: Path) -> None:
    """With a learning rate of 1e30 both variants diverge; rezero is then trained again with
    1e-3."""
    base = RunConfig(
        task="listops",
        task_options={
            "min_length": 5,
            "max_length": 12,
            "num_train": 32,
            "num_valid": 8,
            "num_test": 8,
        },
        model=ModelOptions(hidden_size=8, num_hidden_layers=1, num_attention_heads=2),
        train=TrainOptions(
            steps=4, batch_size=4, eval_every=4, checkpoint_every=4, learning_rate=1e30
        ),
    )
    failing = compare(base, ["post_ln", "rezero"], seeds=2, out=tmp_path / "bad", progress=False)
    assert len(failing.failed) == 4
    found = aggregate(failing.folders)
    assert found.tasks == ()
    assert "no run of it finished" in found.table()
    good = replace(base, train=replace(base.train, learning_rate=1e-3))
    finished = compare(good, ["rezero"], seeds=2, out=tmp_path / "good", progress=False).folders
    asked_for = [tmp_path / "bad" / "post_ln", *finished]
    found = aggregate(asked_for)
    assert [result.variant for result in found.tasks[0].variants] == ["post_ln", "rezero"]
    said = "rezero against post_ln: cannot be said: the baseline post_ln failed on all seeds"
    assert said in found.table()
    assert said in build_report(asked_for, tmp_path / "report.html").read_text()


def write_results(folder: Path, failed: dict[str, tuple[int, ...]]) -> sweep.SweepSettings:
    """The results of a sweep of three cells, some of whose seeds failed."""
    settings = sweep.SweepSettings(
        data="", out=str(folder), scale="mini", options=MultiTaskOptions(),
        cells=chosen_cells(["key:1e-2", "query:1e-2"]), seeds=(0, 1, 2),
    )  # fmt: skip
    errors: list[dict[str, Any]] = [
        {"step": 0, "layer.0.key": 1.0},
        {"step": 1, "layer.0.key": 0.5},
    ]
    for cell in settings.cells:
        for seed in settings.seeds:
            record: dict[str, Any] = {
                "cell": cell.name,
                "seed": seed,
                "scale": "mini",
                "status": "success",
            }
            if seed in failed.get(cell.name, ()):
                record |= {"status": "failed", "error": "step 9: loss is nan"}
            else:
                overall = GOOD[cell.name][seed]
                scores = {
                    "sst": overall,
                    "para": overall,
                    "sts": 2 * overall - 1,
                    "overall": overall,
                }
                record |= {"scores": scores, "cpu_seconds": 1.0, "errors": errors}
            path = settings.result_path(sweep.Training(cell, seed))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(record))
    return settings


@pytest.mark.parametrize(
    ("failed", "verdicts"),
    [
        ({}, {"key:1e-2": "better by ", "query:1e-2": "better by "}),
        (
            {"key:1e-2": (2,)},
            {
                "key:1e-2": "cannot be said: 1 of 3 seeds failed (step 9: loss is nan)",
                "query:1e-2": "better by ",
            },
        ),
        (
            {"baseline": (0, 1, 2)},
            dict.fromkeys(
                ("key:1e-2", "query:1e-2"), "cannot be said: the baseline cell failed on all seeds"
            ),
        ),
        (
            {"baseline": (1,), "key:1e-2": (0, 1, 2)},
            {
                "key:1e-2": (
                    "cannot be said: 3 of 3 seeds failed (step 9: loss is nan); the baseline cell:"
                    " 1 of 3"
                ),
                "query:1e-2": "cannot be said: the baseline cell: 1 of 3 seeds failed",
            },
        ),
    ],
)
def test_cells_of_the_sweep_with_failed_seeds_have_no_verdict(
    tmp_path: Path, failed: dict[str, tuple[int, ...]], verdicts: dict[str, str]
) -> None:
    settings = write_results(tmp_path, failed)
    text = output.write_outputs(settings)
    with (tmp_path / "sweep.csv").open() as file:
        rows = {row["cell"]: row for row in csv.DictReader(file)}
    for cell, verdict in verdicts.items():
        assert rows[cell]["verdict"].startswith(verdict)
        assert (rows[cell]["p_holm"] == "") == verdict.startswith("cannot")
        assert rows[cell]["verdict"] in text
        assert rows[cell]["failed"] == str(len(failed.get(cell, ())))


def study_runs(folder: Path, **scores: tuple[float | None, ...]) -> list[FinishedRun]:
    """Runs with these BLEU scores by variant and seed; None is a run that failed."""
    return [
        FinishedRun(
            RunConfig(
                "translation", variant=variant.replace("_at_", ":"), train=TrainOptions(seed=seed)
            ),
            folder,
            {} if value is None else {"bleu,test": value, "perplexity,valid": 9.0},
        )
        for variant, values in scores.items()
        for seed, value in enumerate(values)
    ]


def test_a_failed_transformer_does_not_count_as_a_score_of_zero(tmp_path: Path) -> None:
    study = tables.Study("corpus", RunConfig(task="translation"), {})
    plain, oc3 = tables.TRANSFORMER, f"{tables.OC3}_at_1e-06"

    def compared(**scores: tuple[float | None, ...]) -> tuple[str, bool | None]:
        return tables.compare_variants(study, study_runs(tmp_path, **scores), [tables.OC3])

    assert compared(**{plain: (20.0, 20.1, 20.3), oc3: (25.0, 25.2, 25.1)})[1] is True
    for failed in ((None, None, None), (20.0, None, 20.3)):
        text, better = compared(**{plain: failed, oc3: (25.0, 25.2, 25.1)})
        assert better is None
        assert "cannot be said: the baseline" in text
    text, better = compared(**{plain: (20.0, 20.1, 20.3), oc3: (25.0, None, 25.1)})
    assert better is None
    assert "cannot be said: 1 of 3 seeds failed" in text
    assert compared(**{plain: (None,), oc3: (25.0,)})[1] is None
    assert compared(**{plain: (20.0,), oc3: (25.0,)})[1] is None
