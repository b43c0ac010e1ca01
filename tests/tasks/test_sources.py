"""Reading files: gzip, UTF-8, missing and empty files, and how valid and test are found."""

from __future__ import annotations

import gzip
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.refusal import bad_data

from wellposed.errors import DataError
from wellposed.tasks.data.files import read_text
from wellposed.tasks.data.splits import find_split_files, load_hub_dataset

SUFFIXES = (".tsv", ".csv")


def touch(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).write_text("x")


def test_gzip_equals_plain_whatever_the_name(tmp_path: Path) -> None:
    text = "naïve café\r\n日本\n"
    (tmp_path / "a.txt").write_bytes(text.encode())
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "c.txt").write_bytes(gzip.compress(text.encode()))
    assert [read_text(tmp_path / name).text for name in ("a.txt", "b.txt.gz", "c.txt")] == [
        text
    ] * 3


def test_byte_order_mark_is_taken_off_and_said(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbftext")
    file = read_text(tmp_path / "a.txt")
    assert file.text == "text"
    assert file.description()["byte_order_mark_removed"] is True


def test_not_utf8_names_line_byte_and_offset(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\ntwo\ncaf\xe9 x\n")
    with bad_data() as caught:
        read_text(tmp_path / "a.txt")
    message = str(caught.value)
    assert (
        f"{tmp_path / 'a.txt'}:3: not UTF-8: byte 0xe9 at byte 4 of the line, byte offset 11 of the"
        " file" in message
    )
    assert "iconv -f LATIN1 -t UTF-8" in message


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        ("text".encode("utf-16"), "iconv -f UTF-16"),
        (b"\x89PNG\r\n\x1a\n\x00\x00\x00", "holds control bytes, which no text has"),
    ],
)
def test_what_is_no_text_is_said_to_be_none(tmp_path: Path, content: bytes, hint: str) -> None:
    (tmp_path / "a.tsv").write_bytes(content)
    with bad_data(match=rf"a.tsv:1: not UTF-8: .*{hint}"):
        read_text(tmp_path / "a.tsv")


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "the file is empty"), (b" \n\n", "white space only")]
)
def test_empty_files(tmp_path: Path, content: bytes, message: str) -> None:
    for name, stored in (("a.txt", content), ("b.txt.gz", gzip.compress(content))):
        (tmp_path / name).write_bytes(stored)
        with pytest.raises(DataError, match=message):
            read_text(tmp_path / name)


def test_gzip_cut_in_half_and_fake_gzip(tmp_path: Path) -> None:
    stored = gzip.compress(bytes(range(256)) * 50)
    (tmp_path / "half.gz").write_bytes(stored[: len(stored) // 2])
    (tmp_path / "flipped.gz").write_bytes(stored[:12] + bytes(len(stored) - 12))
    (tmp_path / "fake.gz").write_bytes(b"plain text")
    for name in ("half.gz", "flipped.gz"):
        with bad_data(match="damaged or cut short"):
            read_text(tmp_path / name)
    with bad_data(match=r"named \.gz but is not gzip"):
        read_text(tmp_path / "fake.gz")


def test_missing_file_lists_near_names(tmp_path: Path) -> None:
    touch(tmp_path, "ptb.char.train.txt.gz", "other.md")
    with bad_data(match=r"no such file or folder; nearest in .*: ptb\.char\.train\.txt\.gz"):
        read_text(tmp_path / "ptb.char.trian.txt.gz")
    with bad_data(match=r"nearest in .*: ptb\.char\.train\.txt\.gz"):
        find_split_files(str(tmp_path / "ptb.char.tran.txt.gz"), suffixes=SUFFIXES)


@pytest.mark.parametrize(
    ("train", "valid", "test"),
    [
        ("ptb.char.train.txt.gz", "ptb.char.valid.txt.gz", "ptb.char.test.txt.gz"),
        ("d20s_train.tsv.gz", "d20s_valid.tsv.gz", "d20s_test.tsv.gz"),
        ("train.csv", "validation.csv", "test.csv"),
        ("train.csv", "val.csv.gz", "test.csv"),
        ("ids-sst-train.csv.gz", "ids-sst-dev.csv", "ids-sst-test.csv"),
        ("Train.tsv", "Valid.tsv", "Test.tsv"),
    ],
)
def test_siblings_of_a_train_file(tmp_path: Path, train: str, valid: str, test: str) -> None:
    touch(tmp_path, train, valid, test, "unrelated.txt", "other_valid.csv")
    found, how = find_split_files(str(tmp_path / train), suffixes=SUFFIXES)
    assert how == "found by name"
    assert {split: path.name for split, path in found.items()} == {
        "train": train,
        "valid": valid,
        "test": test,
    }


def test_a_file_with_another_name_has_no_siblings(tmp_path: Path) -> None:
    touch(tmp_path, "constraint.txt", "constvalid.txt", "test.txt")
    found, how = find_split_files(str(tmp_path / "constraint.txt"), suffixes=SUFFIXES)
    assert list(found) == ["train"]
    assert how == "one file"


def test_file_mode_is_exact_and_folder_mode_takes_one_more_part(tmp_path: Path) -> None:
    touch(tmp_path, "train.tsv.gz", "valid.tsv", "test_a.tsv.gz", "README.md")
    assert list(find_split_files(str(tmp_path / "train.tsv.gz"), suffixes=SUFFIXES)[0]) == [
        "train",
        "valid",
    ]
    found, _ = find_split_files(str(tmp_path), suffixes=SUFFIXES)
    assert [path.name for path in found.values()] == [
        "train.tsv.gz",
        "valid.tsv",
        "test_a.tsv.gz",
    ]


def test_explicit_files_win(tmp_path: Path) -> None:
    touch(tmp_path, "train.tsv", "valid.tsv", "mine.tsv")
    found, how = find_split_files(
        str(tmp_path / "train.tsv"), valid=str(tmp_path / "mine.tsv"), suffixes=SUFFIXES
    )
    assert found["valid"].name == "mine.tsv"
    assert "valid given" in how
    with bad_data(match="no such file"):
        find_split_files(
            str(tmp_path / "train.tsv"), test=str(tmp_path / "absent.tsv"), suffixes=SUFFIXES
        )


def test_folders_without_or_with_several_train_files(tmp_path: Path) -> None:
    with bad_data(
        match=r"looked for names like train\.tsv\[\.gz\], train\.csv\[\.gz\].*found: nothing"
    ):
        find_split_files(str(tmp_path), suffixes=SUFFIXES)
    touch(tmp_path, "data.txt", "train.json")
    with bad_data(match=r"no train file;.*found: data\.txt, train\.json; give the file itself"):
        find_split_files(str(tmp_path), suffixes=SUFFIXES)
    touch(tmp_path, "a_train.tsv", "b_train.tsv")
    with bad_data(match="2 train files, expected one") as caught:
        find_split_files(str(tmp_path), suffixes=SUFFIXES)
    assert "a_train.tsv" in str(caught.value)


def test_two_candidates_for_one_split_are_refused(tmp_path: Path) -> None:
    touch(tmp_path, "train.tsv", "test_a.tsv", "test_b.tsv")
    with bad_data(match=r"could be the test split of train\.tsv: test_a\.tsv, test_b\.tsv"):
        find_split_files(str(tmp_path), suffixes=SUFFIXES)


def test_hub_data_set_by_name_and_config(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    calls: list[tuple[Any, ...]] = []

    def load(*args: Any) -> dict[str, Any]:
        calls.append(args)
        return {
            "train": SimpleNamespace(),
            "validation": SimpleNamespace(),
            "extra": SimpleNamespace(),
        }

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert list(load_hub_dataset("hf:owner/name:small")) == ["train", "valid"]
    load_hub_dataset("hf:name")
    assert calls == [("owner/name", "small"), ("name", None)]


def test_hub_failures_are_data_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def fail(*args: Any) -> None:
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with bad_data(match="hf:name: cannot be loaded: ConnectionError: offline"):
        load_hub_dataset("hf:name")
    with bad_data(match="no data set is named"):
        load_hub_dataset("hf:")
    monkeypatch.setattr(datasets, "load_dataset", lambda *args: {"everything": None})
    with bad_data(match="no split named train; it has everything"):
        load_hub_dataset("hf:name")
