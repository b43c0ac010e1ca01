"""Ranges of the configuration: every field out of range is named at once, and no valid one is
refused."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from wellposed.errors import ConfigError
from wellposed.model_options import ModelOptions
from wellposed.models import build_model, model_keywords
from wellposed.options import build_options, checked_hints, fits
from wellposed_lab.cli.main import main
from wellposed_lab.tasks.task import TASKS
from wellposed_lab.training.config import (
    GONE,
    ConstrainOptions,
    PenaltyOptions,
    RunConfig,
    TrainOptions,
)
from wellposed_lab.training.config import config_difference as difference


def test_all_problems_of_a_section_are_in_one_error():
    with pytest.raises(ConfigError) as caught:
        TrainOptions(steps=0, learning_rate=-1.0, adam_beta2=1.0, max_grad_norm=float("nan"))
    message = str(caught.value)
    for part in ("steps = 0", "learning_rate = -1.0", "adam_beta2 = 1.0", "max_grad_norm = nan"):
        assert part in message


def test_all_problems_of_all_sections_of_a_file_are_in_one_error():
    sizes = {"hidden_size": 30, "num_attention_heads": 4}
    values = {"task": "listops", "model": sizes, "train": {"steps": 0, "stepz": 1}}
    with pytest.raises(ConfigError) as caught:
        RunConfig.from_dict(values, where="run.toml")
    message = str(caught.value)
    assert "[model]: hidden_size = 30 is not divisible by num_attention_heads = 4" in message
    assert "unknown option 'stepz'; nearest: steps" in message


NUMBERS = [
    (options, name)
    for options in (PenaltyOptions, TrainOptions)
    for name, hint in checked_hints(options).items()
    if fits(1, hint) and not fits("", hint) and not fits(True, hint)
]


@pytest.mark.parametrize(("options", "name"), NUMBERS)
def test_every_number_has_a_range(options, name):
    with pytest.raises(ConfigError, match=f"{name} = -1, expected"):
        options(**{name: -1})


def test_recorded_runs_keep_their_penalty_and_their_gain():
    """Run folders of 0.2 name the form, and hold pretrained weights at gain 1 without saying so."""
    squares = {"attention": 1e-6, "form": "gram_squared"}
    recorded = RunConfig.from_dict({"task": "listops", "penalty": squares})
    now = RunConfig("listops", penalty=PenaltyOptions(attention=1e-6))
    assert difference(recorded, now) == []
    keys = RunConfig.from_dict({"task": "listops", "penalty": {**squares, "key": 1e-2}})
    assert keys.penalty.form == "gram_squared"
    assert difference(keys, replace(keys, penalty=replace(keys.penalty, form="paper")))
    none = replace(now, penalty=replace(now.penalty, bound=0.0))
    assert not difference(now, none)
    assert difference(now, replace(now, penalty=replace(now.penalty, bound=0.3)))
    for start, gain in (({"model": "folder"}, "one"), ({}, "auto")):
        values = {"task": "listops", "start": start, "constrain": {"where": "query"}}
        assert RunConfig.from_dict(values).constrain.gain == gain
    with pytest.raises(ConfigError, match="gain = 'fit' with to = 'spectral'"):
        ConstrainOptions("query", to="spectral", gain="fit")


DROPPED = [
    ("listops", "train", "average_checkpoints", 0, 3),
    ("listops", "train", "num_workers", 0, 2),
    ("listops", "train", "parallel", "fsdp", "tensor"),
    ("text_classification", "task_options", "class_names", "auto", "a,b"),
    ("image_classification", "task_options", "flip", False, True),
    ("translation", "task_options", "lowercase", False, True),
    ("dialogue", "task_options", "lowercase", False, True),
]


@pytest.mark.parametrize(("task", "section", "name", "usual", "other"), DROPPED)
def test_options_that_went_are_read_at_their_default_alone(task, section, name, usual, other):
    data = {"src": "de", "tgt": "en"} if task == "translation" else {}
    required = {"data": "x", **data} if section == "task_options" else {}

    def read(value):
        config = RunConfig.from_dict({"task": task, section: {**required, name: value}})
        if section == "task_options" and task in TASKS:
            build_options(TASKS.get(task).options, config.task_options, where=f"task {task}")
        return config

    assert name not in read(usual).to_dict().get(section, {})
    if section == "train" or task in TASKS:
        with pytest.raises(ConfigError, match=f"unknown option {name!r}"):
            read(other)


def test_the_temperature_of_older_runs_is_the_logit_scale(capsys):
    read = RunConfig.from_dict({"task": "char_lm", "train": {"temperature": 5.0}})
    assert read.train.logit_scale == 5.0
    for words in (["--temperature", "5"], ["--temperature=5"]):
        assert main(["train", "char_lm", *words, "--print-config"]) == 2
        assert "--temperature is --logit-scale now" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="unknown option"):
        RunConfig.from_dict({"task": "char_lm", "model": {"temperature": 5.0}})


SAVED = Path(__file__).parents[3] / "tests" / "models" / "saved"
RUNS = sorted(SAVED.glob("run_configs/*.toml"))


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_the_configuration_of_a_run_comes_back_and_makes_its_model(path):
    values = tomllib.loads(path.read_text())
    config = RunConfig.from_dict(values, where=str(path))
    again = config.to_dict()
    grown = ("model", "train", "constrain", "penalty")  # options were added since
    for section in grown:
        expected = {n: v for n, v in values[section].items() if section != "train" or n not in GONE}
        assert again[section].items() >= expected.items()
    assert all(again[name] == values[name] for name in values if name not in grown)
    sizes = {"vocab_size": 5, **model_keywords(config.model)}
    model = build_model(config.model.architecture, "causal_lm", **sizes)
    for name, value in values["model"].items():
        assert getattr(model.config, name, value) == value


def test_options_are_the_same_on_the_command_line_as_they_were():
    options = {name for path in RUNS for name in tomllib.loads(path.read_text())["model"]}
    assert options <= set(ModelOptions.__dataclass_fields__)


def test_every_spectral_set_takes_a_bound_by_root_mean_squares():
    for to in ("spectral", "spectral_soft", "spectral_hammer", "spectral_sphere"):
        assert ConstrainOptions("query", to=to, bound="rms:2").bound == "rms:2"
    for to in ("rows", "columns", "hypersphere", "logits"):
        with pytest.raises(ConfigError, match="expected a number above 0, or rms:X"):
            ConstrainOptions("query", to=to, bound="rms:2")
