"""Learning rates against closed forms written down a second time, and the edges between their
pieces."""

import dataclasses
import itertools
import json
import math
from types import SimpleNamespace

import pytest
from lab.tests.support import stub_task as stub
from lab.tests.support.runs import final, rows, same
from safetensors.torch import load_file
from transformers import BertConfig

from wellposed.errors import ConfigError
from wellposed_lab.training.config import RunConfig, Schedule, TrainOptions
from wellposed_lab.training.folder.run_folder import read_config
from wellposed_lab.training.loop.run import Run
from wellposed_lab.training.loop.schedules import (
    SCHEDULES,
    learning_rate,
    longer_note,
)

BASE = TrainOptions(steps=50, learning_rate=0.3, warmup_steps=7, decay_steps=20, gamma=0.8)


def rates(schedule, **changes):
    options = dataclasses.replace(BASE, schedule=schedule, **changes)
    return [learning_rate(step, options, hidden_size=64) for step in range(1, options.steps + 1)]


def test_every_schedule_of_the_configuration_is_registered():
    assert set(SCHEDULES.names()) == set(Schedule.__args__)


CLOSED = {
    "constant": lambda t: 0.3 * min(1, t / 7),
    "inverse_sqrt": lambda t: 0.3 * (20 / (19 + t)) ** 0.5,
    "inverse_sqrt_warmup": lambda t: 0.3 * (t / 7 if t < 8 else (7 / t) ** 0.5),
    "kim2021": lambda t: 0.8 / 8 * (t * 7**-1.5 if t < 7 else t**-0.5),
}


@pytest.mark.parametrize("schedule", CLOSED)
def test_rates_are_those_of_the_closed_form(schedule):
    assert rates(schedule) == pytest.approx(list(map(CLOSED[schedule], range(1, 51))), rel=1e-14)
    assert rates("constant", warmup_steps=0) == [0.3] * 50


def test_the_width_is_that_of_the_model_that_a_run_starts_from():
    width = BertConfig(hidden_size=64)
    parts = SimpleNamespace(model=SimpleNamespace(config=width))
    run = SimpleNamespace(parts=parts, config=RunConfig("stub"))
    run.options = dataclasses.replace(BASE, schedule="kim2021")
    assert [vars(Run)["rate"](run, step) for step in range(1, 51)] == rates("kim2021")


def test_cosine_falls_from_the_peak_and_still_moves_at_the_last_step():
    values = rates("cosine")
    assert values[:7] == pytest.approx([0.3 * t / 7 for t in range(1, 8)], rel=1e-15)
    assert values[7] == 0.3  # the first step after warm-up is at the peak
    assert values[-1] == pytest.approx(0.15 * (1 + math.cos(math.pi * 42 / 43)), rel=1e-12)
    assert 0 < values[-1] < 1e-3
    assert all(later < earlier for earlier, later in itertools.pairwise(values[7:]))


def test_a_schedule_that_needs_warmup_says_so():
    for schedule in ("kim2021", "inverse_sqrt_warmup"):
        expected = f"warmup_steps = 0, expected at least 1 for the schedule {schedule}"
        with pytest.raises(ConfigError, match=expected):
            TrainOptions(schedule=schedule)


def logged(out):
    return [(row["step"], row["loss"]) for row in rows(out, "train")]


def test_a_longer_run_is_the_same(tmp_path, capsys):
    """The schedule is constant, so 8 steps and 4 more are 12, bit for bit, dropout included."""
    short, longer_config = (stub.make_config(steps=steps, dropout=0.2) for steps in (8, 12))
    stub.run(longer_config, tmp_path / "whole")
    out = tmp_path / "longer"
    stub.run(short, out)
    result = stub.run(longer_config, out, resume="auto", longer=True, progress=True)
    assert "8 -> 12 steps; the schedule constant does not depend on them" in capsys.readouterr().err
    assert (result.status, result.result["train_info"]["steps"]) == ("success", 12)
    assert read_config(out) == longer_config
    assert logged(out) == logged(tmp_path / "whole")
    assert same(final(out), final(tmp_path / "whole"))
    checkpoints = [folder / "checkpoint-12" for folder in (out, tmp_path / "whole")]
    assert same(*(load_file(checkpoint / "model.safetensors") for checkpoint in checkpoints))
    assert stub.run(longer_config, out, resume="auto", longer=True).result == result.result


def test_only_the_length_may_change_and_only_grow(tmp_path):
    config = stub.make_config(steps=8)
    stub.run(config, tmp_path)
    before = (tmp_path / "result.json").read_bytes()
    falling = dataclasses.replace(
        config, train=dataclasses.replace(config.train, schedule="linear")
    )
    assert "linear follows them, so this is not the run of 9" in longer_note(
        falling, dataclasses.replace(falling, train=dataclasses.replace(falling.train, steps=9))
    )
    with pytest.raises(ConfigError, match="can be trained longer, never shorter"):
        stub.run(stub.make_config(steps=7), tmp_path, resume="auto", longer=True)
    with pytest.raises(ConfigError, match=r"learning_rate: 0.05 -> 0.5\n.*steps: 8 -> 9"):
        stub.run(stub.make_config(steps=9, learning_rate=0.5), tmp_path, resume="auto", longer=True)
    with pytest.raises(ConfigError, match="steps: 8 -> 9"):
        stub.run(stub.make_config(steps=9), tmp_path, resume="auto")
    assert (tmp_path / "result.json").read_bytes() == before


def test_another_device_is_the_same_run(tmp_path):
    config = stub.make_config(steps=4)
    stub.run(config, tmp_path)
    (tmp_path / "result.json").unlink()
    (tmp_path / "manifest.json").unlink()
    elsewhere = dataclasses.replace(config, train=dataclasses.replace(config.train, device="cpu"))
    assert stub.run(elsewhere, tmp_path, resume="auto").status == "success"
    assert json.loads((tmp_path / "result.json").read_text())["config"]["train"]["device"] == "cpu"
