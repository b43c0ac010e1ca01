"""The real DeepSpeed, two ranks on the CPU: the table of docs/howto/machines.md, cell by cell.

It is not among the packages of the tests: `pip install deepspeed` (with DS_BUILD_OPS=0), then run this file.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("deepspeed", reason="deepspeed is not installed: pip install deepspeed")
from tests.support.deepspeed_verbs import BATCHES, LOSSES, MADE, encoder, sgd

WORKS = ("nothing", "penalty", "affinities", "Monitor", "measure", "certify")
LOST = "SGD now steps other tensors than these constrained weights"
REFUSED = {
    **{(verb, "before"): LOST for verb in ("orthogonal", "spectral", "columns", "logits")},
    **{(verb, "after"): "constrain_" for verb in ("orthogonal", "spectral", "columns", "logits")},
    ("t_fixup_", "after"): "before deepspeed.initialize",
}


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def results_of(stage, folder):
    out = folder / "results.json"
    port = free_port()
    root = Path(__file__).parents[1]
    path = os.pathsep.join(map(str, (root / "src", root)))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.support.deepspeed_worker"]
    ranks = [
        subprocess.Popen([*command, rank, str(stage), port, str(out)], env=environment, cwd=root)
        for rank in ("0", "1")
    ]
    try:
        assert [rank.wait(timeout=280) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    return json.loads(out.read_text("utf-8"))


def one_process(verb):
    model = encoder()
    optimizer = sgd(model)
    made = MADE[verb](model, optimizer)
    for batch in BATCHES:
        LOSSES[verb](model, batch, made).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [weight.detach().flatten() for weight in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_stages_1_and_2_train_as_one_process_or_refuse_by_name(stage, tmp_path):
    results = results_of(stage, tmp_path)
    for verb in MADE:
        expected = one_process(verb)
        for when in ("before", "after"):
            result = results[f"{verb}, {when}"]
            if (verb, when) in REFUSED:
                assert REFUSED[verb, when] in result
                continue
            assert not isinstance(result, str), result
            for weight, trained in zip(expected, result, strict=True):
                torch.testing.assert_close(torch.tensor(trained), weight, atol=1e-5, rtol=1e-4)


@pytest.mark.slow
def test_stage_3_is_refused_by_name(tmp_path):
    results = results_of(3, tmp_path)
    for verb in MADE:
        if verb == "nothing":
            continue
        assert "DeepSpeed ZeRO-3 keeps these weights in parts" in results[f"{verb}, after"]
        if verb in ("penalty", "affinities", "Monitor"):
            assert "DeepSpeed ZeRO-3 keeps these weights in parts" in results[f"{verb}, before"]
        if (verb, "before") in REFUSED:
            assert LOST in results[f"{verb}, before"]
