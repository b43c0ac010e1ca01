"""``reproduce frontier/translation``: its verdict on both sides, its settings, and a run of
seconds, made once."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from tests.support.finished_runs import written

from wellposed.recipes.reproduce import reproduce
from wellposed_studies.frontier.translation import (
    CONSTRAINTS,
    LABELS,
    MARGIN,
    STRENGTHS,
    TRANSFORMERS,
    gains_over_norms,
    judge,
)


@pytest.mark.parametrize(
    ("gains", "verdict"),
    [
        ([0.1, -0.1, 0.0], True),
        ([-MARGIN - 1, -MARGIN - 1.1, -MARGIN - 0.9], False),
        ([2.0, -3.0, 0.5], None),
        ([1.0], None),
    ],
)
def test_half_a_bleu_decides(gains: list[float], verdict: bool | None) -> None:
    assert judge(gains) is verdict


def test_the_better_normalised_model_is_the_one_with_the_higher_mean() -> None:
    bleu = {"post_ln": [20.0, 30.0], "pre_ln": [24.0, 24.0], "t_fixup": [25.0, 25.0]}
    assert gains_over_norms(bleu) == [5.0, -5.0]


@pytest.mark.slow
def test_every_model_tries_its_settings_and_finished_runs_are_kept(tmp_path: Path) -> None:
    done = reproduce("frontier/translation", scale="toy", out=tmp_path)
    assert done.result.holds is None
    every = list(csv.DictReader((tmp_path / "frontier-translation.csv").read_text().splitlines()))
    rows, longer = (
        [row for row in every if (row["steps"] == "3") is short] for short in (True, False)
    )
    settings = {
        label: [row["setting"] for row in rows if row["model"] == label]
        for label in LABELS.values()
    }
    tried = {label: len(set(settings[label])) for label in LABELS.values()}
    assert all(tried[label] == len(STRENGTHS) for label in CONSTRAINTS.values())
    assert all(3 <= tried[label] <= 6 for label in TRANSFORMERS.values())
    assert set(settings["VAR-II"]) == {f"strength {strength:g}" for strength in STRENGTHS}
    kept = {row["model"]: row for row in rows if row["kept"] == "True"}
    rates = {kept[label]["learning_rate"] for label in ("VAR-I", "VAR-II", "VAR-III", "post-LN")}
    assert len(rates) == 1
    for label in LABELS.values():
        losses = [float(row["valid_loss"]) for row in rows if row["model"] == label]
        assert float(kept[label]["valid_loss"]) == min(losses)
    assert {(row["model"], row["steps"]) for row in longer} == {
        (label, "6") for label in LABELS.values()
    }
    assert all(
        row[part] == kept[row["model"]][part]
        for row in longer
        for part in ("learning_rate", "setting")
    )
    finished = written(tmp_path)
    assert len(finished) == sum(tried.values()) + len(LABELS)
    reproduce("frontier/translation", scale="toy", out=tmp_path)
    assert written(tmp_path) == finished
