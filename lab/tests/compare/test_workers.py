"""Runs in parallel processes: the same bits as one after the other, and nothing left behind however
they end."""

import os
import signal
import subprocess
import sys
import time

import pytest
from lab.tests.support import worker_jobs
from lab.tests.support.worker_jobs import one_of_two
from tests.support.films import write_films
from tests.support.refusal import refuses_config
from tests.support.words import words as typed

from wellposed.errors import DataError, WellposedError
from wellposed_lab.cli.main import main
from wellposed_lab.compare.runs import SPAWN, Workers, check_jobs

# A penalty of 1e38 times more than 4 is not finite in float32: those two runs fail.
WORDS = typed("compare text_classification --data films.tsv --variants post_ln,key:1e38 --seeds 2 "
"--steps 3 --schedule constant --max-length 5 --model.hidden-size 8 --model.num-hidden-layers 1 "
"--model.num-attention-heads 2 --batch-size 4 --log-every 1")  # fmt: skip


def work_to_the_end(workers):
    with workers:
        while workers.at_work():
            pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "raises", "says", "other"),
    [("error", DataError, "row 7", "stopped"), ("killed", WellposedError, "status -9", "finished")],
)
def test_a_failing_worker(way, raises, says, other, tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    workers = Workers(2, one_of_two, tmp_path, SPAWN.Value("i", 0), way)
    with pytest.raises(raises, match=says):
        work_to_the_end(workers)
    assert (tmp_path / way).read_text() == other
    assert SPAWN.active_children() == []
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_impossible_jobs(monkeypatch, capsys):
    for words in ([*WORDS, "--jobs", "0"], ["reproduce", "kim2021/figure-3", "--jobs", "0"]):
        assert main(words) == 2
        assert "jobs = 0, expected" in capsys.readouterr().err
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    refuses_config("jobs = 2 under torchrun", check_jobs, 2)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_parent_that_is_killed(how, tmp_path):
    parent = subprocess.Popen([sys.executable, worker_jobs.__file__, str(tmp_path)])
    try:
        wait_until(lambda: said(tmp_path) == ["at work"] * 2)
        workers = [int(path.name) for path in tmp_path.iterdir()]
        parent.send_signal(how)
        parent.wait(timeout=100)
        wait_until(lambda: not any(map(lives, workers)))
    finally:
        parent.kill()
    assert said(tmp_path) == ["stopped"] * 2
    assert parent.returncode == (-how if how == signal.SIGKILL else 0)


@pytest.mark.slow
def test_parallel_runs_are_the_same(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_films(tmp_path / "films.tsv")
    two, one = tmp_path / "two", tmp_path / "one"
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


def said(folder):
    return [path.read_text() for path in folder.iterdir()]


def lives(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
