"""Presets of runs of the papers: the settings of the studies at paper size, and a few steps on data."""

from dataclasses import replace
from pathlib import Path

import pytest

from wellposed.model_options import ModelOptions
from wellposed_lab.compare.run_presets import RUN_PRESETS
from wellposed_lab.compare.runs import PlannedRun, say_nothing, train_planned
from wellposed_lab.training.config import StartOptions
from wellposed_studies.evidence import PAPER_SIZES
from wellposed_studies.kim2021 import language_models
from wellposed_studies.mcgrath2024 import scores
from wellposed_studies.recipe import Request
from wellposed_studies.run_presets import PRESETS
from wellposed_studies.sengupta2023 import trained
from wellposed_studies.study import sizes_at

REQUEST = Request("paper", Path("out"), "data")
OF_LENGTH = {
    "steps": 10_000,
    "epochs": None,
    "eval_every": 1,
    "checkpoint_every": 1,
    "log_every": 1,
}
"""Length of a run, which a preset counts in epochs if its paper does, and the study in steps."""


def of_kim(kind, depth):
    sizes = language_models.tuned(REQUEST)
    return language_models.run_config(REQUEST, sizes, kind, depth)


def of_texts(name):
    study = trained.text_study(REQUEST, name)
    return trained.run_config(study, {**study.sizes.options, "data": "data"}, "transject", 0)


def of_minbert():
    sizes = sizes_at(REQUEST, "mcgrath2024/encoder")
    return scores._config(REQUEST, sizes, "bert-base-uncased", "key:0.01", 0)


STUDIES = {
    "kim2021-ptb": lambda: of_kim("l2_tied", 4),
    "kim2021-ptb-contractive": lambda: of_kim("l2_contractive_kim2021", 14),
    "mcgrath2024-minbert": of_minbert,
    "sengupta2023-imdb": lambda: of_texts("imdb"),
    "sengupta2023-ag-news": lambda: of_texts("ag_news"),
}


def comparable(config):
    """Return the parts of a run that a study fixes: all but its length, its dropout and its data."""
    options = {
        name: value
        for name, value in config.task_options.items()
        if name not in ("data", "patience") and value is not None
    }
    model = replace(config.model, dropout=0.0)
    return (
        config.task, options, model, config.start, config.penalty, config.constrain,
        replace(config.train, **OF_LENGTH),
    )  # fmt: skip


@pytest.mark.parametrize("name", STUDIES)
def test_a_preset_is_the_run_of_its_study_at_paper_size(name):
    assert comparable(RUN_PRESETS.get(name)()) == comparable(STUDIES[name]())


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("kim2021-ptb", "kim2021/table-2"),
        ("kim2021-ptb-contractive", "kim2021/contraction"),
        ("sengupta2023-imdb", "sengupta2023/table-1"),
        ("sengupta2023-ag-news", "sengupta2023/table-1"),
        ("sengupta2023-listops", "sengupta2023/table-2"),
    ],
)
def test_a_preset_has_the_printed_size(name, recipe):
    config = RUN_PRESETS.get(name)()
    size = PAPER_SIZES[recipe]
    assert config.model.hidden_size == size["width"]
    first, *_, last = (int(depth) for depth in 2 * str(size["depth"]).split(" to "))
    assert first <= config.model.num_hidden_layers <= last
    assert str(config.train.batch_size) == str(size["batch"]).strip("[]")
    if config.train.epochs is None:
        assert config.train.steps == size["steps"]
    else:
        assert f"{config.train.epochs:g} times" in size["read"]


DATA = {
    "kim2021-ptb": "ptb/ptb.char.train.txt.gz",
    "kim2021-ptb-contractive": "ptb/ptb.char.train.txt.gz",
    "mcgrath2024-minbert": "minbert",
    "sengupta2023-imdb": "imdb",
    "sengupta2023-ag-news": "ag_news",
    "sengupta2023-listops": "listops",
}


def test_every_preset_of_these_papers_is_tried_on_data():
    others = ("zhang2021", "huang2020")
    assert {n for n in PRESETS if not n.startswith(others) and not n.endswith("-mini")} == {*DATA}


@pytest.mark.data
@pytest.mark.parametrize("name", DATA)
def test_a_preset_trains_on_the_data_of_its_paper(name, shared_data, encoder, tmp_path):
    """Layers are narrow, texts short and the vocabulary is learned from the data."""
    config = RUN_PRESETS.get(name)()
    options = {**config.task_options, "data": str(shared_data / DATA[name])}
    model = replace(config.model, num_hidden_layers=2)
    if config.start.model:
        options |= {"tokenizer": f"hf:{encoder}", "max_length": 16}
        model = ModelOptions()
        config = replace(config, start=StartOptions(str(encoder), new_head=True))
    elif config.task == "text_classification":
        options |= {"tokenizer": "word", "max_words": 500, "max_length": 16}
    if model != ModelOptions():
        model = replace(model, hidden_size=16)
    length = {"steps": 3, "epochs": None, "batch_size": 6, "eval_batches": 1, "warmup_steps": 1}
    train = replace(config.train, **length, device="cpu")
    config = replace(config, task_options=options, model=model, train=train)
    planned = [PlannedRun(tmp_path / "run", name, config)]
    (result,) = train_planned(planned, announce=say_nothing, jobs=1, test_batches=1)
    assert result.status == "success"
    assert result.result["train_info"]["steps"] == 3
