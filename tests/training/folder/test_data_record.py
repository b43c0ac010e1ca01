"""A run goes on with the data that it began with, or not at all."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest

from wellposed.errors import DataError
from wellposed.tasks import build_task
from wellposed.training import ModelOptions, RunConfig, TrainOptions, train

TEXT = "the quick brown fox jumps over the lazy dog\n" * 200


def config_of(data: Path, steps: int) -> RunConfig:
    return RunConfig(
        "char_lm",
        {"data": str(data), "seq_len": 32},
        model=ModelOptions(hidden_size=8, num_hidden_layers=1, num_attention_heads=2),
        train=TrainOptions(
            steps=steps, batch_size=4, warmup_steps=0, eval_batches=1, checkpoint_every=2
        ),
    )


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_changed_data_is_refused_with_both_digests_and_restored_data_taken(
    tmp_path: Path, text: Path
) -> None:
    out = tmp_path / "run"
    train(config_of(text, 2), out, progress=False)
    assert (
        json.loads((out / "env.json").read_text())["data"]["files.train"]
        == sha256(TEXT.encode()).hexdigest()
    )
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    text.write_text(changed := TEXT.replace("fox", "cat"))
    with pytest.raises(DataError, match="the data is not what the run began with") as caught:
        train(config_of(text, 4), out, resume="auto", longer=True, progress=False)
    assert all(sha256(each.encode()).hexdigest() in str(caught.value) for each in (TEXT, changed))
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    text.write_text(TEXT)
    assert (
        train(config_of(text, 4), out, resume="auto", longer=True, progress=False).status
        == "success"
    )


def test_data_that_moved_is_the_same_data(tmp_path: Path, text: Path) -> None:
    config = config_of(text, 2)
    train(config, tmp_path / "run", progress=False)
    copy = tmp_path / "copy.txt"
    copy.write_text(TEXT)
    task = build_task(config.task, {**config.task_options, "data": str(copy)})
    longer = replace(config, train=replace(config.train, steps=4))
    assert (
        train(
            longer, tmp_path / "run", resume="auto", longer=True, progress=False, task=task
        ).status
        == "success"
    )


def test_a_folder_without_digests_goes_on(tmp_path: Path, text: Path) -> None:
    train(config_of(text, 2), tmp_path / "run", progress=False)
    file = tmp_path / "run" / "env.json"
    values = json.loads(file.read_text())
    del values["data"]
    file.write_text(json.dumps(values))
    text.write_text(TEXT + "once more\n")
    assert (
        train(
            config_of(text, 4), tmp_path / "run", resume="auto", longer=True, progress=False
        ).status
        == "success"
    )
