"""Two processes on one micro-batch each are one process on two: the same weights to rounding, the same folder."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from tests.support import stub_task

from wellposed.cli import main
from wellposed.training import read_metrics

SCRIPT = Path(stub_task.__file__)
DATA = "To be, or not to be, that is the question. "
COMMAND = [
    "train", "char_lm", "--seq-len", "16", "--batch-size", "4", "--schedule", "constant", "--eval-every", "2",
    "--log-every", "1", "--model.hidden-size", "16", "--model.num-attention-heads", "2", "--model.dropout", "0",
    "--model.num-hidden-layers", "1",
]  # fmt: skip


def start_two(out: Path, *words: str) -> list[subprocess.Popen[str]]:
    """Start ``stub.py`` as two processes of one run on the CPU."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(out), *words],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]


def command(*words: str, processes: int = 1) -> subprocess.CompletedProcess[str]:
    """Run ``python -m wellposed``, under torchrun where there are several processes."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc_per_node={processes}", "-m"] if processes > 1 else []
    return subprocess.run(
        [sys.executable, "-m", *launcher, "wellposed", *words],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def wait_for_rows(process: subprocess.Popen[str], out: Path, count: int) -> None:
    """Wait until the run has logged ``count`` rows."""
    path, deadline = out / "metrics.jsonl", time.monotonic() + 120
    while not (path.exists() and path.read_bytes().count(b"\n") >= count):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def assert_same_losses(one: Path, other: Path) -> None:
    """Compare all rows but their seconds, to rounding."""
    for left, right in zip(read_metrics(one), read_metrics(other), strict=True):
        assert left.keys() == right.keys()
        for name in left.keys() - {"seconds", "tokens_per_second", "split", "best", "isometry_error"}:
            assert left[name] == pytest.approx(right[name], rel=1e-4), name


@pytest.mark.slow
def test_two_processes(stub: ModuleType, tmp_path: Path) -> None:
    out = tmp_path / "two"
    for process in start_two(out, "7", "0", "0", "never"):
        stdout, stderr = process.communicate(timeout=200)
        assert (process.returncode, stdout) == (0, "success\n"), stderr
    config = stub.make_config(steps=7, log_every=1, eval_every=5, checkpoint_every=3, gradient_accumulation=2)
    stub.run(config, tmp_path / "one")
    for one, two in zip(read_metrics(tmp_path / "one"), read_metrics(out), strict=True):
        assert one.keys() == two.keys()
        for name in {"step", "loss", "grad_norm", "nats"} & one.keys():
            assert one[name] == pytest.approx(two[name], rel=1e-5)
    weights = [load_file(folder / "checkpoint-7" / "model.safetensors") for folder in (tmp_path / "one", out)]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-4, atol=1e-5)
    assert {path.name for path in (out / "checkpoint-7").glob("random_states_*")} == {
        "random_states_0.safetensors", "random_states_1.safetensors",
    }  # fmt: skip
    assert json.loads((out / "result.json").read_text())["train_info"]["status"] == "success"
    assert [path.name for path in out.iterdir() if path.name.startswith(".")] == []


@pytest.mark.slow
def test_torchrun_makes_one_run_that_one_process_can_continue(tmp_path: Path) -> None:
    """The splits have 3 and 1 batches, which two processes cannot share evenly."""
    data = tmp_path / "train.txt"
    for split, characters in (("train", 16 * 4 * 9), ("valid", 16 * 4 * 3), ("test", 16 * 4)):
        data.with_name(f"{split}.txt").write_text((DATA * 20)[:characters])
    words = [*COMMAND, "--data", str(data), "--penalty.query", "0.1", "--constrain.where", "key"]
    done = command(*words, "--steps", "4", "--out", str(tmp_path / "two"), processes=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("success: ") == 1
    one = [*words, "--gradient-accumulation", "2", "--out", str(tmp_path / "one")]
    assert command(*one, "--steps", "4").returncode == 0
    assert_same_losses(tmp_path / "one", tmp_path / "two")

    assert command(*one, "--steps", "7", "--resume", "auto").returncode == 0
    done = command(*words, "--steps", "7", "--out", str(tmp_path / "two"), "--resume", "auto")
    assert done.returncode == 0, done.stderr
    assert "a step still takes 2 micro-batches, 2 in each process" in done.stderr
    assert_same_losses(tmp_path / "one", tmp_path / "two")
    rows = [row for row in read_metrics(tmp_path / "two") if row["split"] == "train"]
    assert all(row["penalty"] > 0 and row["isometry_error"] < 1e-5 for row in rows)


@pytest.mark.slow
def test_two_processes_compare_together(tmp_path: Path) -> None:
    data = tmp_path / "prose.txt"
    data.write_text(DATA * 60)
    words = ["compare", *COMMAND[1:], "--data", str(data), "--variants", "post_ln,pre_ln", "--steps", "3", "--quiet"]
    words += ["--eval-batches", "2"]
    done = command(*words, "--out", str(tmp_path / "two"), processes=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("report: ") == 1
    assert main([*words, "--gradient-accumulation", "2", "--out", str(tmp_path / "one")]) == 0
    for variant in ("post_ln", "pre_ln"):
        assert_same_losses(tmp_path / "one" / variant / "seed-0", tmp_path / "two" / variant / "seed-0")
    assert {path.name for path in (tmp_path / "two").iterdir()} == {path.name for path in (tmp_path / "one").iterdir()}


@pytest.mark.parametrize("rank", ["0", "1"])
def test_commands_of_one_process_refuse_several(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: str
) -> None:
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    for name, says in (("sweep", "with --jobs N, and --resume auto"), ("doctor", "without torchrun"), ("report", "")):
        assert main([name]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert f"wellposed {name} runs in one process" in said
        assert says in said


def test_sharded_weights_are_refused_before_anything_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert main([*COMMAND, "--steps", "2", "--out", str(tmp_path / "run")]) == 2
    assert "to shard the weights (FSDP)" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_process_that_dies_ends_the_other_in_one_line(tmp_path: Path) -> None:
    first, second = start_two(tmp_path / "run", "100000", "0.01", "0.1", "never")
    try:
        wait_for_rows(first, tmp_path / "run", 4)
        second.kill()
        _, stderr = first.communicate(timeout=60)
    finally:
        first.kill()
        second.communicate()
    assert first.returncode == 1
    assert stderr.splitlines()[-1].startswith("process 0 of 2: another process of this run has ended")
    assert "Traceback" not in stderr
