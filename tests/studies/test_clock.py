"""The seconds of a recipe are those of all its calls, stopped or killed ones too."""

from __future__ import annotations

import json
import pickle
import time
from pathlib import Path

import pytest

from wellposed.charts import Panel
from wellposed.errors import DataError
from wellposed.recipes.reproduce import (
    Recipe,
    Reproduction,
    Request,
    TimedProgress,
    reproduce,
)

TRAINS, DRAWS = "kim2021/figure-11", "kim2021/figure-2"


def slow(monkeypatch: pytest.MonkeyPatch, *, stops: bool = False) -> None:
    def made(recipe: Recipe, request: Request) -> Reproduction:
        time.sleep(0.15)
        request.announce("half way")
        if stops:
            raise KeyboardInterrupt
        return Reproduction([{"a": 1}], [Panel("t", "x", "y")], "nothing", None)

    monkeypatch.setattr(Recipe, "__call__", made)


def seconds(out: Path, name: str) -> float:
    reproduce(name, out=out)
    return json.loads((out / f"{name.replace('/', '-')}.json").read_text())["seconds"]


def test_a_stopped_call_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch, stops=True)
    for name in (TRAINS, DRAWS):
        with pytest.raises(KeyboardInterrupt):
            reproduce(name, out=tmp_path)
    slow(monkeypatch)
    assert seconds(tmp_path, TRAINS) >= 0.2
    assert seconds(tmp_path, TRAINS) >= 0.4
    assert seconds(tmp_path, DRAWS) < 0.3, "what trains nothing starts anew"
    reproduce(TRAINS, scale="medium", out=tmp_path)
    assert len(list((tmp_path / "seconds").iterdir())) == 2, "each scale has its own"


def test_a_killed_call_counts_up_to_its_last_line(tmp_path: Path) -> None:
    progress = TimedProgress(tmp_path / "a" / "b.txt", print)
    time.sleep(0.12)
    progress("half way")
    assert TimedProgress(tmp_path / "a" / "b.txt", print).seconds() >= 0.1


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("soon")
    with pytest.raises(
        DataError, match=r"b\.txt: expected the seconds of earlier calls, found 'soon'"
    ):
        TimedProgress(tmp_path / "b.txt", print)


def test_a_line_of_another_process_keeps_the_time(tmp_path: Path) -> None:
    """Recipes with several jobs send the function that takes their lines to the processes that
    train."""
    ticking = pickle.loads(pickle.dumps(TimedProgress(tmp_path / "seconds.txt", print)))
    time.sleep(0.15)
    ticking("half way")
    assert 0.1 <= float((tmp_path / "seconds.txt").read_text()) < 60
