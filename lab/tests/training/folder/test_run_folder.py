"""Run folders: what is written, when one may be used, and what a changed configuration is told."""

import dataclasses
import json
import tomllib
from contextlib import closing
from hashlib import sha256

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lab.tests.support import stub_task as stub
from tests.support.words import words as typed

from wellposed.errors import CheckpointError, ConfigError, DataError
from wellposed.model_options import ModelOptions
from wellposed_lab.report.runs import read_metrics
from wellposed_lab.tasks.task import build_task
from wellposed_lab.training.config import RunConfig, TrainOptions
from wellposed_lab.training.folder import run_folder
from wellposed_lab.training.folder.result import MetricsFile
from wellposed_lab.training.folder.run_folder import read_config
from wellposed_lab.training.loop.train import train

VALUES = st.text() | st.integers() | st.floats(allow_nan=False) | st.booleans()


@settings(max_examples=25, deadline=None)
@given(
    train=st.builds(
        TrainOptions,
        learning_rate=st.floats(min_value=1e-12, max_value=1e3),
        patience=st.none() | st.integers(1, 99),
    ),
    data=st.dictionaries(st.text("abc", min_size=1), VALUES),
)
def test_a_configuration_survives_the_file(tmp_path_factory, train, data):
    config = RunConfig("listops", data, train=train)
    folder = tmp_path_factory.mktemp("run")
    run_folder.write_config(folder, config)
    assert read_config(folder) == config


def test_a_folder_in_use_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    config = stub.make_config()
    with pytest.raises(ConfigError, match="already holds files"):
        stub.run(config, tmp_path)
    with pytest.raises(ConfigError, match=r"no config\.toml, so it is not a run"):
        stub.run(config, tmp_path, resume="auto")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(ConfigError, match="is a file, expected a folder"):
        stub.run(config, tmp_path / "thesis.txt")
    expected = r"--resume yes: expected never or auto"
    with pytest.raises(ConfigError, match=expected):
        stub.run(config, tmp_path / "new", resume="yes")


def test_every_changed_field_is_listed(tmp_path):
    config = stub.make_config(steps=5, eval_every=5, checkpoint_every=5)
    stub.run(config, tmp_path / "run")
    changed = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, learning_rate=0.5, patience=3),
        model=dataclasses.replace(config.model, dropout=0.4),
        task_options={"data": "elsewhere"},
    )
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    with pytest.raises(ConfigError) as caught:
        stub.run(changed, tmp_path / "run", resume="auto")
    message = str(caught.value)
    for line in (
        "train.learning_rate: 0.05 -> 0.5", "train.patience: 'not set' -> 3", "model.dropout: 0.0 -> 0.4",
        "task_options.data: 'not set' -> 'elsewhere'",
    ):  # fmt: skip
        assert line in message
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before


def test_the_environment_names_versions_and_every_start(tmp_path):
    folder = run_folder.RunFolder(tmp_path)
    folder.record_start(run_folder.environment(["wellposed", "train", "x"]), 0)
    folder.record_start(run_folder.environment(["wellposed", "again"]), 7)
    values = json.loads((tmp_path / "env.json").read_text())
    recorded = "python platform packages threads git_hash command date"
    assert set(typed(recorded)) <= set(values)
    assert {"torch", "transformers", "accelerate"} <= set(values["packages"])
    starts = [(start["from_step"], start["command"][-1]) for start in values["starts"]]
    assert starts == [(0, "x"), (7, "again")]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (None, "not a run folder"),
        ("task = ", "cannot be read"),
        ('task = "listops"\n[train]\nstepz = 3\n', "unknown option 'stepz'; nearest: steps"),
    ],
)
def test_bad_configuration_files(tmp_path, content, problem):
    if content is not None:
        (tmp_path / "config.toml").write_text(content)
    with pytest.raises(ConfigError, match=problem):
        read_config(tmp_path)


def test_metrics_are_cut_back_to_the_rows_of_the_checkpoint(tmp_path):
    with closing(MetricsFile(tmp_path)) as metrics:
        for step in range(5):
            metrics.append({"split": "train", "step": step, "loss": float("nan")})
        assert metrics.sync() == 5
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')  # a kill in the middle of a row
    with closing(MetricsFile(tmp_path, rows=3)) as metrics:
        metrics.append({"split": "train", "step": 9, "loss": 1.0})
    rows = [(row["step"], row["loss"]) for row in read_metrics(tmp_path)]
    assert rows == [(0, None), (1, None), (2, None), (9, 1.0)]
    expected = "4 complete rows, but the checkpoint was written after 7"
    with pytest.raises(CheckpointError, match=expected):
        MetricsFile(tmp_path, rows=7)


def test_the_configuration_is_on_disk_before_the_first_step(tmp_path):
    class Broken(stub.StubTask):
        def collate(self, examples):
            raise RuntimeError("first batch")

    with pytest.raises(RuntimeError, match="first batch"):
        stub.run(stub.make_config(), tmp_path / "run", task=Broken())
    assert tomllib.loads((tmp_path / "run" / "config.toml").read_text())["task"] == "stub"
    assert (tmp_path / "run" / "env.json").is_file()


TEXT = "the quick brown fox jumps over the lazy dog\n" * 200


def trained(tmp_path, steps, data="text.txt"):
    """Train on ``data`` up to ``steps``, from the present step of the run."""
    config = RunConfig(
        "char_lm",
        {"data": str(tmp_path / "text.txt"), "seq_len": 32},
        model=ModelOptions(hidden_size=8, num_hidden_layers=1, num_attention_heads=2),
        train=TrainOptions(steps=steps, batch_size=4, eval_batches=1, checkpoint_every=2),
    )
    task = build_task("char_lm", {"data": str(tmp_path / data), "seq_len": 32})
    out = tmp_path / "run"
    resume = "auto" if out.exists() else "never"
    return train(config, out, task=task, resume=resume, longer=out.exists(), progress=False)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_changed_data_is_refused_and_restored_data_taken(tmp_path, text):
    out = tmp_path / "run"
    trained(tmp_path, 2)
    recorded = json.loads((out / "env.json").read_text())["data"]["files.train"]
    assert recorded == sha256(TEXT.encode()).hexdigest()
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    text.write_text(changed := TEXT.replace("fox", "cat"))
    with pytest.raises(DataError, match="the data has changed since the run began") as caught:
        trained(tmp_path, 4)
    assert all(sha256(data.encode()).hexdigest() in str(caught.value) for data in (TEXT, changed))
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    text.write_text(TEXT)
    assert trained(tmp_path, 4).status == "success"


def test_data_that_moved_is_the_same_data(tmp_path, text):
    trained(tmp_path, 2)
    text.rename(tmp_path / "moved.txt")
    assert trained(tmp_path, 4, data="moved.txt").status == "success"


def test_a_folder_without_digests_goes_on(tmp_path, text):
    trained(tmp_path, 2)
    file = tmp_path / "run" / "env.json"
    values = json.loads(file.read_text())
    del values["data"]
    file.write_text(json.dumps(values))
    text.write_text(TEXT + "once more\n")
    assert trained(tmp_path, 4).status == "success"
