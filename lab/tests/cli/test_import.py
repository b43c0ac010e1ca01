"""A task, a variant, an attention, a model family, a command, a preset and a section of the report
from outside the package: from a file, and from a package."""

import os
import shutil
import tomllib
from functools import partial
from hashlib import sha256
from pathlib import Path

import pytest
from tests.support.films import write_films
from tests.support.words import SMALLEST, Cli, commands, python
from tests.support.words import words as typed

from wellposed.errors import ConfigError
from wellposed_lab.plugins import import_again, import_file

PLUGIN = '''
from dataclasses import dataclass, replace
from pathlib import Path

from wellposed_lab.cli.commands import COMMANDS, Command
from wellposed_lab.compare.run_presets import RUN_PRESETS
from wellposed_lab.compare.variants import VARIANTS
from wellposed.nn import ATTENTIONS
from wellposed_lab.report.extra_sections import REPORT_SECTIONS, ExtraSection
from wellposed.roles import FAMILIES
from wellposed_lab.tasks.task import TASKS, TaskSpec
from wellposed_lab.tasks.text_classification import (
    TextClassificationOptions,
    TextClassificationTask,
)
from wellposed_lab.training.config import RunConfig


@dataclass(frozen=True)
class FilmOptions:
    max_length: int = 6
    """Longest text."""


class FilmTask(TextClassificationTask):
    """Films, good or bad."""

    name = "films"

    def __init__(self, options):
        rows = str(Path(__file__).with_name("rows.tsv"))
        super().__init__(TextClassificationOptions(data=rows, max_length=options.max_length))


TASKS.register("films")(TaskSpec("films", FilmOptions, FilmTask, "films, good or bad"))
ATTENTIONS.register("mine")(ATTENTIONS.get("dot_product"))
FAMILIES.register("mine")(FAMILIES.get(FAMILIES.names()[0]))


@VARIANTS.register("mine")
def mine(base):
    """My attention."""
    return replace(base, model=replace(base.model, attention="mine"))


RUN_PRESETS.register("mine")(lambda: mine(RunConfig("films")))
COMMANDS.register("mine")(Command("count words of mine", "mine"))
COMMANDS.register("other")(Command("unused", "json"))


def run(words):
    """Say how many words there are, and fail."""
    print(len(words), "words")
    return 1


@REPORT_SECTIONS.register("mine")
def notes(folders):
    """A section for each text."""
    texts = [path for folder in folders for path in folder.glob("*.note")]
    return [ExtraSection(path.stem, {"says": path.read_text()}) for path in texts]
'''
TINY = typed("--steps 2 --eval-every 2 --batch-size 8 --quiet", SMALLEST)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with the plug-in `my.py`, its rows and a comparison of its variant on its
    task."""
    folder = tmp_path_factory.mktemp("plugged")
    write_films(folder / "rows.tsv")
    (folder / "my.py").write_text(PLUGIN, encoding="utf-8")
    words = ["compare", "films", "--seeds", "1", "--variants", "post_ln,mine"]
    words += ["--import", str(folder / "my.py"), "--out", str(folder / "runs")]
    done = python("-m wellposed", words, TINY)
    assert done.returncode == 0, done.stderr
    return folder


def test_a_run_records_what_it_imported(folder):
    config = tomllib.loads((folder / "runs/mine/seed-0/config.toml").read_text("utf-8"))
    file = folder / "my.py"
    assert (config["task"], config["model"]["attention"]) == ("films", "mine")
    assert config["imports"] == {str(file.resolve()): sha256(file.read_bytes()).hexdigest()}


@pytest.mark.slow
def test_a_folder_runs_no_code_until_its_file_is_named(folder):
    run = folder / "runs" / "mine" / "seed-0"
    file = folder.resolve() / "my.py"
    words = ("predict", run, "--text", "a good film x")
    done = python("-m wellposed", words)
    assert done.returncode == 2
    assert f"{file}: if you trust it, give --import {file}" in done.stderr
    done = python("-m wellposed", words, "--import", [file])
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\t")[0] in ("pos", "neg")


def test_a_file_that_changed_or_went_is_named(tmp_path):
    file = tmp_path / "changed.py"
    file.write_text("raise RuntimeError", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        import_again({str(file): "0" * 64, str(tmp_path / "gone.py"): "0" * 64}, where="runs/a")
    message = str(caught.value)
    assert message.startswith("runs/a was made with code from outside wellposed")
    assert f"{file}: has changed; to run it as it is now, give --import {file}" in message
    assert f"{tmp_path / 'gone.py'}: no such file; give --import with its new place" in message


def test_a_file_that_moved_is_the_same_file(tmp_path):
    file = tmp_path / "moved.py"
    file.write_text("MOVED = True", encoding="utf-8")
    import_file(file)
    import_again({"/gone/mine.py": sha256(file.read_bytes()).hexdigest()}, where="runs/a")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def", "SyntaxError"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        (
            "from wellposed_lab.tasks.task import TASKS\nTASKS.register('char_lm')(0)",
            "task 'char_lm' is",
        ),
    ],
)
def test_a_file_that_fails_is_one_line(
    tmp_path: Path, cli: Cli, source: str, expected: str
) -> None:
    file = tmp_path / "my.py"
    file.write_text(source, encoding="utf-8")
    message = cli(["train", "char_lm", "--import", str(file)], status=2).err
    assert f"--import {file}: {expected}" in message
    assert message.count("\n") == 1


@pytest.mark.slow
def test_an_installed_package_brings_its_names_by_entry_points(folder, tmp_path):
    shutil.copy(folder / "my.py", tmp_path / "mine.py")
    shutil.copy(folder / "rows.tsv", tmp_path)
    (tmp_path / "a.note").write_text("<b> is bold")
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    groups = "tasks variants attentions families commands presets report_sections"
    entry_points = "".join(f"[wellposed.{group}]\nmine = mine\n" for group in groups.split())
    (info / "entry_points.txt").write_text(entry_points)
    page = tmp_path / "page.html"
    calls = [
        ["--help"],
        typed("mine a b"),
        ["other"],
        typed("train films --preset mine --variant mine --print-config"),
        typed("report", [tmp_path], "--out", [page]),
    ]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    program = "from wellposed.roles import FAMILIES; print(json.dumps(['mine' in FAMILIES, '']))"
    run = partial(commands, calls, program, env={**os.environ, "PYTHONPATH": path})
    (family, text, ran, other, config, reported), _ = run()
    assert family[0]
    assert "mine       count words of mine" in text[1]
    assert ran == [1, "2 words\n"]
    assert "its module json has no function run(words)" in other[1]
    assert config[0] == reported[0] == 0, (config, reported)
    assert 'attention = "mine"' in config[1]
    assert "<dt>says</dt><dd>&lt;b&gt; is bold</dd>" in page.read_text("utf-8")
    (tmp_path / "mine.py").write_text("import nothing_of_this_name")
    (family, text, ran, _, _, reported), warned = run()
    assert not family[0]
    assert text[0] == 0, "everything else works"
    assert "unknown command 'mine'" in ran[1]
    assert "no run folder" in reported[1]
    where = "entry point mine = mine of mine in wellposed.families is left out: ModuleNotFoundError"
    assert where in warned
