"""The check that no files import each other in a circle: what it names, what it lets pass, and that
we pass."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOL = ROOT / "tools" / "import_circles.py"
LAZY = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from p.a import A as A\n"


def check(folder: Path, files: Mapping[str, str]) -> tuple[int, list[str]]:
    """Write the files of a package and run the tool on it; return the exit status and the lines."""
    for name, text in {"p/__init__.py": "", **files}.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, TOOL, folder], capture_output=True, text=True, check=False
    )
    return done.returncode, (done.stdout or done.stderr).splitlines()


@pytest.mark.parametrize(
    ("files", "way"),
    [
        ({"p/a.py": "import p.b", "p/b.py": "from p import a"}, "p.a -> p.b -> p.a"),
        ({"p/a.py": "from . import b", "p/b.py": "from .a import A"}, "p.a -> p.b -> p.a"),
        (
            {"p/a.py": "def late():\n    from p.b import B", "p/b.py": "import p.a"},
            "p.a -> p.b -> p.a",
        ),
        (
            {"p/a.py": "import p.b", "p/b.py": "import p.c", "p/c.py": "import p.a"},
            "p.a -> p.b -> p.c -> p.a",
        ),
        ({"p/__init__.py": "from p.a import A", "p/a.py": "from p import other"}, "p -> p.a -> p"),
        ({"p/__init__.py": LAZY, "p/a.py": "from p import other"}, "p -> p.a -> p"),
        ({"p/q/__init__.py": "", "p/q/a.py": "import p.q"}, "p.q -> p.q.a -> p.q"),
    ],
)
def test_a_circle_is_named(tmp_path: Path, files: Mapping[str, str], way: str) -> None:
    status, (group, example, last) = check(tmp_path, files)
    assert status == 1
    names = sorted(set(way.split(" -> ")))
    assert group == f"{len(names)} files import each other: {', '.join(names)}"
    assert example.strip() == f"for instance {way}"
    assert last == f"1 circles in the imports of {len({'p/__init__.py', *files})} files"


@pytest.mark.parametrize(
    "files",
    [
        {
            "p/a.py": "import p.b",
            "p/b.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import p.a",
        },
        {"p/__init__.py": LAZY, "p/a.py": "from p.b import B", "p/b.py": "import os"},
        {"p/a.py": "import os, p2.c", "p/b.py": "import p.a"},
    ],
)
def test_imports_for_types_and_downwards_pass(tmp_path: Path, files: Mapping[str, str]) -> None:
    status, lines = check(tmp_path, files)
    assert (status, len(lines)) == (0, 1)


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, TOOL, tmp_path / "none"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, f"no such folder: {tmp_path / 'none'}\n")


# Circles that are being taken apart; a name leaves this list when its files no longer import each
# other.
def test_our_packages_have_no_circle() -> None:
    done = subprocess.run([sys.executable, TOOL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
