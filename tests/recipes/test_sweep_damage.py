"""A sweep whose files were damaged says which, and finished trainings survive the loss of the
rest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.minbert import write_minbert

from wellposed.errors import CheckpointError, ConfigError
from wellposed.recipes.mcgrath2024 import grid, sweep
from wellposed.recipes.mcgrath2024.multitask_options import MultiTaskOptions
from wellposed.recipes.mcgrath2024.trial_files import read_record, write_record

RECORD = {
    "cell": "baseline", "seed": 0, "status": "success", "scores": {"sst": 0.5, "para": 0.5, "sts": 0.1, "overall": 0.5},
    "cpu_seconds": 1.0, "errors": [], "scale_free_errors": [], "train_loss": float("nan"),
}  # fmt: skip


@pytest.fixture
def settings(tmp_path: Path) -> sweep.SweepSettings:
    (tmp_path / "data").mkdir()
    data = str(write_minbert(tmp_path / "data"))
    cells = grid.chosen_cells(["key:1e-2"])
    found = sweep.SweepSettings(
        data, str(tmp_path / "out"), "toy", MultiTaskOptions(steps=1), cells, (0,)
    )
    sweep.open_sweep(found, "never")
    return found


@pytest.mark.parametrize(
    "damage",
    [b'{"op_code": 9' + b"9" * 5000 + b"}\n", b"[" * 100_000 + b"\n", b"null\n", b"\xff\n"],
)
def test_a_damaged_journal_is_named_and_can_be_removed(
    settings: sweep.SweepSettings, damage: bytes
) -> None:
    out = Path(settings.out)
    journal = out / sweep.JOURNAL
    first = settings.result_path(settings.trainings()[0])
    first.parent.mkdir(parents=True)
    write_record(first, RECORD)
    journal.write_bytes(damage + journal.read_bytes())
    with pytest.raises(
        CheckpointError, match=r"journal\.log: cannot be read .*remove it and go on"
    ):
        sweep.open_sweep(settings, "auto")
    journal.unlink()
    sweep.open_sweep(settings, "auto")
    assert [record["cell"] for record in sweep.finished_results(settings)] == ["baseline"]


@pytest.mark.parametrize("content", ["null", "[]", '{"settings": 5}', "{", "[" * 100_000])
def test_damaged_settings_are_named(settings: sweep.SweepSettings, content: str) -> None:
    (Path(settings.out) / sweep.SETTINGS).write_text(content)
    with pytest.raises(CheckpointError, match=r"sweep\.json: damaged"):
        sweep.open_sweep(settings, "auto")


def test_a_changed_digit_of_a_result_is_found(tmp_path: Path) -> None:
    path = tmp_path / "seed-0.json"
    write_record(path, RECORD)
    assert read_record(path) == {**RECORD, "train_loss": None}
    path.write_text(path.read_text().replace('"sst": 0.5', '"sst": 0.6'))
    with pytest.raises(
        CheckpointError, match=r"seed-0\.json: SHA-256 is \w+, expected \w+ \(altered\); remove it"
    ):
        read_record(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"scores": 5},
        {"scores": {}},
        {"seed": "0"},
        {"status": "well"},
        {"cell": None},
        {"errors": None},
    ],
)
def test_a_result_of_before_digests_is_checked_by_its_types(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    path = tmp_path / "seed-0.json"
    path.write_text(json.dumps({**RECORD, "train_loss": 1.0}))
    assert read_record(path)["cell"] == "baseline"
    path.write_text(json.dumps({**RECORD, "train_loss": 1.0, **changes}))
    with pytest.raises(
        CheckpointError, match=r"seed-0\.json: .*it is not the result of a training"
    ):
        read_record(path)


def test_a_sweep_joins_one_that_begins_at_the_same_moment(
    settings: sweep.SweepSettings, tmp_path: Path
) -> None:
    """Of two that were started together, one was told that the folder holds no sweep."""
    begun = tmp_path / "begun"
    begun.mkdir()
    (begun / sweep.LOCK).touch()
    (begun / ".tmp-1-sweep.json").write_text("{")
    sweep.open_sweep(replace(settings, out=str(begun)), "auto")
    assert (begun / sweep.SETTINGS).is_file()
    (begun / sweep.SETTINGS).unlink()
    with pytest.raises(ConfigError, match="holds files but no"):
        sweep.open_sweep(replace(settings, out=str(begun)), "auto")
