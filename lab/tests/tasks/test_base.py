"""The registry of tasks, building from plain options, and what every task promises."""

import dataclasses
import inspect
import json
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path

import pytest

from wellposed.errors import ConfigError, DataError
from wellposed_lab.cli.main import main
from wellposed_lab.tasks.data.splits import SPLITS
from wellposed_lab.tasks.task import TASKS, build_task


def options_of(name, folder):
    """Return options of a small task, whose data is written to ``folder``."""
    rows = "".join(f"{i % 2}\tword{i % 7} " + "and more " * (i % 5) + "\n" for i in range(100))
    (folder / "text.txt").write_text("To be, or not to be: that is the question.\n" * 40)
    (folder / "rows.tsv").write_text(rows)
    texts = {"data": str(folder / "text.txt"), "seq_len": 32}
    return {"data": str(folder / "rows.tsv")} if name == "text_classification" else texts


@pytest.fixture(scope="module", params=["char_lm", "word_lm", "text_classification"])
def task(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return build_task(request.param, options_of(request.param, folder))


def test_importing_and_building_tasks_is_light():
    heavy = ["torch", "transformers", "tokenizers", "datasets"]
    code = (
        f"import sys; from wellposed_lab.tasks.task import TASKS, build_task; TASKS.names();"
        f" print([name for name in {heavy} if name in sys.modules])"
    )
    build = "build_task('char_lm', {'limit_chars': 90})"
    code = f"{code}; {build}; print('torch' in sys.modules)"
    output = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert output.splitlines() == ["[]", "False"]


def test_every_option_field_has_a_help_text():
    for name in TASKS.names():
        options = TASKS.get(name).options
        names = [field.name for field in dataclasses.fields(options)]
        source = "".join(inspect.getsource(base) for base in options.__mro__ if base is not object)
        for field in names:
            assert re.search(rf'    {field}: .*\n    """', source), field
        assert "data" not in names[1:], "--data comes first"


def test_valid_and_test_are_cut_into_the_same_batches_in_every_epoch(task):
    for split in SPLITS[1:]:
        batches = task.batches(split, 7, seed=3, epoch=2)
        assert sorted(chain(*batches)) == list(range(len(task.dataset(split))))
        assert batches == task.batches(split, 7, seed=9, epoch=8)


def test_train_batches_are_a_function_of_seed_and_epoch_alone(task):
    first, again, epoch, seed = (
        task.batches("train", 4, seed=seed, epoch=epoch)
        for seed, epoch in ((1, 1), (1, 1), (1, 2), (2, 1))
    )
    assert first == again
    assert first not in (epoch, seed)


@pytest.mark.parametrize("name", ["char_lm", "text_classification", "image_classification"])
def test_data_that_is_not_there_is_named(name, tmp_path):
    with pytest.raises(DataError, match="nothing: no such file"):
        build_task(name, {"data": str(tmp_path / "nothing")})


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("char_lm", {"test": "a.txt"}, "option test: only with data=FILE; builtin data has"),
        (
            "text_classification",
            {"data": "hf:n", "valid": "x"},
            "valid: only with data=FILE; hf:n data",
        ),
        ("text_classification", {"data": "x", "max_length": -1}, "max_length = -1"),
    ],
)
def test_options_without_an_effect_are_refused(name, options, message):
    with pytest.raises(ConfigError, match=message):
        build_task(name, options)


def test_lengths_are_those_of_the_examples(task):
    for split in SPLITS:
        dataset = task.dataset(split)
        lengths = task.lengths(split)
        assert len(dataset) == len(lengths) > 0
        assert [len(dataset[i]["input_ids"]) for i in range(len(dataset))] == list(lengths)


def test_collate_pads_to_the_longest_of_the_batch(task):
    dataset = task.dataset("train")
    pad = task.model_kwargs()["pad_token_id"]
    for indices in task.batches("train", 5, seed=0, epoch=1)[:4]:
        rows = [dataset[i]["input_ids"] for i in indices]
        batch = task.collate([dataset[i] for i in indices])
        shape = (len(indices), max(map(len, rows)))
        assert batch["input_ids"].shape == batch["attention_mask"].shape == shape
        for row, ids in enumerate(rows):
            assert batch["input_ids"][row, : len(ids)].tolist() == ids
            assert (batch["input_ids"][row, len(ids) :] == pad).all()
            assert int(batch["attention_mask"][row].sum()) == len(ids)


def test_model_kwargs_hold_every_id_and_position(task):
    kwargs = task.model_kwargs()
    for split in SPLITS:
        for example in task.dataset(split):
            assert max(example["input_ids"]) < kwargs["vocab_size"]
            assert len(example["input_ids"]) <= kwargs["max_position_embeddings"]
    assert len(task.tokenizer) == kwargs["vocab_size"]
    assert task.tokenizer.pad_token_id == kwargs["pad_token_id"]


def test_description_is_json_and_reference_has_the_headline(task):
    described = json.loads(json.dumps(task.description()))
    assert described["task"] == task.name
    assert "sha256" in json.dumps(described)
    assert task.headline in task.reference()


@pytest.fixture
def without_studies(monkeypatch):
    """Only the tasks of this package are registered, as if wellposed-studies were not installed."""
    entries = {
        name: TASKS.get(name)
        for name in TASKS
        if "_studies" not in TASKS.get(name).build.__module__
    }
    monkeypatch.setattr(TASKS, "_entries", entries)


SAVED = Path(__file__).parents[3] / "tests" / "models" / "saved" / "run_configs" / "rezero.toml"
ROUTES = {
    "build_task": lambda name, config: build_task(name),
    "train": lambda name, config: main(["train", name]),
    "compare": lambda name, config: main(["compare", name, "--data", "x"]),
    "config of 0.3": lambda name, config: main(["train", name, "--config", str(config)]),
    "run of 0.3": lambda name, config: main(
        ["train", name, "--resume", "auto", "--out", str(config.parent)]
    ),
}


@pytest.mark.parametrize(
    "name", ["dialogue", "image", "listops", "marked", "pathfinder", "retrieval"]
)
@pytest.mark.parametrize("route", ROUTES)
def test_tasks_of_the_studies_name_their_package(route, name, without_studies, tmp_path, capsys):
    config = tmp_path / "config.toml"
    config.write_text(SAVED.read_text().replace('task = "listops"', f'task = "{name}"'))
    message = f"task '{name}' comes with another package, wellposed-studies; type: "
    if route == "build_task":
        with pytest.raises(ConfigError, match=message):
            build_task(name)
    else:
        assert ROUTES[route](name, config) in (1, 2)
        assert message in capsys.readouterr().err
