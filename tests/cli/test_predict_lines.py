"""As many labels as lines: only a line feed ends a line, whatever else is in the text."""

from __future__ import annotations

import gzip
import io
import sys
from pathlib import Path

import pytest

from wellposed.cli import main

LINES = ["a good film x", "a\u2028bad film y", "a good\x0cfilm\x85z", "a bad\x1cfilm \u2029x"]
"""Python's str.splitlines finds nine lines here."""


@pytest.mark.parametrize("way", ["file", "CRLF", "gzip", "standard input", "--text"])
def test_four_lines_are_four_labels(
    small_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    way: str,
) -> None:
    data = ("\r\n" if way == "CRLF" else "\n").join([*LINES, ""]).encode()
    file = tmp_path / "lines"
    file.write_bytes(gzip.compress(data) if way == "gzip" else data)
    words = ["--text", "\n".join(LINES)] if way == "--text" else ["--input", str(file)]
    if way == "standard input":
        words = ["--input", "-"]
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    out = tmp_path / "labels"
    assert main(["predict", str(small_run), *words, "--output", str(out)]) == 0
    labels = out.read_text(encoding="utf-8").split("\n")
    assert len(labels) == len(LINES) + 1
    assert all(label.split("\t")[0] in ("pos", "neg") for label in labels[:-1])


def test_a_cut_gzip_is_one_line(
    small_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lines.gz"
    whole = gzip.compress("\n".join(LINES * 50).encode())
    for data in (
        whole[: len(whole) // 2],
        whole[:-4],
        whole[:20] + bytes([whole[20] ^ 255]) + whole[21:],
        whole[:2],
    ):
        file.write_bytes(data)
        assert main(["predict", str(small_run), "--input", str(file)]) == 1
        message = capsys.readouterr().err
        assert "the gzip data is damaged or cut short" in message
        assert message.count("\n") == 1
