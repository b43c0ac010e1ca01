"""Help is cheap and complete; wrong usage is one line on stderr and exit status 2."""

import dataclasses
import json
import re
import signal
from pathlib import Path

import pytest
from tests.support.words import python

from wellposed_lab.cli.commands import COMMANDS
from wellposed_lab.cli.main import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE, main
from wellposed_lab.compare.variants import VARIANTS
from wellposed_lab.tasks.task import TASKS
from wellposed_lab.training.config import TrainOptions

PROBE = """
import contextlib, io, json, sys
from wellposed_lab.cli.main import main
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as output:
        status = main(words)
    names = "torch numpy transformers accelerate matplotlib tokenizers datasets PIL pandas scipy"
    heavy = [name for name in names.split() if name in sys.modules]
    print(json.dumps([status, heavy, output.getvalue()]))
"""


def test_help_exits_zero_and_imports_nothing_heavy():
    """One process for all: what an earlier one imported would be seen there."""
    calls = [["--help"], *([name, "--help"] for name in COMMANDS)]
    calls += [["train", "char_lm", "-h"], ["compare", "word_lm", "--help-all"]]
    process = python(["-c", PROBE, json.dumps(calls)])
    assert process.returncode == 0, process.stderr
    for words, line in zip(calls, process.stdout.splitlines(), strict=True):
        status, heavy, output = json.loads(line)
        assert (status, heavy) == (0, []), words
        assert "usage: wellposed" in output, words


@pytest.mark.parametrize("command", ["train", "compare"])
def test_the_help_of_a_task_imports_no_task_of_another_package(command):
    """And none of the files that come after the task's own."""
    probe = PROBE + "    print([name for name in sys.modules if name.startswith('wellposed_')])\n"
    process = python(["-c", probe, json.dumps([[command, "char_lm", "--help"]])])
    printed, imported = process.stdout.splitlines()
    assert json.loads(printed)[:2] == [0, []]
    assert "'wellposed_lab.tasks.language_modeling'" in imported
    assert "wellposed_studies" not in imported
    assert "wellposed_lab.tasks.translation" not in imported
    # 48 today; each costs a millisecond or two.
    assert imported.count("'wellposed_") <= 50


def test_every_command_and_task_and_variant_is_in_the_help(cli):
    text = cli("--help").out + cli("compare").out
    assert all(name in text for name in (*COMMANDS, *TASKS, *VARIANTS))


@pytest.mark.parametrize("command", ["train", "compare"])
@pytest.mark.parametrize("task", TASKS.names())
def test_the_first_help_fits_a_screen_and_the_second_is_whole(command, task, cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    first = cli([command, task, "--help"]).out
    full = cli([command, task, "--help-all"]).out
    assert len(first.splitlines()) <= 48
    assert "--help-all` lists all" in first
    generated = "data" not in {item.name for item in dataclasses.fields(TASKS.get(task).options)}
    common = ("--steps", "--learning-rate", "--from", "--out", *(() if generated else ("--data",)))
    assert all(name in first for name in common)
    if task == "text_classification":  # as README gives them
        asked = {"train": ["--margin-loss"], "compare": ["--worth", "--margin-loss"]}
        assert all(name in first for name in (*asked[command], "--quiet", "--max-length"))
    options = [item.name.replace("_", "-") for item in dataclasses.fields(TrainOptions)]
    assert [name for name in options if f"--{name}" not in full] == []
    assert "--model.norm" in full
    assert "{None}" not in first + full


def test_the_exit_statuses_are_those_of_the_page(tmp_path, cli):
    page = (Path(__file__).parents[3] / "docs" / "command.md").read_text("utf-8")
    statuses = list(map(int, re.findall(r"^\| (\d+) \|", page, re.MULTILINE)))
    assert statuses == [EXIT_OK, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED, 128 + signal.SIGPIPE]
    assert all(str(status) in cli("--help").out for status in statuses[:4])


def test_version(cli):
    assert cli(["--version"]).out.startswith("wellposed 0.")


@pytest.mark.parametrize("module", ["wellposed", "wellposed_lab.cli"])
def test_the_command_without_its_script(module):
    process = python("-m", [module], "trane")
    assert (process.returncode, process.stdout) == (2, "")
    assert "nearest: train" in process.stderr


def test_debug_shows_the_traceback():
    from wellposed.errors import ConfigError

    with pytest.raises(ConfigError):
        main(["--debug", "trane"])
