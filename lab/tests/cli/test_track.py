"""``--track``: a tracker of one's own from a file."""

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from tests.support.notebook import Notebook
from tests.support.words import TINY, succeed
from tests.support.words import words as typed

PLUGIN = """
from accelerate.tracking import register_tracker_class
from tests.support.notebook import Notebook

register_tracker_class(Notebook)
"""


def of_prose(folder):
    text = folder / "prose.txt"
    text.write_text("the quick brown fox jumps over the lazy dog.\n" * 60, encoding="utf-8")
    return typed("--steps 2 --eval-every 2 --batch-size 4 --seq-len 24", TINY, "--data", [text])


@pytest.fixture
def words(tmp_path, monkeypatch):
    """Return options of a tiny run that is told to a notebook."""
    monkeypatch.setattr(Notebook, "records", [])
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "notebook", Notebook)  # and is gone after the test
    monkeypatch.delitem(LOGGER_TYPE_TO_CLASS, "notebook")
    (tmp_path / "my.py").write_text(PLUGIN, encoding="utf-8")
    return typed(of_prose(tmp_path), "--track notebook --import", [tmp_path / "my.py"])


@pytest.mark.slow
def test_each_run_of_a_comparison_is_told(words, tmp_path):
    words = typed(words, "--seeds 1 --variants post_ln,pre_ln --out", [tmp_path / "runs"])
    succeed("compare char_lm", words)
    assert [run.config["variant"] for run in Notebook.records] == ["post_ln", "pre_ln"]
    assert all("final/test/loss" in run.rows[-1][1] for run in Notebook.records)


def test_a_tracker_that_is_not_installed_is_one_line(tmp_path, cli):
    for command in ("train", "compare"):
        out = tmp_path / command
        words = typed(command, "char_lm --track clearml", of_prose(tmp_path), "--out", [out])
        errors = cli(words, status=2).err
        assert errors.count("\n") == 1
        assert "'clearml', which is not installed; nothing was trained; run: pip install" in errors
        assert errors.rstrip().endswith("pip install clearml")
        assert not out.exists()
