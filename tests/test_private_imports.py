"""The check that no package imports another's private module: what it names, what it lets pass, and
that we pass."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOL = ROOT / "tools" / "private_imports.py"


def check(*paths: Path) -> tuple[int, list[str], str]:
    """Run the tool on paths, or on the whole repository; return exit status, offences and the
    closing line."""
    done = subprocess.run(
        [sys.executable, TOOL, *paths], capture_output=True, text=True, check=False
    )
    *offences, last = (done.stdout or done.stderr).splitlines()
    return done.returncode, offences, last


def written(folder: Path, where: str, line: str) -> Path:
    """Write a module of one import below a function and return its path."""
    file = folder / where
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"def late():\n    {line}\n", encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("where", "line", "name", "owner"),
    [
        (
            "src/wellposed/cli/a.py",
            "from wellposed.tasks._x import y",
            "wellposed.tasks._x.y",
            "wellposed.tasks",
        ),
        (
            "src/wellposed/cli/a.py",
            "from wellposed.tasks import _x",
            "wellposed.tasks._x",
            "wellposed.tasks",
        ),
        (
            "src/wellposed/cli/a.py",
            "import wellposed.tasks._x as x",
            "wellposed.tasks._x",
            "wellposed.tasks",
        ),
        (
            "src/wellposed/cli/a.py",
            "from ..tasks._x import y",
            "wellposed.tasks._x.y",
            "wellposed.tasks",
        ),
        (
            "src/wellposed/tasks2/a.py",
            "from wellposed.tasks._x import y",
            "wellposed.tasks._x.y",
            "wellposed.tasks",
        ),
        (
            "src/wellposed/nn/a.py",
            "from wellposed.nn.checks import _y",
            "wellposed.nn.checks._y",
            "wellposed.nn.checks",
        ),
        (
            "tests/tasks/test_a.py",
            "from wellposed.tasks._x import y",
            "wellposed.tasks._x.y",
            "wellposed.tasks",
        ),
    ],
)
def test_an_import_from_outside_is_named(
    tmp_path: Path, where: str, line: str, name: str, owner: str
) -> None:
    file = written(tmp_path, where, line)
    status, (offence,), last = check(file)
    assert status == 1
    assert offence.startswith(f"{file}:2: {name} is private to {owner}; publish it")
    assert last == "1 imports of another package's private names in 1 files"


@pytest.mark.parametrize(
    ("where", "line"),
    [
        ("src/wellposed/tasks/a.py", "from wellposed.tasks._x import y"),
        ("src/wellposed/tasks/__init__.py", "from ._x import y"),
        (
            "src/wellposed/roles/families/a.py",
            "from wellposed.roles._located_module import LocatedModule",
        ),
        ("src/wellposed/tasks/a.py", "from wellposed import _version"),
        ("tests/a.py", "from wellposed import __version__"),
        ("tests/a.py", "from torch._dynamo import config"),
        ("tests/a.py", "from wellposed.tasks.text.tokenizers import PAD_ID"),
    ],
)
def test_the_owner_and_public_names_pass(tmp_path: Path, where: str, line: str) -> None:
    assert check(written(tmp_path, where, line)) == (
        0,
        [],
        "0 imports of another package's private names in 1 files",
    )


def test_a_folder_that_is_not_there_is_wrong_usage(tmp_path: Path) -> None:
    assert check(tmp_path / "sorce") == (2, [], f"no such file or folder: {tmp_path / 'sorce'}")


def test_this_repository_passes() -> None:
    status, offences, _ = check()
    assert (status, offences) == (0, [])
