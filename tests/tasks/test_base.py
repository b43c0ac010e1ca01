"""The registry of tasks, building from plain options, and what every task promises."""

import dataclasses
import inspect
import json
import re
import subprocess
import sys
from itertools import chain

import pytest

from wellposed.tasks import SPLITS, TASKS, build_task

SMALL_LISTOPS = {"num_train": 90, "num_valid": 30, "num_test": 30}


@pytest.fixture(scope="module", params=["listops", "char_lm", "text_classification"])
def task(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    options = dict(SMALL_LISTOPS)
    if request.param == "char_lm":
        (folder / "text.txt").write_text("To be, or not to be: that is the question.\n" * 40)
        options = {"data": str(folder / "text.txt"), "seq_len": 32}
    if request.param == "text_classification":
        rows = "".join(f"{i % 2}\tword{i % 7} " + "and more " * (i % 5) + "\n" for i in range(100))
        (folder / "reviews.tsv").write_text(rows)
        options = {"data": str(folder / "reviews.tsv")}
    return build_task(request.param, options)


def test_importing_and_building_tasks_is_light():
    heavy = ["torch", "transformers", "tokenizers", "datasets"]
    code = f"import sys, wellposed.tasks; print([name for name in {heavy} if name in sys.modules])"
    build = f"wellposed.tasks.build_task('listops', {SMALL_LISTOPS})"
    code = f"{code}; {build}; print('torch' in sys.modules)"
    said = subprocess.check_output([sys.executable, "-c", code], text=True)
    assert said.splitlines() == ["[]", "False"]


def test_every_option_field_has_a_help_text():
    for name in TASKS.names():
        options = TASKS.get(name).options
        names = [field.name for field in dataclasses.fields(options)]
        source = "".join(inspect.getsource(each) for each in options.__mro__ if each is not object)
        for field in names:
            assert re.search(rf'    {field}: .*\n    """', source), field
        assert "data" not in names[1:], "--data comes first"


def test_batches_partition_each_split(task):
    for split in SPLITS[1:]:
        assert sorted(chain(*task.batches(split, 7, seed=3, epoch=2))) == list(
            range(len(task.dataset(split)))
        )


def test_batches_are_a_function_of_seed_and_epoch_alone(task):
    first = task.batches("train", 4, seed=1, epoch=1)
    assert first == task.batches("train", 4, seed=1, epoch=1)
    assert first != task.batches("train", 4, seed=1, epoch=2)
    assert first != task.batches("train", 4, seed=2, epoch=1)
    for split in SPLITS[1:]:
        assert task.batches(split, 4, seed=1, epoch=1) == task.batches(split, 4, seed=9, epoch=8)


def test_lengths_are_those_of_the_examples(task):
    for split in SPLITS:
        dataset, lengths = task.dataset(split), task.lengths(split)
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
