"""A comparison reads its data before it trains, once for each way of reading it."""

import pytest
from tests.support.films import write_films

from wellposed.errors import ConfigError
from wellposed.model_options import ModelOptions
from wellposed_lab.compare.compare import compare
from wellposed_lab.tasks import task as tasks
from wellposed_lab.training.config import RunConfig, TrainOptions

SMALL = ModelOptions(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
HOW = {"model": SMALL, "train": TrainOptions(steps=2, batch_size=8)}


@pytest.fixture
def built(monkeypatch):
    """Return the options of every task that is built."""
    built_options = []
    build = tasks.build_task

    def counted(name, options=None):
        built_options.append(options)
        return build(name, options)

    monkeypatch.setattr(tasks, "build_task", counted)
    return built_options


@pytest.mark.parametrize("value", ["foo", "", "-1"])
def test_a_value_that_no_task_takes_is_found_before_anything_trains(tmp_path, value):
    base = RunConfig("text_classification", {"data": str(write_films(tmp_path / "f.tsv"))}, **HOW)
    out = tmp_path / "out"
    variants = ["plain", f"windows:{value}"]
    with pytest.raises(ConfigError, match="certified_windows"):
        compare(base, variants, seeds=1, out=out)
    assert not out.exists()
    bare = RunConfig("char_lm", **HOW)
    with pytest.raises(ConfigError, match="certified_windows"):
        compare(bare, ["plain", "windows"], seeds=1, out=out)
    assert not out.exists()


def test_data_is_read_once_for_each_way_and_windows_are_certified_in_words(tmp_path, built):
    options = {"data": str(write_films(tmp_path / "f.tsv")), "max_length": 6}
    base = RunConfig("text_classification", options, **HOW)
    messages = []
    settings = {"certify": 4, "progress": False, "announce": messages.append}
    runs = compare(base, ["plain", "windows:2"], seeds=3, out=tmp_path / "out", **settings)
    assert built == [options, {**options, "certified_windows": 2}]
    assert not runs.failed
    for folder in runs.folders:
        plain = folder.parent.name == "plain"
        assert (folder / "certified.json").is_file() is plain
    assert [line for line in messages if "only in words" in line] == [
        "windows:2: windows are certified only in words, by wellposed certify RUN --words"
    ]
