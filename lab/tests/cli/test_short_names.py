"""Options of the model without ``--model.``, and words that are read once."""

import argparse
import dataclasses
import tomllib
from typing import Annotated

import pytest

from wellposed.errors import ConfigError
from wellposed.model_options import ModelOptions
from wellposed.options import flat_options
from wellposed_lab.cli.arguments import command_form
from wellposed_lab.cli.main import main
from wellposed_lab.cli.parser import Flat, Form, Typed
from wellposed_lab.cli.train import TrainArguments
from wellposed_lab.tasks.task import TASKS

DEFAULTS = {item.name: item.default for item in dataclasses.fields(ModelOptions)}
OF_THE_START = ("attention", "init")
"""Options of the model of ``--from`` have these names."""
AMBIGUOUS = ("feedforward",)
SHORT = sorted(DEFAULTS.keys() - {*OF_THE_START, *AMBIGUOUS})


def printed(cli, command, *words):
    output = cli([command, "char_lm", *words, "--print-config"]).out
    return flat_options(tomllib.loads(output))


@pytest.mark.parametrize("command", ["train", "compare"])
def test_the_short_name_is_the_option_of_the_model(command, cli):
    expected = printed(cli, command, "--model.hidden-size", "8", "--no-model.scale-embeddings")
    assert expected["model.hidden_size"] == 8
    assert expected["model.scale_embeddings"] is False
    for words in (
        ["--hidden-size", "8", "--no-scale-embeddings"],
        ["--hidden_size=8", "--no-scale_embeddings"],
        ["--hidden-size", "4", "--model.hidden-size", "8", "--no-scale-embeddings"],
    ):
        assert printed(cli, command, *words) == expected, words


@pytest.mark.parametrize("task", TASKS.names())
def test_every_other_name_of_the_model_needs_no_section(task):
    form = command_form("train", task, TrainArguments, "Train")
    for name in SHORT:
        word = name.replace("_", "-")
        words = [f"--no-{word}"] if isinstance(DEFAULTS[name], bool) else [f"--{word}", "1"]
        assert form.read(words).keys() == {"model"}, name
        assert form.read(words)["model"].keys() == {name}


@pytest.mark.parametrize("command", ["train", "compare"])
@pytest.mark.parametrize("name", AMBIGUOUS)
def test_a_name_that_may_mean_two_options_is_refused_with_both(name, command, cli):
    message = cli([command, "char_lm", f"--{name}", "mlp"], status=2).err
    assert f"--{name} may mean --model.{name} or --penalty.{name}; write one of them" in message
    assert printed(cli, command, f"--model.{name}", "mlp")[f"model.{name}"] == "mlp"


@pytest.mark.parametrize("name", OF_THE_START)
@pytest.mark.parametrize("value", ["t_fixup", "l2", "nonsense"])
def test_a_name_of_the_start_says_how_our_models_have_it(name, value, cli):
    message = cli(["train", "char_lm", f"--{name}", value], status=2).err
    assert f"--model.{name}" in message


@dataclasses.dataclass(frozen=True)
class Sizes:
    width: int = 0
    depth: int = 0
    tied: bool = True
    text: str = ""
    steps: int = 0


@dataclasses.dataclass(frozen=True)
class Cost:
    width: float = 0.0


@dataclasses.dataclass(frozen=True)
class Training:
    steps: int = 0


@dataclasses.dataclass(frozen=True)
class Options:
    train: Annotated[Training, Flat]
    model: Annotated[Sizes, Typed(has_short_names=True)]
    penalty: Cost


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--depth 2", {"model": {"depth": 2}}),
        ("--no-tied --text --depth=3", {"model": {"tied": False, "text": "--depth=3"}}),
        ("--text=--width", {"model": {"text": "--width"}}),
        ("--steps 2 --model.steps 3", {"train": {"steps": 2}, "model": {"steps": 3}}),
        ("--penalty.width 2", {"penalty": {"width": 2.0}}),
        ("--width 2", "--width may mean --model.width or --penalty.width"),
        ("--width=2", "--width may mean --model.width or --penalty.width"),
        ("--text --depth", "--model.text: expected one argument, a value after it"),
        ("--text --width", "--width may mean --model.width or --penalty.width"),
        ("--dept 2", "'--dept'; nearest: --model.depth"),
    ],
)
def test_short_names_of_sections(words, expected):
    form = Form(Options, "wellposed try")
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            form.read(words.split())
    else:
        assert form.read(words.split()) == expected


@pytest.mark.parametrize("command", ["train", "compare"])
def test_the_command_reads_its_words_once(command, monkeypatch, capsys):
    """`main` reads its own two options, then the command reads all of its own."""
    readers = []
    read = argparse.ArgumentParser.parse_known_args

    def counted(self, *arguments, **options):
        if self not in readers:
            readers.append(self)
        return read(self, *arguments, **options)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", counted)
    variant = ["--variant", "pre_ln"] if command == "train" else ["--variants", "pre_ln"]
    words = ["--steps", "3", "--resume", "auto", *variant, "--print-config"]
    assert main([command, "char_lm", *words]) == 0
    assert "steps = 3" in capsys.readouterr().out
    assert len(readers) == 2
