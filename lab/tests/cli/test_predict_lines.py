"""As many labels as lines: only a line feed ends a line, whatever else is in the text."""

import gzip
import io
import itertools
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.support.edited import edited
from tests.support.words import succeed
from tests.support.words import words as typed

from wellposed.words import encode_words, split_words
from wellposed_lab.cli.prediction.labels import encode_lines
from wellposed_lab.cli.prediction.lines import lines_of, read_source
from wellposed_lab.tasks.text.tokenizers import WordEncoder
from wellposed_lab.training.loop.build import load_run_model

LINES = ["a good film x", "a\u2028bad film y", "a good\x0cfilm\x85z", "a bad\x1cfilm \u2029x"]
"""Python's str.splitlines finds nine lines here."""


@pytest.mark.parametrize("way", ["file", "CRLF", "gzip", "standard input", "--text"])
def test_four_lines_are_four_labels(small_run, tmp_path, monkeypatch, way):
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


@pytest.mark.slow
def test_what_was_done_to_the_data_is_on_the_terminal_and_in_the_report(small_run, tmp_path, cli):
    data = small_run.parent / "train.tsv"
    sizes = "--steps 1 --batch-size 4 --model.hidden-size 8"
    words = typed("text_classification --data", [data], "--max-length 3", sizes)
    words += typed(
        "--model.num-hidden-layers 1 --model.num-attention-heads 2 --out", [tmp_path / "run"]
    )
    done = (
        "4 of 4 texts of test are also in train",
        "4 of 4 texts of valid were cut to max_length = 3",
    )
    captured = cli("train", words)
    assert all(captured.err.count(line) == 1 for line in done)
    cli("report", [tmp_path / "run"], "--out", [tmp_path / "page.html"])
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert all(page.count(f"data: {line}") == 1 for line in done)


def test_a_blank_line_is_a_blank_line(small_run, tmp_path, cli):
    """Of several batches; a table is no file of lines."""
    lines = ["", "a good film", " \t", "\u2029", *["a bad film"] * 40, ""]
    filled = [bool(line.strip()) for line in lines]
    (tmp_path / "a.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    captured = cli("predict", [small_run], "--batch-size 7 --input", [tmp_path / "a.txt"])
    assert [bool(line) for line in captured.out.split("\n")[:-1]] == filled
    assert "4 blank lines were left blank in the output" in captured.err
    (tmp_path / "a.csv").write_text("label,text\npos,film\n")
    captured = cli("predict", [small_run], "--input", [tmp_path / "a.csv"], status=1).err
    assert "a.csv: is a .csv file" in captured
    (tmp_path / "a.txt").write_text("\n \n", encoding="utf-8")
    captured = cli("predict", [small_run], "--input", [tmp_path / "a.txt"], status=1).err
    assert "every line is blank" in captured


ODD = (
    *(
        "\ufeff",
        "\u200b",
        "\xad",
        "\x00",
        "\ufffd",
        "e\u0301",
        "\u180e",
        "\x7f",
        "[UNK]",
        "<|unk|>",
    ),
    *("<| unk |>", "a\x1cb", "a\x85b", "a\xa0b", "a\u2028b", "\u3000", "a\rb", "\u4e2d\u6587"),
)
TOKENIZER = WordEncoder(["a", "good", "film", "\ufeff"]).tokenizer(max_length=20)
WHOLE = SimpleNamespace(forward=lambda input_ids, attention_mask: 0)
WINDOWS = SimpleNamespace(config=SimpleNamespace(word_tokens=1, word_mark=None), votes=None)


@pytest.mark.parametrize("model", [WHOLE, WINDOWS], ids=["token_ids", "windows"])
@pytest.mark.parametrize("way", ["--text", "file", "standard input"])
def test_what_is_certified_is_what_is_read(way, model, monkeypatch, tmp_path):
    """Whatever the words: a replaced word never becomes a deleted one. A mark before a file's first
    word is no part of its text."""
    path = {"--text": None, "file": tmp_path / "lines", "standard input": Path("-")}[way]
    for odd, position in itertools.product(ODD, range(4)):
        words = ["a", "good", "film"]
        text = " ".join([*words[:position], odd, *words[position:]])
        (tmp_path / "lines").write_bytes(text.encode())
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        (line,) = lines_of(read_source(text if path is None else None, path))
        text = text if path is None else text.removeprefix("\ufeff")
        counted = split_words(text)
        token_ids = TOKENIZER(text)["input_ids"]
        certified = encode_words(TOKENIZER, [counted], 1)[0] if model is WINDOWS else token_ids
        inputs, _ = encode_lines(model, TOKENIZER, [line], 20, [1])
        assert inputs["input_ids"][0].tolist() == certified, (odd, position)
        assert int(inputs["attention_mask"].sum()) == len(counted), (odd, position)


def test_a_typed_mark_is_a_word_and_one_of_a_file_is_said(small_run, tmp_path, cli):
    assert ", 4 words" in cli("certify", [small_run], "--text", ["\ufeff good film x"]).out
    assert (
        "--text: expected one line" in cli("certify", [small_run], "--text", ["a\nb"], status=2).err
    )
    (tmp_path / "a.txt").write_bytes("\ufeffa good film".encode())
    errors = cli("predict", [small_run], "--input", [tmp_path / "a.txt"]).err
    assert f"{tmp_path / 'a.txt'}: removed a byte-order mark before the text" in errors


def test_a_text_without_blanks_is_said_to_be_one_word(small_run, cli):
    output = cli("certify", [small_run], "--text", ["\u7535\u5f71" * 9]).out
    assert ", 1 word\n" in output
    assert "put blanks between its words or characters" in output


def test_a_cut_gzip_and_a_closed_input_are_one_line(small_run, tmp_path, cli, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)  # closed, as by `<&-`
    assert "input: the file is empty" in cli("predict", [small_run], "--input -", status=1).err
    file = tmp_path / "lines.gz"
    compressed = gzip.compress("\n".join(LINES * 50).encode())
    flipped = compressed[:20] + bytes([compressed[20] ^ 255]) + compressed[21:]
    for data in (compressed[: len(compressed) // 2], compressed[:-4], flipped, compressed[:2]):
        file.write_bytes(data)
        message = cli(["predict", str(small_run), "--input", str(file)], status=1).err
        assert "gzip damaged or cut short" in message
        assert message.count("\n") == 1


def test_a_run_says_how_its_texts_and_logits_are_read(small_run, tmp_path, cli):
    ignored = shutil.ignore_patterns("manifest.json")
    run = Path(shutil.copytree(small_run, tmp_path / "run", ignore=ignored))
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace("logit_scale = 1.0", "logit_scale = 30.0"))
    model, tokenizer = load_run_model(run)
    logits = model(**tokenizer("a good film", return_tensors="pt")).logits.detach()
    likely = float((30 * logits).softmax(-1).max())
    assert likely > 0.01 + float(logits.softmax(-1).max())
    for name in (run, run / "final"):
        output = cli("predict", [name], "--text", ["a good film"]).out
        assert float(output.split()[1]) == pytest.approx(likely, abs=1e-4)


def test_a_text_that_is_cut_is_said_to_be(small_run, cli):
    output = cli("certify", [small_run], "--text", ["film " * 7]).out
    assert ", 7 words, read to the first 6 of 7 pieces\n" in output


def test_a_tokenizer_of_negative_length_is_one_line(foreign, cli):
    for value, wrong in ((-5, 1), (float("inf"), 1), ("many", 1), (None, 0)):
        with edited(foreign / "tokenizer_config.json") as config:
            config["model_max_length"] = value
        errors = cli("predict", [foreign], "--text film", status=wrong).err
        assert errors.count("\n") == errors.count("model_max_length = ") == wrong


def test_errors_advise_options_as_they_are_typed(tmp_path, cli):
    (tmp_path / "a.csv").write_text("tweet,stance\n" + "a text,pro\nmore,con\n" * 20)
    words = ["train", "text_classification", "--data", str(tmp_path / "a.csv")]
    errors = cli([*words, "--out", str(tmp_path / "run")], status=1).err
    assert "give --label-column NAME --text-column NAME, or give --header no" in errors
    assert "--label-column" in cli(["train", "text_classification", "--help"]).out
