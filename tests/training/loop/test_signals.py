"""Signals and kills of a real process: a run that is asked to stop ends in order, and one that is
killed goes on bit for bit."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.support.runs import start_stub, wait_for_rows

from wellposed.training.folder import checkpoints
from wellposed.training.loop.processes import StopRequest


@pytest.mark.slow
def test_a_signal_ends_the_run_in_order(tmp_path):
    """One process for each signal, side by side."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    started = {number: start_stub(tmp_path / number.name, 100000, 0.01) for number in signals}
    try:
        for number, process in started.items():
            wait_for_rows(process, tmp_path / number.name, 8)
            process.send_signal(number)
        for number, process in started.items():
            out, (stdout, stderr) = tmp_path / number.name, process.communicate(timeout=60)
            assert (process.returncode, stdout) == (130, "cancelled\n")
            assert "Traceback" not in stderr
            assert "continue with --resume auto" in stderr
            info = json.loads((out / "result.json").read_text())["train_info"]
            assert info["status"] == "cancelled"
            newest, damaged = checkpoints.newest_complete(out)
            assert newest is not None
            assert not damaged
            assert checkpoints.step_of(newest) == info["steps"]
    finally:
        for process in started.values():
            process.kill()


def test_handlers_are_put_back_and_other_threads_left_alone():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopRequest():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before

    def enter():
        with StopRequest() as stop:
            return stop.requested

    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(enter).result()


def test_a_hangup_that_is_ignored_stays_ignored():
    """`nohup wellposed train ...` outlives its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_request_inside_another_is_heard_by_both():
    with StopRequest() as outer:
        with StopRequest() as inner:
            signal.raise_signal(signal.SIGTERM)
        assert (outer.requested, inner.requested) == (True, True)
        with StopRequest() as later:
            assert later.requested, "what was asked before it began"
            with pytest.raises(KeyboardInterrupt, match="second signal"):
                signal.raise_signal(signal.SIGTERM)
    with StopRequest() as other:
        assert not other.requested


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the script forks")
def test_killed_at_the_last_renames(tmp_path):
    """At random moments it is killed by the smallest search for faults."""
    alone = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    words = [sys.executable, "-m", "tests.support.kill_and_resume", str(tmp_path)]
    where = {"env": {**os.environ, **alone}, "cwd": Path(__file__).parents[3]}
    done = subprocess.run(words, capture_output=True, text=True, check=False, **where)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert len(outcomes) >= 2 * 3  # of env.json, manifest.json and result.json at least
    for outcome in outcomes:
        assert outcome == {"killed": -9, "resumed": 0, "litter": [], "different": []}, outcomes
