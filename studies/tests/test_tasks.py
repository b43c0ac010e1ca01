"""Promises of every task of the studies: data by seed alone, splits, padding, refusals."""

import json

import pytest

from wellposed.errors import ConfigError, DataError
from wellposed_lab.tasks.data.splits import SPLITS
from wellposed_lab.tasks.task import build_task
from wellposed_lab.training.folder.run_folder import data_digests

FEW = {"num_train": 90, "num_valid": 30, "num_test": 30}
DRAWN = {"listops": FEW, "marked": FEW, "retrieval": {**FEW, "max_length": 40}}
DRAWN |= {"pathfinder": {"num_train": 6, "num_valid": 2, "num_test": 2}, "image": {"size": 4}}


@pytest.mark.parametrize("name", ["listops", "marked", "image"])
def test_a_drawn_task_holds_what_it_says(name):
    task = build_task(name, DRAWN[name])
    kwargs = task.model_kwargs()
    described = json.loads(json.dumps(task.description()))
    assert described["task"] == name
    assert "sha256" in json.dumps(described)
    assert task.headline in task.reference()
    assert len(task.tokenizer) == kwargs["vocab_size"]
    for split in SPLITS:
        rows = list(task.dataset(split))
        assert [len(row["input_ids"]) for row in rows] == list(task.lengths(split))
        assert max(max(row["input_ids"]) for row in rows) < kwargs["vocab_size"]
        assert max(task.lengths(split)) <= kwargs["max_position_embeddings"]
        assert max(row["labels"][0] for row in rows) < kwargs["num_labels"]


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_drawn_data_is_a_function_of_the_data_seed_alone(name):
    tasks = [build_task(name, {**DRAWN[name], "data_seed": seed}) for seed in (0, 0, 1)]
    # The drawn data, and the digests by which a resumed run recognises it.
    for read in (lambda task: list(task.dataset("train")), lambda t: data_digests(t.description())):
        first, again, other = map(read, tasks)
        assert first == again != other


@pytest.mark.parametrize("name", ["retrieval", "pathfinder", "image", "dialogue"])
def test_data_that_is_not_there_is_named(name, tmp_path):
    with pytest.raises(DataError, match="nothing: no such file"):
        build_task(name, {"data": str(tmp_path / "nothing")})


DRAWN_HERE = ": says what is drawn, no effect on"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("listops", {"data": "a.tsv", "max_args": 4}, f"max_args{DRAWN_HERE}"),
        ("listops", {"data": "a.tsv", "num_train": 9}, f"num_train{DRAWN_HERE}"),
        ("pathfinder", {"data": "a.npz", "max_turn": 1.0}, f"max_turn{DRAWN_HERE}"),
        ("image", {"data": "a.npz", "data_seed": 3}, f"data_seed{DRAWN_HERE}"),
        ("dialogue", {"data": "builtin"}, "this task has no such data"),
        ("retrieval", {"max_length": -1, "num_train": 0}, "(?s)max_length = -1, .*num_train = 0"),
    ],
)
def test_options_without_an_effect_are_refused(name, options, message):
    with pytest.raises(ConfigError, match=message):
        build_task(name, options)
