"""Values that nobody means: one line and no traceback; what reaches the terminal tells it nothing."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from tests.support.edited import edited
from tests.support.words import python, succeed
from tests.support.words import words as typed

from wellposed.errors import CheckpointError, ConfigError
from wellposed.models import load_pretrained_model
from wellposed.options import Positive, Size
from wellposed_lab.cli.parser import ModelArguments, parse_words

CORE_ALONE = """
import importlib.abc, json, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {"transformers", "docstring_parser", "accelerate", "rich", "tomli_w"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from wellposed_lab.cli.commands import COMMANDS
from wellposed_lab.cli.main import main
print(json.dumps({name: main([name]) for name in COMMANDS}))
"""


def test_a_label_is_one_field_of_one_line(foreign, tmp_path, cli):
    names = {"0": "a\nb\tc\x1b[2J\ud800", "1": "a\nb\tc\x1b[2J\ud800"}
    with edited(foreign / "config.json") as config:
        config["id2label"] = names
    output = cli(["predict", str(foreign), "--text", "a good film x"]).out
    label, _ = output.removesuffix("\n").split("\t")
    assert label == r"a\nb\tc\x1b[2J\ud800"
    out = tmp_path / "labels"
    succeed(["predict", str(foreign), "--text", "a film x", "--output", str(out)])
    assert out.read_text(encoding="utf-8").count("\n") == 1


def test_the_terminal_gets_no_escape_code_of_a_notice(capsys):
    def log_escape_code(_):
        logging.getLogger("wellposed.constrain").info("weights moved by %s", "\x1b[2J0.7")
        return 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wellposed_lab.cli.report.run", log_escape_code)
        succeed(["report"])
    assert capsys.readouterr().err == "weights moved by \\x1b[2J0.7\n"
    logging.getLogger("wellposed.constrain").info("not shown outside a command")
    assert capsys.readouterr().err == ""


def test_a_quiet_training_shows_its_result_alone_and_another_each_line_once(tmp_path, cli):
    words = typed("train char_lm --steps 2 --seq-len 16 --limit-chars 2000 --eval-batches 1")
    words += typed("--model.hidden-size 8")
    assert cli([*words, "--quiet", "--out", str(tmp_path / "a")]).err == ""
    messages = cli([*words, "--out", str(tmp_path / "b")]).err.splitlines()
    assert len([line for line in messages if line.startswith("step 2/2 valid")]) == 1


def test_a_number_of_labels_that_fills_the_memory_is_refused(foreign):
    import transformers

    with edited(foreign / "config.json") as config:
        config["num_labels"] = 100_000_000
    with pytest.raises(CheckpointError, match="num_labels = 100000000, expected at most 1,000,000"):
        load_pretrained_model(transformers.AutoModel, foreign)


def test_the_core_alone_has_a_doctor_and_names_the_extra_of_each_other_command():
    process = python(["-c", CORE_ALONE])
    assert process.returncode == 0, process.stderr
    status = json.loads(process.stdout.splitlines()[-1])
    assert status.pop("doctor") == 0
    assert set(status.values()) == {2}
    messages = [line for line in process.stderr.splitlines() if line]
    assert len(messages) == len(status)
    assert all("which is not installed; run: pip install " in line for line in messages)


@dataclass(frozen=True)
class Arguments(ModelArguments):
    text: str | None = None
    count: Size | None = None
    bound: Positive | str | None = None
    level: Literal[1, 2] = 1
    wide: bool = True


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("run --text -nice --count 3", {"model": "run", "text": "-nice", "count": 3}),
        ("--text --foo_bar run", {"model": "run", "text": "--foo_bar"}),
        ("--no-wide run", {"model": "run", "wide": False}),
        ("--count None --bound rms:2 --level 2", {"bound": "rms:2", "level": 2}),
        ("--bound=2 --text=", {"bound": 2.0, "text": ""}),
        ("--import a.py --import b.py", {"imports": (Path("a.py"), Path("b.py"))}),
        ("--count -1", "count = -1, expected an integer >= 1 or None"),
        ("--level 3 --bound -1e-3", "level = '3', expected 1 or 2"),
        ("--text --no-wide", "--text: expected one argument"),
        ("--wide=1", "--wide/--no-wide: ignored explicit argument '1'"),
        ("one two", "unknown option of wellposed try 'two'"),
        ("--te x", "'--te'; nearest: --text"),
    ],
)
def test_words_become_options_or_are_refused(typed, expected):
    if isinstance(expected, dict):
        assert parse_words(Arguments, typed.split(), prog="wellposed try") == Arguments(**expected)
        return
    with pytest.raises(ConfigError, match=expected):
        parse_words(Arguments, typed.split(), prog="wellposed try")
