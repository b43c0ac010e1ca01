"""Two processes on one micro-batch each are one process on two: the same weights to rounding, the same folder."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from tests.support import stub_task

from wellposed.training import read_metrics


@pytest.mark.slow
def test_two_processes(stub: ModuleType, tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script, out = Path(stub_task.__file__), tmp_path / "two"
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(out), "7", "0", "0", "never"],
            env={
                **os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1",
                "ACCELERATE_USE_CPU": "true",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in started:
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
