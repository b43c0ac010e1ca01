"""As many labels as lines: only a line feed ends a line, whatever else is in the text."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import sys
from pathlib import Path

import pytest
from tests.support.words import succeed

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
    succeed(["predict", str(small_run), *words, "--output", str(out)])
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


def test_a_table_is_read_by_the_column_of_the_training(
    small_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, table, out = tmp_path / "a.txt", tmp_path / "a.csv", tmp_path / "labels"
    plain.write_text("a good film, x\na bad film\n")
    table.write_text('id,Text,other\n1,"a good film, x",b\n2,a bad film,c\n')
    labels = []
    for file in (plain, table):
        succeed(["predict", str(small_run), "--input", str(file), "--output", str(out)])
        labels.append(out.read_text())
    assert labels[0] == labels[1]
    assert "a.csv: text 'Text'" in capsys.readouterr().err
    table.write_text("id,tweet\n1,a good film\n")
    assert main(["predict", str(small_run), "--input", str(table)]) == 1
    assert "give --text-column NAME" in capsys.readouterr().err
    words = ["predict", str(small_run), "--input", str(table), "--text-column", "tweet"]
    succeed([*words, "--output", str(out)])
    assert len(out.read_text().splitlines()) == 1


def test_a_tokenizer_of_negative_length_is_one_line(
    small_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(small_run / "final", tmp_path / "model"))
    (folder / "manifest.json").unlink()
    config = folder / "tokenizer_config.json"
    for value in (-5, "many", None):
        config.write_text(json.dumps({**json.loads(config.read_text()), "model_max_length": value}))
        code = main(["predict", str(folder), "--text", "a film"])
        said = capsys.readouterr().err
        assert (code, said.count("\n")) == ((0, 0) if value is None else (1, 1)), said
        assert value is None or "model_max_length = " in said


def test_errors_advise_options_as_they_are_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.csv").write_text("tweet,stance\n" + "a text,pro\nmore,con\n" * 20)
    words = ["train", "text_classification", "--data", str(tmp_path / "a.csv")]
    assert main([*words, "--out", str(tmp_path / "run")]) == 1
    said = capsys.readouterr().err
    assert "give --label-column stance --text-column tweet, or give --header no" in said
    succeed(["train", "text_classification", "--help"])
    assert "--label-column" in capsys.readouterr().out
