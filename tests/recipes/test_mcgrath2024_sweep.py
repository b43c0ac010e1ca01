"""The sweep of McGrath (2024) at toy size: stopped, shared between processes, resumed, tracked,
written."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from tests.support.mcgrath2024 import TINY
from tests.support.notebook import Notebook

from wellposed.cli import main
from wellposed.errors import ConfigError, ConvergenceError
from wellposed.recipes.mcgrath2024 import grid as study
from wellposed.recipes.mcgrath2024 import multitask, sweep


def settings(minbert: Path, out: Path, *names: str, seeds: int = 1) -> sweep.SweepSettings:
    return sweep.SweepSettings(
        data=str(minbert), out=str(out), scale="mini", options=TINY, cells=study.chosen_cells(names),
        seeds=tuple(range(seeds)),
    )  # fmt: skip


def test_a_sweep_stopped_in_the_middle_goes_on_and_ends_as_if_it_had_not(
    minbert: Path, tmp_path: Path
) -> None:
    whole = settings(minbert, tmp_path / "whole", "key:1e-2")
    sweep.open_sweep(whole, "never")
    assert sweep.run_sweep(whole, jobs=1, announce=lambda _: None)

    parts = settings(minbert, tmp_path / "parts", "key:1e-2")
    sweep.open_sweep(parts, "never")
    asked: list[int] = []
    with pytest.raises(sweep.Cancelled):
        sweep.work(parts, announce=lambda _: None, stop=lambda: asked.append(1) or len(asked) > 5)
    assert len(sweep.finished_results(parts)) == 1
    with pytest.raises(ConfigError, match="--resume auto"):
        sweep.open_sweep(parts, "never")
    sweep.open_sweep(parts, "auto")
    assert sweep.work(parts, announce=lambda _: None, stop=lambda: False) == 1
    timeless = [
        [
            {k: v for k, v in run.items() if "seconds" not in k}
            for run in sweep.finished_results(one)
        ]
        for one in (whole, parts)
    ]
    assert timeless[0] == timeless[1]


def test_cells_of_values_and_embeddings_join_a_sweep_that_began_without_them(
    minbert: Path, tmp_path: Path
) -> None:
    import dataclasses

    one = settings(minbert, tmp_path / "out", "key:1e-2")
    sweep.open_sweep(one, "never")
    assert sweep.run_sweep(one, jobs=1, announce=lambda _: None)
    more = dataclasses.replace(
        one, cells=study.chosen_cells(["key:1e-2", "value:1e-2", "embedding:1e-2"])
    )
    sweep.open_sweep(more, "auto")
    assert sweep.run_sweep(more, jobs=1, announce=lambda _: None)
    baseline, key, value, embedding = sweep.finished_results(more)
    assert [run["cell"] for run in (baseline, key, value, embedding)] == [
        cell.name for cell in more.cells
    ]
    for run, moved in ((value, "encoder.0.value"), (embedding, "token_embedding")):
        assert run["penalty"] > 0
        assert run["errors"][-1][moved] != baseline["errors"][-1][moved]


def test_a_trial_whose_process_died_is_trained_again_and_a_living_one_is_not(
    minbert: Path, tmp_path: Path
) -> None:
    one = settings(minbert, tmp_path / "out", "key:1e-2")
    sweep.open_sweep(one, "never")
    taken = sweep._take(one)
    assert taken is not None
    sweep.open_sweep(one, "auto")  # its lock is held: it is at work
    assert waiting(one) == 1
    taken[2].close()  # as the system does when the process dies
    sweep.open_sweep(one, "auto")
    assert waiting(one) == 2
    sweep.open_sweep(one, "auto")  # nothing is enqueued twice
    assert waiting(one) == 2


def waiting(one: sweep.SweepSettings) -> int:
    from optuna.trial import TrialState

    return len(sweep._study(one).get_trials(states=(TrialState.WAITING,)))


def test_other_settings_and_foreign_folders_are_refused_and_seeds_may_be_added(
    minbert: Path, tmp_path: Path
) -> None:
    import dataclasses

    one = settings(minbert, tmp_path / "out", "key:1e-2")
    sweep.open_sweep(one, "never")
    other = dataclasses.replace(one, options=dataclasses.replace(TINY, steps=9))
    with pytest.raises(ConfigError, match="steps: 3 then, 9 now"):
        sweep.open_sweep(other, "auto")
    sweep.open_sweep(dataclasses.replace(one, seeds=(0, 1)), "auto")
    assert waiting(one) == 4
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    with pytest.raises(ConfigError, match="is no sweep to resume"):
        sweep.open_sweep(dataclasses.replace(one, out=str(tmp_path / "mine")), "auto")


def test_a_training_that_diverges_is_a_result(
    minbert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def diverge(*_: Any, penalty: Any, **__: Any) -> dict[str, Any]:
        if penalty is not None:
            raise ConvergenceError("step 2: not finite")
        scores = {"sst": 0.3, "para": 0.6, "sts": 0.1, "overall": 0.48}
        return {"scores": scores, "errors": [{"step": 0, "encoder.0.key": 1.0}], "cpu_seconds": 1.0}

    monkeypatch.setattr(multitask, "train_multitask", diverge)
    monkeypatch.setitem(study.SCALES, "mini", TINY)
    out = tmp_path / "out"
    words = [
        "sweep",
        "mcgrath2024",
        "--data",
        str(minbert),
        "--out",
        str(out),
        "--cells",
        "key:1e-2",
        "--seeds",
        "1",
        "--jobs",
        "1",
    ]
    assert main(words) == 1
    assert "Failed: key:1e-2 seed 0: step 2: not finite" in (out / "results.md").read_text()


def test_a_tracker_is_told_of_every_training_and_of_the_tables(
    minbert: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(*_: Any, penalty: Any, **__: Any) -> dict[str, Any]:
        if penalty is not None:
            raise ConvergenceError("step 2: not finite")
        scores = {"sst": 0.3, "para": 0.6, "sts": 0.1, "overall": 0.48}
        errors = [{"step": step, "encoder.0.key": 1.0 + step} for step in (0, 2)]
        return {"scores": scores, "errors": errors, "cpu_seconds": 1.0}

    monkeypatch.setattr(Notebook, "records", [])
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "notebook", Notebook)
    monkeypatch.setattr(multitask, "train_multitask", train)
    monkeypatch.setitem(study.SCALES, "mini", TINY)
    words = [
        "sweep",
        "mcgrath2024",
        "--data",
        str(minbert),
        "--out",
        str(tmp_path / "out"),
        "--cells",
        "key:1e-2",
    ]
    assert main([*words, "--seeds", "1", "--jobs", "1", "--track", "notebook"]) == 1
    baseline, failed, tables = Notebook.records
    assert baseline.config is not None
    assert (baseline.config["cell"], baseline.config["seed"]) == ("baseline", 0)
    assert baseline.rows[:2] == [
        (step, {"orthogonality_error/encoder.0.key": 1.0 + step}) for step in (0, 2)
    ]
    assert baseline.rows[2][1]["final/valid/overall"] == 0.48
    assert failed.rows == [(0, {"final/succeeded": 0})]
    assert tables.rows[0][1]["final/baseline/sst"] == 0.3
    assert set(tables.shown) == {"figure-1", "figure-3", "table-1"}


def test_the_command_writes_his_figures_and_table(
    minbert: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(study.SCALES, "mini", TINY)
    out = tmp_path / "out"
    cells = "key:1e-2,householder:1e-6"
    words = [
        "sweep",
        "mcgrath2024",
        "--data",
        str(minbert),
        "--out",
        str(out),
        "--seeds",
        "2",
        "--jobs",
        "1",
        "--cells",
        cells,
    ]
    assert main(words) == 0
    printed = capsys.readouterr().out
    for said in (
        "paper says",
        "we got (key:1e-2)",
        "Holm over every cell",
        "QR loss by householder",
        "Drift of the",
    ):
        assert said in printed
    with (out / "table-1.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [(row["row"], row["source"]) for row in table][:4] == [
        ("baseline", "paper"), ("baseline", "ours"), ("key", "paper"), ("key", "ours"),
    ]  # fmt: skip
    runs = [
        json.loads((out / "trials" / "key-1e-2" / f"seed-{seed}.json").read_text())
        for seed in (0, 1)
    ]
    scores = [run["scores"]["overall"] for run in runs]
    assert float(table[3]["overall"]) == pytest.approx(sum(scores) / 2)
    assert float(table[3]["overall_se"]) == pytest.approx(abs(scores[0] - scores[1]) / 2)
    with (out / "figure-3.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert all(float(row["error_over_initial"]) == 1 for row in rows if row["step"] == "0")
    assert {row["step"] for row in rows} == {"0", "2", "3"}
    for name in ("figure-1.svg", "figure-3.svg", "table-1.svg", "sweep.csv", "results.md"):
        assert (out / name).stat().st_size > 200
    assert (
        main([*words, "--resume", "auto"]) == 0
    )  # nothing is left to train: the tables are written again
    assert main(words) == 2


@pytest.mark.slow
def test_interrupt_then_resume_in_two_processes(minbert: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code = (
        "import sys; from wellposed.recipes.mcgrath2024 import grid as study; from wellposed.cli"
        " import main\nfrom wellposed.recipes.mcgrath2024.multitask_options import"
        f" MultiTaskOptions\nstudy.SCALES['mini'] = MultiTaskOptions(**{TINY.to_dict()!r} |"
        " {'steps': 60})\nif __name__ == '__main__': raise SystemExit(main(sys.argv[1:]))\n"
    )
    script = tmp_path / "command.py"
    script.write_text(code)
    words = [
        "sweep",
        "mcgrath2024",
        "--data",
        str(minbert),
        "--out",
        str(out),
        "--seeds",
        "2",
        "--cells",
        "key:1e-2",
    ]
    started = subprocess.Popen(
        [sys.executable, str(script), *words, "--jobs", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 200
    while not list(out.glob("trials/*/seed-*.lock")) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(started.pid, signal.SIGINT)
    _, complaint = started.communicate(timeout=200)
    assert started.returncode == 130, complaint
    assert "--resume auto" in complaint
    done = len(list(out.glob("trials/*/seed-*.json")))
    assert done < 4
    again = subprocess.run(
        [sys.executable, str(script), *words, "--resume", "auto", "--jobs", "2", "--quiet"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert again.returncode == 0, again.stderr
    assert not re.search(r"^\[\d", again.stdout, re.MULTILINE), (
        "--quiet: no line of progress, of no process"
    )
    assert len(list(out.glob("trials/*/seed-*.json"))) == 4
    assert (out / "table-1.svg").exists()
