"""The recipes of McGrath (2024) at toy size: what they train, their rows, and their verdicts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.support.mcgrath2024 import TINY

from wellposed.recipes.reproduce import RECIPES, Reproduced, reproduce
from wellposed_studies.mcgrath2024 import figures_1_3_table_1_qr as recipes
from wellposed_studies.mcgrath2024 import grid as study
from wellposed_studies.mcgrath2024 import multitask, results, sweep


@pytest.fixture(scope="module")
def made(minbert: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reproduced]:
    """Every recipe in one folder: the trainings of the first are those of the next."""
    out = tmp_path_factory.mktemp("made")
    names = [
        name
        for name in RECIPES
        if name.startswith("mcgrath2024/") and name != "mcgrath2024/pretrained"
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(study.SCALES, "toy", TINY)
        found = {name: reproduce(name, scale="toy", out=out, data=str(minbert)) for name in names}
        trained = multitask.train_multitask
        patch.setattr(multitask, "train_multitask", lambda *_, **__: pytest.fail("trained twice"))
        again = reproduce("mcgrath2024/table-1", scale="toy", out=out, data=str(minbert))
        patch.setattr(multitask, "train_multitask", trained)
    assert again.result.rows == found["mcgrath2024/table-1"].result.rows
    return found


def test_recipes_train_only_the_cells_they_need_and_each_once(made: dict[str, Reproduced]) -> None:
    out = made["mcgrath2024/qr"].files[0].parent
    trained = sorted(
        path.parent.name for path in out.glob("runs/mcgrath2024-toy/trials/*/seed-*.json")
    )
    assert trained == sorted(2 * [cell.folder for cell in study.grid()])
    cells = [row["cell"] for row in made["mcgrath2024/qr"].result.rows]
    assert cells == [
        "baseline",
        *(cell.name for cell in study.grid() if cell.form in study.QR_METHODS),
    ]
    cells = [row["cell"] for row in made["mcgrath2024/figure-1"].result.rows]
    assert cells == [cell.name for cell in study.grid() if cell.form in ("none", "gram")]


def test_rows_of_the_recipes_are_the_results_of_the_trainings(made: dict[str, Reproduced]) -> None:
    done = made["mcgrath2024/table-1"]
    rows = [(row["row"], row["source"]) for row in done.result.rows]
    assert rows == [
        (name, source)
        for name in ("baseline", "key", "query", "key and query")
        for source in ("paper", "ours")
    ]
    trials = done.files[0].parent / "runs" / "mcgrath2024-toy" / "trials"
    runs = [json.loads((trials / "baseline" / f"seed-{seed}.json").read_text()) for seed in (0, 1)]
    assert done.result.rows[1]["overall"] == pytest.approx(
        sum(run["scores"]["overall"] for run in runs) / 2
    )
    drift = made["mcgrath2024/figure-3"].result.rows
    last = [
        row["error"]
        for row in drift
        if row["seed"] == 1 and row["step"] == 3 and row["weight"] == "encoder.0.key"
    ]
    assert last == [runs[1]["errors"][-1]["encoder.0.key"]]
    for done in made.values():
        assert done.result.holds is None
        assert done.files[1].read_text().startswith("<?xml")
        assert "a small BERT from scratch" in done.row()


@pytest.mark.parametrize(
    ("alone", "both", "qr", "verdicts"),
    [
        (0.1, -0.1, -0.4, (True, True, True, True)),
        (-0.1, -0.1, 0.0, (False, False, False, False)),
        (0.0, 0.0, -0.4, (None, None, True, None)),
        (0.0, 0.0, 0.0, (None, None, False, False)),
    ],
)
def test_verdicts_at_mini_scale(
    minbert: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    alone: float,
    both: float,
    qr: float,
    verdicts: tuple[bool | None, ...],
) -> None:
    def finish(settings: sweep.SweepSettings, **_: Any) -> bool:
        for key in settings.trainings():
            gain = {"none": 0.0, "gram": both if key.cell.place == "key+query" else alone}.get(
                key.cell.form, qr
            )
            overall = (
                0.5
                + 0.001 * key.seed
                + gain
                + (1e-4 * key.seed if key.cell.form != "none" else 0.0)
            )
            scores = {"sst": 0.3, "para": 0.6, "sts": 0.1, "overall": overall}
            errors = [
                {"step": step, "encoder.0.key": 1.0 - step / 10, "affinity.0": 1.0 + step}
                for step in (0, 1)
            ]
            result = {
                "scores": scores,
                "errors": errors,
                "cpu_seconds": 1.0,
                "cell": key.cell.name,
                "seed": key.seed,
            }
            settings.result_path(key).parent.mkdir(parents=True, exist_ok=True)
            settings.result_path(key).write_text(json.dumps({**result, "status": "success"}))
        return True

    monkeypatch.setattr(recipes, "open_sweep", lambda settings, resume: None)
    monkeypatch.setattr(recipes, "run_sweep", finish)
    holds = {
        item: reproduce(
            f"mcgrath2024/{item}", scale="mini", out=tmp_path, data=str(minbert), encoder="mine"
        ).result.holds
        for item in ("figure-1", "table-1", "qr", "pretrained", "figure-3")
    }
    assert holds == dict(
        zip(("figure-1", "table-1", "qr", "pretrained"), verdicts, strict=True)
    ) | {"figure-3": True}
    from_scratch = reproduce("mcgrath2024/figure-3", scale="mini", out=tmp_path, data=str(minbert))
    assert from_scratch.result.holds is None


@pytest.mark.parametrize(
    ("key", "affinity", "verdict"),
    [
        ((0.9, 0.92, 0.91), (1.1, 1.11, 1.12), True),
        ((0.9, 0.92, 0.91), (0.8, 0.82, 0.81), False),
        ((1.1, 1.12, 1.11), (1.1, 1.11, 1.12), False),
        ((0.9, 1.12, 0.9), (1.1, 1.11, 1.12), None),
        (
            (1.01, 1.03, 1.02),
            (1.1, 1.11, 1.12),
            None,
        ),  # two errors above 1, and p = 0.07 before Holm's correction
        ((0.9, 0.92, 0.91), (0.8, 1.3, 0.8), None),
        ((0.9, 0.92, 0.91), (1.1, 1.11, math.nan), None),
    ],
)
def test_the_drift_is_judged_by_every_weight_with_its_error(
    key: tuple[float, ...], affinity: tuple[float, ...], verdict: bool | None
) -> None:
    unread = {"encoder.0.output": (2.0, 2.0, 2.0)}
    rows = [
        {"seed": seed, "step": 9, "weight": weight, "error_over_initial": ratio}
        for weight, ratios in {
            "encoder.0.key": key,
            "encoder.1.key": (0.9, 0.9, 0.9),
            "affinity.0": affinity,
            **unread,
        }.items()
        for seed, ratio in enumerate(ratios)
    ]
    first = [{**row, "step": 0, "error_over_initial": 1.0} for row in rows]
    assert results.judge_drift(first + rows) is verdict
    assert results.judge_drift([]) is None
