"""Training longer: a run that ended goes on to more steps, and says what that does to its
schedule."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

from wellposed.errors import ConfigError
from wellposed.tasks import build_task
from wellposed.training import RunConfig, TrainOptions, read_config, read_metrics
from wellposed.training.loop.schedules import counted_in_steps, with_warmup_begun


def logged(out: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in read_metrics(out) if row["split"] == "train"]


def test_a_finished_run_goes_on_as_if_it_had_been_longer(
    stub: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The schedule is constant, so 8 steps and 4 more are 12, bit for bit, dropout included."""
    short, whole = (stub.make_config(steps=steps, dropout=0.2) for steps in (8, 12))
    stub.run(whole, tmp_path / "whole")
    out = tmp_path / "longer"
    stub.run(short, out)
    result = stub.run(whole, out, resume="auto", longer=True, progress=True)
    assert "8 -> 12 steps; the schedule constant does not depend on them" in capsys.readouterr().err
    assert (result.status, result.result["train_info"]["steps"]) == ("success", 12)
    assert read_config(out) == whole
    assert logged(out) == logged(tmp_path / "whole")
    weights = [
        load_file(folder / "checkpoint-12" / "model.safetensors")
        for folder in (out, tmp_path / "whole")
    ]
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name])
    assert stub.run(whole, out, resume="auto", longer=True).result == result.result


def test_a_schedule_that_ends_says_where_the_rate_goes(
    stub: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short, whole = (
        stub.make_config(steps=steps, schedule="linear", learning_rate=0.4) for steps in (4, 8)
    )
    stub.run(short, tmp_path)
    stub.run(whole, tmp_path, resume="auto", longer=True, progress=True)
    assert (
        "linear now ends at step 8: at step 4 the learning rate goes from 0.1 to 0.25"
        in capsys.readouterr().err
    )


def test_only_the_length_may_change_and_only_grow(stub: ModuleType, tmp_path: Path) -> None:
    config = stub.make_config(steps=8)
    stub.run(config, tmp_path)
    before = (tmp_path / "result.json").read_bytes()
    with pytest.raises(ConfigError, match="can be trained longer, never shorter"):
        stub.run(stub.make_config(steps=7), tmp_path, resume="auto", longer=True)
    with pytest.raises(ConfigError, match=r"learning_rate: 0.05 -> 0.5\n.*steps: 8 -> 9"):
        stub.run(stub.make_config(steps=9, learning_rate=0.5), tmp_path, resume="auto", longer=True)
    with pytest.raises(ConfigError, match="steps: 8 -> 9"):
        stub.run(stub.make_config(steps=9), tmp_path, resume="auto")
    assert (tmp_path / "result.json").read_bytes() == before


def test_another_device_is_the_same_run(stub: ModuleType, tmp_path: Path) -> None:
    config = stub.make_config(steps=4)
    stub.run(config, tmp_path)
    (tmp_path / "result.json").unlink()
    (tmp_path / "manifest.json").unlink()
    elsewhere = dataclasses.replace(config, train=dataclasses.replace(config.train, device="cpu"))
    assert stub.run(elsewhere, tmp_path, resume="auto").status == "success"
    assert json.loads((tmp_path / "result.json").read_text())["config"]["train"]["device"] == "cpu"


def test_a_share_of_warmup_stays_what_it_was() -> None:
    task = build_task("char_lm", {"limit_chars": 20000, "seq_len": 64})
    train = TrainOptions(epochs=2, batch_size=10, warmup_share=0.25)
    begun = counted_in_steps(RunConfig("char_lm", train=train), task)
    longer = counted_in_steps(
        RunConfig("char_lm", train=dataclasses.replace(train, epochs=4)), task
    )
    assert (begun.train.warmup_steps, longer.train.warmup_steps) == (16, 32)
    assert with_warmup_begun(longer, 0.25, begun).train.warmup_steps == 16
    assert with_warmup_begun(longer, 0.5, begun) == longer
