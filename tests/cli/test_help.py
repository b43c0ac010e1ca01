"""Help is cheap and complete; wrong usage is one line on stderr and exit status 2."""

from __future__ import annotations

import subprocess
import sys

import pytest

from wellposed.cli import COMMANDS, main
from wellposed.recipes.variants import VARIANTS
from wellposed.tasks import TASKS

PROBE = """
import sys
from wellposed.cli import main
status = main(sys.argv[1:])
heavy = [name for name in ("torch", "transformers", "accelerate", "matplotlib") if name in sys.modules]
print("HEAVY", heavy, file=sys.stderr)
raise SystemExit(status)
"""


@pytest.mark.parametrize(
    "words",
    [["--help"], *([name, "--help"] for name in COMMANDS), ["train", "char_lm", "-h"], ["compare", "listops", "-h"]],
)
def test_help_exits_zero_and_imports_nothing_heavy(words: list[str]) -> None:
    found = subprocess.run([sys.executable, "-c", PROBE, *words], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert "usage: wellposed" in found.stdout
    assert "HEAVY []" in found.stderr


def test_every_command_and_task_and_variant_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert main(["compare"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in (*COMMANDS, *TASKS, *VARIANTS))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("wellposed 0.")


@pytest.mark.parametrize("module", ["wellposed", "wellposed.cli"])
def test_the_command_without_its_script(module: str) -> None:
    found = subprocess.run([sys.executable, "-m", module, "trane"], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (2, "")
    assert "nearest: train" in found.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["trane"], "nearest: train"),
        (["train", "listop"], "nearest: listops"),
        (["train", "--steps", "3"], "expected a task first"),
        (["compare", "char_lm", "--variants", "post_nl"], "nearest: post_ln"),
        (["compare", "char_lm", "--variants", "post_ln,post_ln"], "named twice"),
        (["compare", "char_lm", "--seeds", "0"], "expected at least 1"),
        (["train", "char_lm", "--preset", "ptb-mni"], "nearest: ptb-mini"),
        (["train", "listops", "--preset", "ptb-mini"], "is a configuration of task 'char_lm'"),
        (["predict", "somewhere"], "give the text with --text"),
    ],
)
def test_wrong_usage_is_one_message_and_exit_status_two(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    captured = capsys.readouterr()
    assert says in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_an_unknown_option_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "char_lm", "--learning-rat", "1"]) == 2
    captured = capsys.readouterr()
    assert "--learning-rate" in captured.out + captured.err


def test_debug_shows_the_traceback() -> None:
    from wellposed.errors import ConfigError

    with pytest.raises(ConfigError):
        main(["--debug", "trane"])


def test_python_dash_m_is_the_same_command() -> None:
    found = subprocess.run([sys.executable, "-m", "wellposed", "--help"], capture_output=True, text=True, check=False)
    assert found.returncode == 0
    assert "usage: wellposed" in found.stdout
