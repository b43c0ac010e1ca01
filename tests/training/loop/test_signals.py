"""Signals to a real process: the step is finished, a complete checkpoint saved, and the exit status
is 130."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jsonschema
import pytest
from tests.support import stub_task

from wellposed.training import result_schema
from wellposed.training.folder import checkpoints
from wellposed.training.loop.processes import StopRequest

SCRIPT = Path(stub_task.__file__)


def wait_for_rows(process: subprocess.Popen[str], out: Path, count: int) -> None:
    path = out / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (path.exists() and path.read_bytes().count(b"\n") >= count):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_a_signal_ends_the_run_in_order(tmp_path: Path) -> None:
    """One process for each signal, side by side."""
    started = {
        number: subprocess.Popen(
            [sys.executable, str(SCRIPT), str(tmp_path / number.name), "100000", "0.01"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }
    try:
        for number, process in started.items():
            wait_for_rows(process, tmp_path / number.name, 8)
            process.send_signal(number)
        for number, process in started.items():
            stdout, stderr = process.communicate(timeout=60)
            check_cancelled(tmp_path / number.name, process.returncode, stdout, stderr)
    finally:
        for process in started.values():
            process.kill()


def check_cancelled(out: Path, code: int, stdout: str, stderr: str) -> None:
    assert (code, stdout) == (130, "cancelled\n")
    assert "Traceback" not in stderr
    assert "continue with --resume auto" in stderr
    result = json.loads((out / "result.json").read_text())
    jsonschema.validate(result, result_schema())
    assert result["train_info"]["status"] == "cancelled"
    newest, damaged = checkpoints.newest_complete(out)
    assert newest is not None
    assert not damaged
    assert checkpoints.step_of(newest) == result["train_info"]["steps"]


def test_the_second_signal_ends_the_run_at_once() -> None:
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt, match="second signal"):
            os.kill(os.getpid(), signal.SIGTERM)


def test_handlers_are_put_back_and_other_threads_left_alone() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopRequest():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    problems: list[BaseException] = []

    def enter() -> None:
        try:
            with StopRequest() as stop:
                assert not stop.requested
        except BaseException as error:
            problems.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert not problems


def test_a_hangup_that_is_ignored_stays_ignored() -> None:
    """`nohup wellposed train ...` outlives its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_request_inside_another_is_heard_by_both() -> None:
    with StopRequest() as outer:
        with StopRequest() as inner:
            signal.raise_signal(signal.SIGTERM)
        assert (outer.requested, inner.requested) == (True, True)
        with StopRequest() as later:
            assert later.requested, "what was asked before it began"
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
    with StopRequest() as other:
        assert not other.requested
