"""Readers of the minBERT sets: every row is read, every bad row is named."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import pytest
from tests.support.refusal import bad_data

from wellposed_studies.mcgrath2024.sets import encode_rows, read_minbert, train_word_pieces

HEADERS = {
    "ids-sst": "\tid\tsentence\tsentiment\n",
    "quora": "\tid\tsentence1\tsentence2\tis_duplicate\n",
    "sts": "\tid\tsentence1\tsentence2\tsimilarity\n",
}
ROWS = {
    "ids-sst": '0\ta\t good film \t4\n1\tb\t"""quoted"" film"\t0\n',
    "quora": "0\ta\twhat is it?\twhat's it?\t1.0\n1\tb\twho?\twhere?\t0.0\n",
    "sts": "0\ta\ta cat\ta dog\t0.8\n",
}


def folder_of(path: Path) -> Path:
    for stem, header in HEADERS.items():
        for split in ("train", "dev"):
            (path / f"{stem}-{split}.csv").write_text(header + ROWS[stem], encoding="utf-8")
    return path


def test_sentences_and_labels_are_read(tmp_path: Path) -> None:
    folder_of(tmp_path)
    (tmp_path / "quora-train-extra.csv.gz").write_bytes(
        gzip.compress((HEADERS["quora"] + "7\tz\tone\ttwo\t1.0\n").encode())
    )
    (tmp_path / "ids-sst-test-student.csv").write_text("no labels here\n")
    sets = read_minbert(tmp_path)
    assert list(sets) == ["sst", "para", "sts"]
    assert sets["sst"].train == [(("good film",), 4.0), (('"quoted" film',), 0.0)]
    assert sets["para"].train[0] == (("one", "two"), 1.0)  # files in the order of their names
    assert len(sets["para"].train) == 3
    assert len(sets["para"].valid) == 2
    assert sets["sts"].valid == [(("a cat", "a dog"), 0.8)]
    assert [file["rows"] for file in sets["para"].files] == [1, 2, 2]


@pytest.mark.parametrize(
    ("file", "rows", "says"),
    [
        ("ids-sst-train", "0\ta\tfilm\t4\n1\tb\tfilm\t7\n", ":3: sentiment is '7'"),
        ("ids-sst-train", '0\ta\t"two\nlines"\t1\n1\tb\tfilm\tgood\n', ":4: sentiment is 'good'"),
        ("ids-sst-dev", "0\ta\tfilm\t1.5\n", ":2: .*whole number in 0..4"),
        ("quora-train", "0\ta\tone\ttwo\t\n", ":2: is_duplicate is ''"),
        ("quora-dev", "0\ta\tone\t1.0\n", ":2: 4 columns, expected 5"),
        ("sts-train", "0\ta\t \ttwo\t1.0\n", ":2: sentence1 is empty"),
        ("sts-train", "0\ta\tone\ttwo\tnan\n", ":2: similarity is 'nan'"),
        ("sts-dev", "\tid\tsentence1\tsentence2\n0\ta\tone\ttwo\n", ":1: the header lacks sim"),
        ("sts-dev", "", ".*a header and no rows"),
        ("sts-dev", '0\ta\t"one\ttwo\t1.0\n', ":2: not a row of quoted fields"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, file: str, rows: str, says: str) -> None:
    folder_of(tmp_path)
    header = "" if "sentence1" in rows else HEADERS[file.rpartition("-")[0]]
    (tmp_path / f"{file}.csv").write_text(header + rows)
    with bad_data(match=f"{file}.csv{says}"):
        read_minbert(tmp_path)


def test_missing_and_doubled_files_are_named(tmp_path: Path) -> None:
    folder_of(tmp_path)
    (tmp_path / "sts-dev.csv").unlink()
    (tmp_path / "quora-train.csv").unlink()
    with bad_data(match=r"(?s)para, train.*sts, valid.*it holds"):
        read_minbert(tmp_path)
    folder_of(tmp_path)
    (tmp_path / "sts-dev.csv.gz").write_bytes(gzip.compress(b"x"))
    with bad_data(match=r"both plain and gzip"):
        read_minbert(tmp_path)
    with bad_data(match="no such file or folder"):
        read_minbert(tmp_path / "elsewhere")


def test_pairs_are_joined_by_sep_and_cut_rows_are_counted(tmp_path: Path) -> None:
    sets = read_minbert(folder_of(tmp_path))
    texts = [text for data in sets.values() for row, _ in data.train for text in row]
    tokenizer = train_word_pieces(texts, vocab_size=80, max_length=8)
    again = train_word_pieces(texts, vocab_size=80, max_length=8)
    assert tokenizer.get_vocab() == again.get_vocab()
    pair = tokenizer("a cat", "a dog")
    assert tokenizer.decode(pair["input_ids"]) == "[CLS] a cat [SEP] a dog [SEP]"
    first = pair["input_ids"].index(tokenizer.sep_token_id)
    assert pair["token_type_ids"] == [0] * (first + 1) + [1] * (len(pair["input_ids"]) - first - 1)
    rows, cut = encode_rows(sets["para"].train, tokenizer, max_length=6)
    sizes = [len(tokenizer(*row)["input_ids"]) for row, _ in sets["para"].train]
    assert cut == sum(size > 6 for size in sizes) > 0
    assert [len(row["input_ids"]) for row in rows] == [min(size, 6) for size in sizes]
    assert all(row["input_ids"][-1] == tokenizer.sep_token_id for row in rows)


@pytest.mark.data
def test_the_shared_files_are_read_whole(shared_data: Path) -> None:
    sets = read_minbert(shared_data / "minbert")
    sizes = {"sst": (8544, 1101), "para": (28017, 2000), "sts": (6040, 863)}
    assert {name: (len(data.train), len(data.valid)) for name, data in sets.items()} == sizes
    # The same rows by the csv module's own dictionary reader.
    path = shared_data / "minbert" / "quora-valid-2k.csv.gz"
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    wanted = [(row["sentence1"].strip(), row["sentence2"].strip()) for row in rows]
    assert [row for row, _ in sets["para"].valid] == wanted
