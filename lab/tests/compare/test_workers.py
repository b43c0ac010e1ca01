"""Runs in parallel processes: the same bits as one after the other, and nothing left behind however
they end."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from lab.tests.support.runs import wait_for_rows
from tests.support.films import write_films
from tests.support.words import words as typed

from wellposed.errors import ConfigError
from wellposed.model_options import ModelOptions
from wellposed_lab.cli.main import main
from wellposed_lab.compare.runs import SPAWN, PlannedRun, check_jobs, say_nothing, train_planned
from wellposed_lab.training.config import RunConfig, TrainOptions

# A penalty of 1e38 times more than 4 is not finite in float32: those two runs fail.
WORDS = typed("compare text_classification --data films.tsv --variants post_ln,key:1e38 --seeds 2 "
"--steps 3 --learning-rate 1e-3 --schedule constant --max-length 5 --model.hidden-size 8 --model.num-hidden-layers 1 "
"--model.num-attention-heads 2 --batch-size 4 --log-every 1")  # fmt: skip
ENDLESS = [*WORDS, *typed("--variants post_ln --steps 100000 --jobs 2 --out out")]


def status(folder):
    return json.loads((folder / "result.json").read_text())["train_info"]["status"]


@pytest.mark.slow
def test_an_error_of_one_stops_the_others(tmp_path):
    small = ModelOptions(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
    options = {"data": str(write_films(tmp_path / "films.tsv")), "max_length": 5}
    train = TrainOptions(steps=100000, batch_size=4)
    config = RunConfig("text_classification", options, model=small, train=train)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "mine.txt").write_text("no run")
    planned = [PlannedRun(tmp_path / name, name, config) for name in ("good", "bad")]
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(ConfigError, match="not a run to resume"):
        list(train_planned(planned, announce=say_nothing, jobs=2))
    assert status(tmp_path / "good") == "cancelled"
    assert SPAWN.active_children() == []
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_impossible_jobs(monkeypatch, capsys):
    for words in ([*WORDS, "--jobs", "0"], ["reproduce", "kim2021/figure-3", "--jobs", "0"]):
        assert main(words) == 2
        assert "jobs = 0, expected" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="jobs = 2 under torchrun"):
        check_jobs(2)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_outlives_a_parent_that_is_killed(number, tmp_path):
    """A terminal sends SIGINT to the whole group."""
    write_films(tmp_path / "films.tsv")
    words = [sys.executable, "-m", "wellposed", *ENDLESS]
    parent = subprocess.Popen(words, cwd=tmp_path, start_new_session=True)
    runs = [tmp_path / "out" / "post_ln" / f"seed-{seed}" for seed in (0, 1)]
    try:
        for run in runs:
            wait_for_rows(parent, run, 2)
        send = os.killpg if number == signal.SIGINT else os.kill
        send(parent.pid, number)
        code = parent.wait(timeout=100)
        wait_until(lambda: all((run / "result.json").is_file() for run in runs))
    finally:
        parent.kill()
    assert [status(run) for run in runs] == ["cancelled"] * 2
    assert code == (-number if number == signal.SIGKILL else 130)


@pytest.mark.slow
def test_parallel_runs_are_the_same(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_films(tmp_path / "films.tsv")
    two = tmp_path / "two"
    one = tmp_path / "one"
    # A run whose loss is not finite has failed.
    assert main([*WORDS, "--jobs", "2", "--out", str(two)]) == 1
    parallel = capsys.readouterr()
    assert main([*WORDS, "--out", str(one), "--quiet"]) == 1
    serial = capsys.readouterr()
    # Remarks on the data go before.
    lines = parallel.out[parallel.out.index("[1/4]") :].splitlines()
    assert [line[:5] for line in lines[:4]] == ["[1/4]", "[2/4]", "[3/4]", "[4/4]"]
    assert lines[4:] == serial.out.replace(str(one), str(two)).splitlines()
    assert parallel.err.count("failed: ") == serial.err.count("failed: ") == 2
    runs = sorted(one.glob("*/seed-*"))
    assert len(runs) == 4
    for run in runs:
        twin = two / run.relative_to(one)
        for path in (run / "config.toml", *run.glob("*/*.safetensors")):
            assert path.read_bytes() == (twin / path.relative_to(run)).read_bytes(), path
    assert len(list(one.glob("*/seed-*/final/model.safetensors"))) == 2


def wait_until(holds):
    deadline = time.monotonic() + 120
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
