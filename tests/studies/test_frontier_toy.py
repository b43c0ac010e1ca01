"""The studies of certified accuracy and depth at toy scale: certified is never above attacked."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from wellposed.errors import ConfigError, DataError
from wellposed.recipes.recipe import Request
from wellposed.recipes.reproduce import RECIPES, reproduce
from wellposed.training.certified.record import TOKEN_SHARES


def write_texts(folder: Path) -> Path:
    rng = random.Random(0)
    folder.mkdir(parents=True)
    pairs = [("pos", "good"), ("neg", "bad")] * 40
    rows = "".join(f"{label}\ta {word} film {rng.choice('xyz')}\n" for label, word in pairs)
    (folder / "train.tsv").write_text(f"label\ttext\n{rows}", encoding="utf-8")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["frontier/accuracy", "frontier/depth"])
def test_every_study_runs_at_toy_scale(name: str, tmp_path: Path) -> None:
    write_texts(tmp_path / "data" / "ag_news")
    done = reproduce(name, scale="toy", out=tmp_path / "out", data=str(tmp_path / "data"))
    assert done.result.holds is None
    assert all(file.stat().st_size > 0 for file in done.files)
    rows = done.result.rows
    if name == "frontier/accuracy":
        models = {row["model"] for row in rows}
        assert {"post_ln", "rezero", "lipschitz, T = 10", "no blocks, T = 10"} <= models
        assert {row["radius"] for row in rows if "radius" in row} == set(TOKEN_SHARES)
        assert all(row["certified"] <= row["attacked"] for row in rows if "radius" in row)
        totals = [
            row["total"]
            for row in rows
            if "total" in row and row["model"].startswith(("lipschitz", "no blocks"))
        ]
    else:
        assert {row["blocks"] for row in rows} == {1, 2}
        totals = [row["total"] for row in rows if row["model"] == "lipschitz"]
    assert totals
    assert max(totals) <= 1


def test_a_study_without_its_texts_says_what_it_needs(tmp_path: Path) -> None:
    recipe = RECIPES.get("frontier/accuracy")
    with pytest.raises(ConfigError, match="ag_news, imdb"):
        recipe(Request("toy", tmp_path))
    with pytest.raises(DataError, match="found none"):
        recipe(Request("toy", tmp_path, data=str(tmp_path)))
