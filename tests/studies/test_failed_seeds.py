"""Recipes with failed seeds: the reason is written down, and no verdict is drawn from
the survivors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from tests.studies.test_runs import BASE
from tests.support.finished_runs import finished

from wellposed.compare.compare import compare
from wellposed.recipes.reproduce import Request
from wellposed.report import aggregate, build_report
from wellposed.training import RunConfig
from wellposed_studies.huang2020.depth import summarise, train_depths
from wellposed_studies.study import FinishedRun, Sizes
from wellposed_studies.zhang2021 import tables


def test_a_depth_that_diverged_says_why(tmp_path: Path) -> None:
    request = Request("toy", tmp_path)
    sizes = Sizes(4, 1, 8, batch_size=4, pairs=40, depths=(1,), rates=(1e30,))
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
    base = replace(BASE, train=replace(BASE.train, learning_rate=1e30))
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


def study_runs(folder: Path, **scores: tuple[float | None, ...]) -> list[FinishedRun]:
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


def test_a_failed_transformer_does_not_count_as_a_score_of_zero(tmp_path: Path) -> None:
    study = tables.Study("corpus", RunConfig(task="translation"))
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
