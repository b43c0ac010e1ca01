"""What a person sees: plain lines when piped, a bar on a terminal, nothing when quiet, no colour
under NO_COLOR."""

import io
import sys

import pytest

from wellposed.training.loop.progress import Progress

TRAIN = {
    "step": 5, "split": "train", "loss": 1.25, "penalty": 0.5, "grad_norm": 2.0, "learning_rate": 1e-3,
    "tokens_per_second": 123456.0, "seconds": 3.0,
}  # fmt: skip
VALID = {"step": 5, "split": "valid", "loss": 1.5, "nats": 1.5, "best": True, "seconds": 4.0}


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
    assert lines[1].startswith(f"step 5/10 {numbers} eta ")
    assert lines[2] == "step 5/10 valid: loss 1.5 nats 1.5 (best)"
    assert capsys.readouterr().out == ""


def test_a_bar_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.delenv("NO_COLOR", raising=False)
    coloured = show(monkeypatch, Terminal())
    shown = ("listops oc1 seed 0", "loss 1.2500", "123,456 tokens/s", "5/10", "[bold]message")
    assert all(part in coloured for part in shown)
    assert "\x1b[3" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    plain = show(monkeypatch, Terminal())
    assert "\x1b[3" not in plain
    assert "loss 1.2500" in plain


def test_a_part_has_a_bar_or_a_line_every_ten_seconds(monkeypatch):
    clock = iter([0.0, 9.0, 10.0, 10.5, 21.0])
    monkeypatch.setattr("wellposed.training.loop.progress.time.monotonic", lambda: next(clock))
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with Progress(enabled=True, steps=10, description="") as progress:
        for done in range(5):
            progress.part("generating", done, 7)
    assert stream.getvalue().splitlines() == [f"generating: {done}/7" for done in (0, 2, 4)]


@pytest.mark.parametrize(("done", "began", "expected"), [(5, 0.0, "0:00:10"), (0, 0.0, "-")])
def test_eta(monkeypatch, done, began, expected):
    clock = iter([began, 10.0])
    monkeypatch.setattr("wellposed.training.loop.progress.time.monotonic", lambda: next(clock))
    progress = Progress(enabled=False, steps=10, description="")
    progress.start(0)
    assert progress._remaining(done) == expected
