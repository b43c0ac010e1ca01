"""The first page, as a reader meets it: each change runs word for word, in an environment of exactly
the extra that the page names, and its numbers are those of the committed rows."""

import csv
import importlib.metadata
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PAGE = runpy.run_path(str(ROOT / "tools" / "first_page.py"))
CHANGES = PAGE["changes"]()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
README = (ROOT / "README.md").read_text("utf-8")


def brought_by(extra):
    """Return the installed distributions that pip would install for an extra, and nothing else."""
    lines = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"].get(extra, [])]
    waiting = [(line, "") for line in lines]
    brought = {}
    done = set()
    while waiting:
        line, wanted = waiting.pop()
        requirement = Requirement(line)
        if requirement.marker and not requirement.marker.evaluate({"extra": wanted}):
            continue
        name = canonicalize_name(requirement.name)
        brought[name] = importlib.metadata.distribution(name)
        for inner in ("", *requirement.extras):
            if (name, inner) not in done:
                done.add((name, inner))
                waiting += [(needed, inner) for needed in brought[name].requires or ()]
    return brought


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Return what makes a folder of packages with the installed files of one extra alone."""

    def make(extra):
        folder = tmp_path_factory.mktemp(extra)
        for distribution in brought_by(extra).values():
            tops = {file.parts[0] for file in distribution.files or () if ".." not in file.parts}
            for top in tops - {"__pycache__"}:
                if not (folder / top).exists():
                    (folder / top).symlink_to(distribution.locate_file(top))
        (folder / "wellposed").symlink_to(ROOT / "src" / "wellposed")
        return folder

    return make


def run_there(folder, code, working_folder):
    """Run code by an interpreter that sees the packages of a folder and the standard library."""
    keep = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    start = f"import sys; sys.path.append({str(folder)!r}); exec(open('script.py').read())"
    (working_folder / "script.py").write_text(code, encoding="utf-8")
    command = [sys.executable, "-I", "-S", "-c", start]
    return subprocess.run(
        command,
        cwd=working_folder,
        env=keep,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def test_the_page_has_three_changes_and_names_the_extra_of_each():
    assert [(change.name, change.extra) for change in CHANGES] == [
        ("Your loop", "core"),
        ("The Trainer of transformers", "hf"),
        ("A certificate", "hf"),
    ]
    assert README.count("```diff") == len(CHANGES)
    for extra in {change.extra for change in CHANGES} - {"core"}:
        assert f"pip install '.[{extra}]'" in README


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_a_change_runs_here(change):
    exec(change.script(), {})


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.name)
def test_a_change_runs_word_for_word_on_its_extra_alone(change, environment, tmp_path):
    folder = environment(change.extra)
    done = run_there(folder, change.script(), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = {
        "Your loop": "every matrix is below its size",
        "The Trainer of transformers": "'cond', 'epoch'",
        "A certificate": "words   3",
    }
    assert expected[change.name] in done.stdout


@pytest.mark.slow
def test_an_environment_of_an_extra_has_nothing_else(environment, tmp_path):
    missing = "import importlib.util as u; print([n for n in {} if u.find_spec(n)])"
    names = {"core": ("transformers", "numpy", "wellposed_lab"), "hf": ("peft", "wellposed_lab")}
    for extra, others in names.items():
        done = run_there(environment(extra), missing.format(others), tmp_path)
        assert done.stdout.strip() == "[]", done.stderr


CAPPED = {"Muon": "spectral cap, Muon", "AdamW": "spectral cap"}


def test_the_losses_of_the_page_are_those_of_the_study():
    """Of each method at its best rate, and of the cap of the first change."""
    file = ROOT / "benchmarks" / "reproduction" / "frontier-methods.csv"
    rows = [*csv.DictReader(file.read_text("utf-8").splitlines())]
    best = {row["method"]: row for row in rows if row["model"] == "ours"}
    text = README.partition("Least loss")[2].partition("\n\n")[0].partition("):\n")[2]
    printed = {}
    for part in text.rstrip(". ").split("; "):
        name, plain, capped = re.fullmatch(
            r"(\w+) ([\d.]+)(?:, with a cap ([\d.]+))?", part
        ).groups()
        printed[name] = plain
        if capped:
            printed[CAPPED[name]] = capped
    assert printed == {name: f"{float(best[name]['valid']):.3f}" for name in printed}
    assert {*CAPPED, *CAPPED.values()} <= printed.keys()
    losses = sorted(float(row["valid"]) for row in best.values())
    rivals = [row for name, row in best.items() if name not in CAPPED]
    assert min(rivals, key=lambda row: float(row["valid"]))["method"] in printed
    assert f"{losses[0]:.3f}" in printed.values()
    block = CHANGES[0].block
    (rate,) = re.findall(r"lr=(\S+?)\)", block)
    assert float(rate) == float(best["AdamW"]["rate"])
    assert 'bound="rms:2"' in block
