"""Verdicts follow from the numbers: the same recipe holds or does not as its runs come out."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from wellposed.recipes.kim2021 import figures_4_9_11_tables_2_3 as kim
from wellposed.recipes.kim2021.language_models import LABELS, Sizes
from wellposed.recipes.reproduce import Request, reproduce
from wellposed.recipes.runs import FinishedRun
from wellposed.recipes.sengupta2023 import tables_1_2_3 as sengupta
from wellposed.recipes.sengupta2023.trained import VARIANTS, Study
from wellposed.training.config import ModelOptions, RunConfig, TrainOptions

ENTROPY = 3.0
GOOD = {"lstm": 1.0, "dot_product": 1.0, "l2": 1.01, "l2_tied": 1.05, "l2_contractive": 1.1, "l2_tied_wide": 1.04}


def finished(task: str, variant: str, metrics: dict[str, float], *, depth: int = 1, seed: int = 0) -> FinishedRun:
    model, train = ModelOptions(num_hidden_layers=depth), TrainOptions(seed=seed)
    config = RunConfig(task, variant=variant, model=model, train=train)
    folder = Path("nowhere") / "gamma0.5"
    return FinishedRun(config, folder, metrics, {"nats_per_char": ENTROPY}, {"parameters": 7, "seconds": 1.0})


def language_models(monkeypatch: pytest.MonkeyPatch, nll: dict[str, float], deep: dict[str, float]) -> None:
    """Let the grid come out with these test NLL at one layer and at the deepest."""

    def trained(request: Request, group: str, kinds: tuple[str, ...], sizes: Sizes) -> list[FinishedRun]:
        del request, group
        return [
            finished("char_lm", kind, dict.fromkeys(("nats_per_char,test", "nats_per_char,valid"), value), depth=depth)
            for kind in kinds
            for depth, value in zip(sizes.depths, [nll[kind]] * (len(sizes.depths) - 1) + [deep[kind]], strict=True)
        ]

    monkeypatch.setattr(kim, "train_models", trained)


@pytest.mark.parametrize(
    ("recipe", "broken", "deep_broken"),
    [
        ("figure-4", {"l2": 2.0}, {"l2": 2.0}),
        ("figure-4", {"l2_contractive": 1.0}, {"l2_contractive": 1.0}),
        ("table-2", {"l2_contractive": 0.9}, {}),
        ("figure-9", {"l2_tied_wide": 0.5}, {}),
        ("figure-11", {}, {"dot_product": 1.0}),
        ("figure-11", {}, {"l2_tied": ENTROPY}),
        ("table-3", {}, {"l2_contractive": ENTROPY}),
    ],
)
def test_language_models(
    recipe: str,
    broken: dict[str, float],
    deep_broken: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    deep = {**GOOD, "dot_product": ENTROPY} if recipe in ("figure-11", "table-3") else GOOD
    language_models(monkeypatch, GOOD, deep)
    done = reproduce(f"kim2021/{recipe}", out=tmp_path / "holds")
    assert done.result.holds is True
    if recipe.startswith("table"):
        assert {row["attention"] for row in done.result.rows} <= set(LABELS.values())
        assert {row["setting"] for row in done.result.rows} == {"gamma0.5"}
        assert all(row["test_nll"] == row["valid_nll"] for row in done.result.rows)
    language_models(monkeypatch, GOOD | broken, deep | deep_broken)
    assert reproduce(f"kim2021/{recipe}", out=tmp_path / "broken").result.holds is False
    language_models(monkeypatch, GOOD | broken, deep | deep_broken)
    assert reproduce(f"kim2021/{recipe}", scale="toy", out=tmp_path / "toy").result.holds is None


def five_models(monkeypatch: pytest.MonkeyPatch, metric: str, values: dict[str, float | None]) -> None:
    """Let each model reach its value with every seed, a thousandth more with each; None is a run that diverged."""

    def trained(request: Request, study: Study) -> tuple[Any, list[FinishedRun]]:
        del request
        runs = [
            finished(
                study.task,
                variant,
                {} if value is None else {f"{metric},{split}": value + seed / 1000 for split in ("test", "valid")},
                seed=seed,
            )
            for seed in range(study.sizes.seeds)
            for variant, value in values.items()
        ]
        return SimpleNamespace(reference=lambda: {metric: 0.5}), runs

    monkeypatch.setattr(sengupta, "train_study", trained)
    monkeypatch.setattr(sengupta, "probe_batches", lambda request, task: [])
    monkeypatch.setattr(sengupta, "_about_tokens", lambda runs, batches: {})


@pytest.mark.parametrize(
    ("transject", "random", "holds"), [(0.8, 0.85, True), (0.8, 0.6, False), (0.6, 0.85, False), (None, 0.85, None)]
)
def test_table_1_wants_each_of_the_two_to_win_its_task(
    transject: float | None, random: float, holds: bool | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("imdb", "ag_news"):
        (tmp_path / "data" / name).mkdir(parents=True)
    plain = dict.fromkeys(("post_ln", "rezero", "orthogonal"), 0.7)
    five_models(monkeypatch, "accuracy", {**plain, "transject": transject, "transject_random": random})
    done = reproduce("sengupta2023/table-1", out=tmp_path, data=str(tmp_path / "data"))
    assert done.result.holds is holds
    assert [row["task"] for row in done.result.rows] == ["imdb"] * len(VARIANTS) + ["ag_news"] * len(VARIANTS)
    first = done.result.rows[0]
    assert first["ours"] == pytest.approx(70.1)
    assert first["standard_error"] == pytest.approx(0.1 / 3**0.5)
    assert first["over_transformer"] == 0
    assert first["paper"] == 81.3


@pytest.mark.parametrize(("transject", "holds"), [(100.0, True), (300.0, False)])
def test_table_3_wants_the_least_perplexity(
    transject: float, holds: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    values: dict[str, float | None] = {**dict.fromkeys(VARIANTS, 200.0), "transject": transject}
    five_models(monkeypatch, "perplexity", values)
    done = reproduce("sengupta2023/table-3", out=tmp_path)
    assert done.result.holds is holds
    assert done.result.rows[3]["paper_valid"] == 134.82


def test_table_2_judges_the_tasks_that_are_learnt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain = dict.fromkeys(("post_ln", "rezero", "orthogonal", "transject_random"), 0.7)
    for transject, holds in ((0.8, True), (0.6, False)):
        five_models(monkeypatch, "accuracy", {**plain, "transject": transject})
        done = reproduce("sengupta2023/table-2", out=tmp_path / str(holds))
        assert done.result.holds is holds
        assert "lra-text needs data=imdb and was left out" in done.result.notes
        assert where_average(done.result.rows)["TransJect"] == pytest.approx(100 * transject + 0.1)
    five_models(monkeypatch, "accuracy", dict.fromkeys(VARIANTS, 0.5))
    assert reproduce("sengupta2023/table-2", out=tmp_path / "chance").result.holds is None


def where_average(rows: Any) -> dict[str, float]:
    return {row["model"]: row["ours"] for row in rows if row["task"] == "average"}
