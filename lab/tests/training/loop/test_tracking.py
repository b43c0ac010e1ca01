"""Trackers are told what the files of a run hold, and none of them can end a run; what a person sees."""

import io
import logging
import sys

import numpy as np
import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from lab.tests.support import stub_task as stub
from tests.support.notebook import Notebook

from wellposed.errors import ConfigError
from wellposed.options import flat_options
from wellposed_lab.report.runs import read_metrics
from wellposed_lab.training.folder.run_folder import read_config
from wellposed_lab.training.loop.tracking import Progress


@pytest.fixture(autouse=True)
def records(monkeypatch):
    """Register the notebook, without records."""
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "notebook", Notebook)
    monkeypatch.setattr(Notebook, "records", [])
    return Notebook.records


def numbers(row):
    return {
        f"{row['split']}/{name}": value
        for name, value in row.items()
        if name not in ("step", "split", "best") and value is not None
    }


def test_a_tracker_is_told_what_the_files_hold(tmp_path, records, capsys):
    out = tmp_path / "run"
    result = stub.run(stub.make_config(), out, tracking=["notebook"])
    (record,) = records
    assert record.config == flat_options(read_config(out).to_dict())
    assert record.parts == ("wellposed",)
    rows = read_metrics(out)
    assert [values for _, values in record.rows[: len(rows)]] == [numbers(row) for row in rows]
    steps = [step for step, _ in record.rows]
    assert steps == sorted(steps)
    assert [step for step, values in record.rows if "train/loss" in values] == [2, 4, 6, 8, 10, 12]
    assert len(record.rows) == len(rows) + 1
    final = record.rows[-1][1]
    scores = result.result["results"]["stub"]
    named = {"/".join(["final", *name.split(",")[::-1]]): scores[name] for name in scores}
    assert final == {"final/succeeded": 1, **named}
    assert record.finished
    assert capsys.readouterr().out == ""


def test_a_run_is_the_same_with_and_without(tmp_path):
    stub.run(stub.make_config(dropout=0.1), tmp_path / "plain")
    stub.run(stub.make_config(dropout=0.1), tmp_path / "tracked", tracking=["notebook"])
    one = tmp_path / "plain"
    other = tmp_path / "tracked"
    files = [path.relative_to(one) for path in one.rglob("model.safetensors")]
    assert len(files) > 1
    for file in files:
        assert (one / file).read_bytes() == (other / file).read_bytes()


@pytest.mark.parametrize("method", ["start", "store_init_configuration", "log", "finish"])
def test_a_tracker_that_raises_is_told_once_and_ends_nothing(tmp_path, monkeypatch, caplog, method):
    class Broken(Notebook):
        pass

    def fail(*_, **__):
        raise OSError("the network is away")

    monkeypatch.setattr(Broken, method, fail)
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "broken", Broken)
    with caplog.at_level(logging.WARNING, logger="wellposed_lab.training"):
        both = ["broken", "notebook"]
        result = stub.run(stub.make_config(), tmp_path / "run", tracking=both)
    assert result.status == "success"
    complete = next(record for record in Notebook.records if type(record) is Notebook)
    assert len(complete.rows) == len(read_metrics(tmp_path / "run")) + 1
    lines = [record.getMessage() for record in caplog.records if "broken" in record.getMessage()]
    assert lines == ["tracker broken: OSError: the network is away; the run continues without it"]


@pytest.mark.parametrize(
    ("name", "problem"),
    [("comet_ml", "comet_ml needs the package 'comet-ml'"), ("tensorbord", "nearest: tensorboard")],
)
def test_an_absent_tracker_is_refused_at_once(tmp_path, name, problem):
    with pytest.raises(ConfigError, match=problem) as refused:
        stub.run(stub.make_config(), tmp_path / "run", tracking=[name])
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()


TRAIN = {
    "step": 5, "split": "train", "loss": 1.25, "penalty": 0.5, "grad_norm": 2.0, "learning_rate": 1e-3,
    "tokens_per_second": 123456.0, "seconds": 3.0,
}  # fmt: skip
VALID = {"step": 5, "split": "valid", "loss": 1.5, "nats": np.float64(1.5)}
VALID |= {"best": True, "seconds": 4.0}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def show(monkeypatch, stream, *, enabled=True):
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(enabled=enabled, steps=10, description="listops oc1 seed 0") as progress:
        progress.start(0)
        progress.say("a [bold]message[/bold]")
        progress.row(dict(TRAIN))
        progress.row(dict(VALID))
    return stream.getvalue()


def test_plain_lines(monkeypatch, capsys):
    lines = show(monkeypatch, io.StringIO()).splitlines()
    assert lines[0] == "a [bold]message[/bold]"
    numbers = "loss 1.25 penalty 0.5 grad_norm 2 learning_rate 0.001 tokens_per_second 123,456"
    assert lines[1].startswith(f"step 5/10 {numbers}")
    assert lines[2] == "step 5/10 valid: loss 1.5 nats 1.5 (best)"
    assert capsys.readouterr().out == ""


def test_a_bar_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = show(monkeypatch, Terminal())
    expected = ("listops oc1 seed 0", "loss 1.2500", "123,456 tokens/s", "5/10", "[bold]message")
    assert all(part in coloured for part in expected)
    assert "\x1b[3" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    plain = show(monkeypatch, Terminal())
    assert "\x1b[3" not in plain
    assert "loss 1.2500" in plain
