"""What can be installed: extras that exist, and a test environment in which the README's line would have failed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
TOOLS = {"all", "test", "lint", "docs"}


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=]", requirement)[0].lower() for requirement in requirements}


def test_all_holds_every_extra_of_a_user() -> None:
    [everything] = EXTRAS["all"]
    assert everything == f"wellposed[{','.join(extra for extra in EXTRAS if extra not in TOOLS)}]"


def test_the_tests_run_on_all_extras_at_the_pinned_versions() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "--constraint constraints.txt" in makefile
    assert re.search(r"installed-develop:.*\n\t\$\(PIP\) --editable '\.\[all,test,lint,docs\]'", makefile)


def test_every_package_of_an_extra_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().split()
    pins = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    assert names([line for extra in EXTRAS.values() for line in extra]) - {"wellposed"} <= pins


def test_extras_that_messages_name_exist() -> None:
    doctor = (ROOT / "src/wellposed/cli/_doctor.py").read_text()
    rows = re.findall(r'^    \("([\w-]+)", "(\w+)"\),$', doctor, re.MULTILINE)
    assert ("optuna", "sweep") in rows
    for package, extra in rows:
        assert package in names(EXTRAS[extra]), (package, extra)
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    named = set(re.findall(r'missing_extra\("[^"]+", "(\w+)"', source))
    assert {"hf", "train", "report", "sweep"} <= named <= set(EXTRAS)
