"""The labelled sentences that ship with Python."""

import ast
import sysconfig
from pathlib import Path

import pytest

from wellposed.errors import ConfigError, DataError
from wellposed.tasks import build_task
from wellposed.tasks.data.texts import labelled_docstrings


def test_every_sentence_stands_in_the_file_that_it_names_and_only_once():
    table, described = labelled_docstrings()
    assert described["rows"] == len(table) == len(set(table.texts)) > 1000
    assert min(table.labels.count(topic) for topic in ("code", "network")) > 500
    library = Path(sysconfig.get_paths()["stdlib"])
    for text, place in list(zip(table.texts, table.places, strict=True))[:20]:
        said = ast.unparse(ast.parse((library / str(place)).read_bytes())).lower()
        assert all(word in said for word in text.split()), place


def test_the_task_cuts_splits_and_takes_no_files_beside():
    task = build_task("text_classification", {"data": "builtin"})
    train, valid, test = (len(task.dataset(split)) for split in ("train", "valid", "test"))
    assert valid == test == round(0.15 * (train + valid + test))
    with pytest.raises(ConfigError, match=r"valid: only with data=FILE; builtin data"):
        build_task("text_classification", {"data": "builtin", "valid": "x.csv"})


def test_a_library_without_source_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match="no source here; give data=FILE"):
        labelled_docstrings.__wrapped__()
