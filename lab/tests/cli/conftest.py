"""Small finished runs for the tests of commands."""

import shutil
from pathlib import Path

import pytest
from tests.support.films import write_films
from tests.support.words import SMALLEST, Cli, succeed
from tests.support.words import words as typed


@pytest.fixture(scope="session")
def small_run(tmp_path_factory):
    """Return the folder of a finished run of a tiny classifier with a certificate; copy it before
    changing anything."""
    folder = tmp_path_factory.mktemp("small")
    table = write_films(folder / "train.tsv")
    words = typed("train text_classification --data", [table], "--max-length 6 --steps 6 --quiet")
    words += typed("--eval-every 3 --checkpoint-every 3 --batch-size 8 --model.norm none")
    succeed(words, SMALLEST, "--variant l2_contractive --out", [folder / "run"])
    return folder / "run"


@pytest.fixture
def foreign(small_run, tmp_path):
    """Return a saved model whose files may be edited."""
    ignore = shutil.ignore_patterns("manifest.json")
    return Path(shutil.copytree(small_run / "final", tmp_path / "model", ignore=ignore))


@pytest.fixture
def cli(capsys):
    """Return the command, which one calls with words and a status and reads its output."""
    return Cli(capsys)
