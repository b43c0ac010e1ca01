"""Type checkers read our types in a user's script: `py.typed` is there, and mistakes are seen."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import wellposed

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "tests" / "typed" / "user_script.py"
CHECKERS = {
    "pyright": ["--pythonpath", sys.executable],
    "mypy": ["--python-executable", sys.executable, "--follow-imports", "silent"],
}
MISTAKES = {
    "worst: str = handle.error().worst": "worst: float = handle.error().worst",
    "table: int = wp.measure(model).table()": "table: str = wp.measure(model).table()",
    "numbers: list[str] = monitor.step()": "numbers: dict[str, float] = monitor.step()",
}


def checked(name, folder, code):
    """Return what a checker says about a script, and its status."""
    tool = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if tool is None:
        pytest.skip(f"{name} is not installed: pip install {name}")
    (folder / "script.py").write_text(code, encoding="utf-8")
    source = str(ROOT / "src")
    (folder / "pyrightconfig.json").write_text(f'{{"extraPaths": ["{source}"]}}', encoding="utf-8")
    done = subprocess.run(
        [tool, *CHECKERS[name], "script.py"],
        cwd=folder, env={**os.environ, "MYPYPATH": source}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_the_mark_of_types_is_there_and_the_script_runs():
    assert (Path(wellposed.__file__).parent / "py.typed").is_file()
    assert runpy.run_path(str(SCRIPT))["worst"] >= 0


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKERS)
def test_a_users_script_has_no_error_and_each_mistake_one(name, tmp_path):
    code = SCRIPT.read_text("utf-8")
    status, text = checked(name, tmp_path, code)
    assert status == 0, text
    for wrong, right in MISTAKES.items():
        assert code.count(right) == 1
        status, text = checked(name, tmp_path, code.replace(right, wrong))
        assert status == 1, wrong
        assert text.count("script.py:") == 1, text
