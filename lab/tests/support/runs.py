"""What tests ask of run folders: their rows, their weights, and the ways in which they end early."""

import os
import shutil
import subprocess
import sys
import time

from lab.tests.support import stub_task
from safetensors.torch import load_file

from wellposed_lab.report.runs import read_metrics
from wellposed_lab.training.loop.processes import StopRequest

TIMING = ("seconds", "tokens_per_second")


def rows(folder, split=""):
    """Return the rows of metrics (of one split) without what a clock decides."""
    mine = [row for row in read_metrics(folder) if split in ("", row["split"])]
    return [{key: row[key] for key in row if key not in TIMING} for row in mine]


def final(folder):
    """Return the tensors of ``final/``."""
    return load_file(folder / "final" / "model.safetensors")


def same(left, right):
    """Return whether two sets of tensors agree in every name and bit."""
    return left.keys() == right.keys() and all(left[name].equal(right[name]) for name in left)


def stop_at(monkeypatch, ask):
    """Make the run believe a signal came when it asks for the n-th time whether one did."""
    asked = iter(range(1, 10_000))
    requested = property(lambda _: next(asked) >= ask, lambda *_: None)
    monkeypatch.setattr(StopRequest, "requested", requested, raising=False)


def assert_resumed_bit_for_bit(config, folder):
    """Run ``config``, and again from a checkpoint in the middle: model, optimizer and final weights
    agree."""
    run = folder / "run"
    again = folder / "again"
    if not run.exists():
        stub_task.run(config, run)
    shutil.copytree(run, again, ignore=shutil.ignore_patterns("final", "checkpoint-12"))
    (again / "result.json").unlink()
    assert stub_task.run(config, again, resume="auto").status == "success"
    assert_same_files(run, again)


def assert_same_files(run, other):
    """Compare the last checkpoint and the final weights byte for byte."""
    for name in ("checkpoint-12/model", "checkpoint-12/optimizer", "final/model"):
        file = f"{name}.safetensors"
        assert (run / file).read_bytes() == (other / file).read_bytes(), file


def flip(path):
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def start_stub(*words):
    """Start the script of the stub in a process of its own."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, stub_task.__file__, *map(str, words)]
    return subprocess.Popen(command, **pipes, env={**os.environ, "OMP_NUM_THREADS": "1"})


def wait_for_rows(process, out, count):
    """Wait until the run has logged ``count`` rows."""
    path = out / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (path.exists() and path.read_bytes().count(b"\n") >= count):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
