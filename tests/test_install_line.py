"""The line to type for a missing part: of a clone its path, of an index the name, of a wheel its address."""

import importlib.metadata
import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from wellposed.errors import EXTRAS, ConfigError, extra_line, import_extra, require_extras
from wellposed.install_line import install_line

ROOT = Path(__file__).parents[1]
WHEEL = "file:///somewhere/wellposed-0.4.0-py3-none-any.whl"


def clone_at(folder):
    """A folder with our three packages."""
    for part in (".", "lab", "studies"):
        (folder / part).mkdir(parents=True, exist_ok=True)
        (folder / part / "pyproject.toml").write_text("")
    return folder


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Return what pretends that `wellposed` was installed in a way, away from this clone."""

    def pretend(direct_url):
        text = None if direct_url is None else json.dumps(direct_url)
        distribution = SimpleNamespace(read_text=lambda name: text)
        monkeypatch.setattr(importlib.metadata, "distribution", lambda name: distribution)
        module = tmp_path / "site-packages" / "wellposed" / "install_line.py"
        monkeypatch.setattr("wellposed.install_line.__file__", str(module))

    return pretend


def address(folder, **details):
    return {"url": folder.as_uri(), "dir_info": details}


PARTS = ("hf", "compare", "lab", "studies")


def line_of(part):
    return install_line("wellposed-studies") if part == "studies" else extra_line(part)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("way", ["clone", "editable", "here", "blank", "lost", "wheel", "index"])
def test_the_line_can_be_typed_here(way, part, installed, tmp_path, monkeypatch):
    clone = clone_at(tmp_path / ("my clone" if way == "blank" else "clone"))
    quote = (lambda text: f"'{text}'") if way == "blank" else (lambda text: text)
    if way == "here":
        monkeypatch.chdir(clone)
    if way == "lost":
        (clone / "lab" / "pyproject.toml").unlink()
    editable = {"editable": True} if way == "editable" else {}
    recorded = {"wheel": {"url": WHEEL, "archive_info": {}}, "index": None}
    installed(recorded.get(way, address(clone, **editable)))
    option = "-e " if editable else ""
    dotted = {
        "hf": "'.[hf]'", "compare": "'./lab[compare]'", "lab": "./lab", "studies": "./lab ./studies"
    }[part]  # fmt: skip
    absolute = {
        "hf": f"{option}'{clone}[hf]'",
        "compare": f"{option}'{clone}/lab[compare]'",
        "lab": option + quote(f"{clone}/lab"),
        "studies": f"{option}{quote(f'{clone}/lab')} {option}{quote(f'{clone}/studies')}",
    }[part]
    of_an_index = {
        "hf": "'wellposed[hf]'", "compare": "'wellposed-lab[compare]'", "lab": "wellposed-lab",
        "studies": "wellposed-studies",
    }[part]  # fmt: skip
    expected = {"here": dotted, "index": of_an_index}.get(way, absolute)
    if way in ("lost", "wheel"):
        expected = f"{dotted} (in a clone of wellposed)"
    if (way, part) == ("wheel", "hf"):
        expected = f"'wellposed[hf] @ {WHEEL}'"
    assert line_of(part) == f"pip install {expected}"


def test_of_a_clone_that_was_never_installed_the_files_tell(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    monkeypatch.chdir(ROOT)
    assert install_line("wellposed", "hf") == "pip install '.[hf]'"


MISSING = {
    "compare": ("scipy", "compare char_lm --steps 1"),
    "plots": ("matplotlib", "report x"),
    "translation": ("sacrebleu", "train translation --data FOLDER --src a --tgt b --steps 1"),
    "datasets": ("datasets", "train text_classification --data hf:x --steps 1"),
    "images": (
        "PIL",
        "train image_classification --data FOLDER --from FOLDER/config.json --steps 1",
    ),
    "hf": ("transformers", "predict x --text a"),
    "lab": ("tomli_w", "train char_lm --steps 1"),
}
VIT = {
    "model_type": "vit", "image_size": 8, "patch_size": 4, "hidden_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 1, "intermediate_size": 8,
}  # fmt: skip
WITHOUT = """
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == sys.argv[1]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
from wellposed_lab.cli.main import main
raise SystemExit(main(sys.argv[2:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("extra", [extra for extra in EXTRAS if extra != "lightning"])
def test_a_command_without_a_package_of_an_extra_names_it_before_it_trains(
    extra, tmp_path, monkeypatch
):
    module, command = MISSING[extra]
    for split, label in itertools.product(("train", "valid", "test"), "ab"):
        (tmp_path / "classes" / split / label).mkdir(parents=True)
        (tmp_path / "classes" / split / label / "1.png").write_bytes(b"")
    (tmp_path / "classes" / "config.json").write_text(json.dumps(VIT))
    words = [word.replace("FOLDER", str(tmp_path / "classes")) for word in command.split()]
    words = [sys.executable, "-c", WITHOUT, module, *words]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2, done.stderr
    monkeypatch.chdir(tmp_path)  # the line is short in the clone itself
    assert f"which is not installed; run: {extra_line(extra)}" in done.stderr
    assert not [*tmp_path.rglob("metrics.jsonl")]


def test_missing_packages_are_refused_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    with pytest.raises(ConfigError, match=r"paired tests need the package 'scipy'.*compare"):
        import_extra("scipy.special", "compare", "paired tests")
    monkeypatch.setattr("wellposed.errors.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="reports need the package 'scipy'"):
        require_extras(("compare",), "reports")
