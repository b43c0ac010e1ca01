"""Installation and citation: the extras exist and the version is stated once. The README's line would
have failed in the test environment; every paper is cited."""

import re
import tomllib
from pathlib import Path

import yaml

import wellposed
from wellposed.errors import EXTRAS as NAMED_EXTRAS
from wellposed_lab.cli.main import main
from wellposed_lab.training.folder.run_folder import versions

ROOT = Path(__file__).parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = SETTINGS["project"]["optional-dependencies"]
PARTS = {
    name: tomllib.loads((ROOT / name / "pyproject.toml").read_text())["project"]
    for name in ("lab", "studies")
}
LAB_EXTRAS = PARTS["lab"]["optional-dependencies"]
TOOLS = {"all", "test", "lint", "docs"}


def names(requirements):
    return {re.split(r"[\[<>=]", requirement)[0].lower() for requirement in requirements}


def test_all_holds_every_extra_of_a_user():
    everything, lab, peft = EXTRAS["all"]
    assert peft in EXTRAS["test"]
    assert everything == f"wellposed[{','.join(extra for extra in EXTRAS if extra not in TOOLS)}]"
    *parts, everything_of_the_lab = PARTS["lab"]["optional-dependencies"]
    assert lab == f"wellposed-lab[{everything_of_the_lab}]"
    assert PARTS["lab"]["optional-dependencies"]["all"] == [f"wellposed-lab[{','.join(parts)}]"]


def test_every_package_of_an_extra_is_pinned():
    lines = (ROOT / "constraints.txt").read_text().split()
    pins = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    wanted = [line for extra in EXTRAS.values() for line in extra]
    wanted += [line for part in PARTS.values() for line in part["dependencies"]]
    wanted += [line for entry in LAB_EXTRAS.values() for line in entry]
    assert names(wanted) - {"wellposed", "wellposed-lab"} <= pins


def test_extras_that_messages_name_exist():
    for extra, packages in NAMED_EXTRAS.items():
        # transformers brings the hub's client
        brought = {**EXTRAS, **LAB_EXTRAS, "lab": PARTS["lab"]["dependencies"]}[extra]
        assert set(packages) - {"huggingface-hub"} <= names(brought), extra
    every = [
        line for entry in (*LAB_EXTRAS.values(), PARTS["lab"]["dependencies"]) for line in entry
    ]
    listed = {package for packages in NAMED_EXTRAS.values() for package in packages}
    assert names(every) - {"wellposed", "wellposed-lab"} <= listed
    files = [path for root in ("src", "lab") for path in (ROOT / root).rglob("*.py")]
    source = "\n".join(path.read_text() for path in files)
    named = set(re.findall(r'_extra\(\s*"[^"]+", "(\w+)"', source))
    assert {"hf", "compare", "translation", "images"} <= named <= set(NAMED_EXTRAS)


def test_the_version_comes_from_one_place(capsys):
    """The build reads the line of `__version__`, and every other version is equal to it, whether
    installed afresh or not."""
    assert "version" not in SETTINGS["project"]
    assert {part["version"] for part in PARTS.values()} == {wellposed.__version__}
    assert SETTINGS["project"]["dynamic"] == ["version"]
    source = (ROOT / SETTINGS["tool"]["hatch"]["version"]["path"]).read_text()
    assert re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE) == [wellposed.__version__]
    assert main(["--version"]) == 0
    assert main(["doctor"]) == 0
    version_line, first, *_ = capsys.readouterr().out.splitlines()
    assert version_line.split() == first.split() == ["wellposed", wellposed.__version__]
    assert versions()["wellposed"] == wellposed.__version__


def test_the_citation_is_of_this_version_and_names_every_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == wellposed.__version__
    dated = re.findall(r"^## (\S+) - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert dated[0] == (citation["version"], str(citation["date-released"]))
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings == ["Unreleased", *(f"{version} - {date}" for version, date in dated)]
    assert citation["license"] == SETTINGS["project"]["license"]
    firsts = [
        (entry["authors"][0]["family-names"], entry["year"]) for entry in citation["references"]
    ]
    papers = {f"{name.lower()}{year}" for name, year in firsts}
    recipes = {path.stem for path in (ROOT / "studies/wellposed_studies").iterdir()}
    assert papers == {"zhang2021", "mcgrath2024", "kim2021", "sengupta2023", "huang2020"} <= recipes
