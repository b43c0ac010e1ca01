"""Reading files: gzip, UTF-8, missing and empty files; how valid and test are found, or cut from train;
texts and pairs from JSON and parquet."""

import gzip
import json
import random
import sys
from types import SimpleNamespace

import pytest

from wellposed.errors import ConfigError, DataError
from wellposed_lab.tasks.data.files import read_text
from wellposed_lab.tasks.data.parallel import ParallelOptions, load_parallel
from wellposed_lab.tasks.data.splits import (
    SPLITS,
    DataOptions,
    cut_missing,
    cut_missing_text,
    find_split_files,
    load_hub_dataset,
)
from wellposed_lab.tasks.data.texts import load_texts


def touch(folder, *names):
    for name in names:
        (folder / name).write_text("x")


def find(data, **chosen):
    """Return the names of the files of train, valid and test, and how they were found."""
    named = {split: str(path) for split, path in chosen.items()}
    files, source = find_split_files(DataOptions(str(data), **named), suffixes=(".tsv", ".csv"))
    assert list(files) == list(SPLITS)[: len(files)]
    return [path.name for path in files.values()], source


def test_gzip_equals_plain_whatever_the_name(tmp_path):
    text = "naïve café\r\n日本\n"
    stored = gzip.compress(text.encode())
    for name, content in {"a.txt": text.encode(), "b.txt.gz": stored, "c.txt": stored}.items():
        (tmp_path / name).write_bytes(content)
        assert read_text(tmp_path / name).text == text
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbftext")
    file = read_text(tmp_path / "a.txt")
    assert (file.text, file.described["byte_order_mark_removed"]) == ("text", True)


CUT = gzip.compress(bytes(range(256)) * 50)
LATIN1 = b"one\ntwo\ncaf\xe9 x\n"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", LATIN1, r"a\.txt:3: not UTF-8: byte 0xe9 at byte 4 of the line"),
        ("a.txt", LATIN1, "byte offset 11 of the file.*iconv -f LATIN1 -t UTF-8"),
        ("a.tsv", "text".encode("utf-16"), r"a\.tsv:1: not UTF-8: .*iconv -f UTF-16"),
        ("a.tsv", b"\x89PNG\r\n\x1a\n\x00\x00\x00", "control bytes, so it is no text"),
        ("a.txt", b"", "the file is empty"),
        ("a.txt", b" \n\n", "white space only"),
        ("b.txt.gz", gzip.compress(b"", mtime=0), "the file is empty"),
        ("half.gz", CUT[: len(CUT) // 2], "damaged or cut short"),
        ("flipped.gz", CUT[:12] + bytes(len(CUT) - 12), "damaged or cut short"),
        ("fake.gz", b"plain text", r"named \.gz but is not gzip"),
    ],
)
def test_what_is_no_text_is_named(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"(?s){message}") as caught:
        read_text(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_missing_file_lists_near_names(tmp_path):
    touch(tmp_path, "ptb.char.train.txt.gz", "other.md")
    with pytest.raises(
        DataError, match=r"no such file or folder; nearest in .*: ptb\.char\.train\.txt\.gz"
    ):
        read_text(tmp_path / "ptb.char.trian.txt.gz")
    with pytest.raises(DataError, match=r"nearest in .*: ptb.char.train.txt.gz"):
        find(tmp_path / "ptb.char.tran.txt.gz")


@pytest.mark.parametrize(
    "names",
    [
        "ptb.char.train.txt.gz ptb.char.valid.txt.gz ptb.char.test.txt.gz",
        "d20s_train.tsv.gz d20s_valid.tsv.gz d20s_test.tsv.gz",
        "train.csv validation.csv test.csv",
        "train.csv val.csv.gz test.csv",
        "ids-sst-train.csv.gz ids-sst-dev.csv ids-sst-test.csv",
        "Train.tsv Valid.tsv Test.tsv",
    ],
)
def test_siblings_of_a_train_file(tmp_path, names):
    files = names.split()
    touch(tmp_path, *files, "unrelated.txt", "other_valid.csv")
    assert find(tmp_path / files[0]) == (files, "found by name")


def test_file_mode_is_exact_and_folder_mode_takes_one_more_part(tmp_path):
    touch(tmp_path, "train.tsv.gz", "valid.tsv", "test_a.tsv.gz", "constrain.txt", "constvalid.txt")
    assert find(tmp_path / "constrain.txt") == (["constrain.txt"], "one file")
    assert find(tmp_path / "train.tsv.gz")[0] == ["train.tsv.gz", "valid.tsv"]
    assert find(tmp_path)[0] == ["train.tsv.gz", "valid.tsv", "test_a.tsv.gz"]


def test_explicit_files_win(tmp_path):
    touch(tmp_path, "train.tsv", "valid.tsv", "mine.tsv")
    files, source = find(tmp_path / "train.tsv", valid=tmp_path / "mine.tsv")
    assert files[1] == "mine.tsv"
    assert "valid given" in source
    with pytest.raises(DataError, match="no such file"):
        find(tmp_path / "train.tsv", test=tmp_path / "absent.tsv")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("", r"looked for names like train\.tsv\[\.gz\], train\.csv\[\.gz\].*found: nothing"),
        ("data.txt train.json", r"no train file;.*found: data\.txt, train\.json; give the file"),
        ("a_train.tsv b_train.tsv", r"(?s)2 train files, expected one.*a_train\.tsv"),
        ("train.tsv test_a.tsv test_b.tsv", r"could be the test split of train\.tsv: test_a\.tsv"),
    ],
)
def test_folders_that_leave_a_split_open(tmp_path, names, message):
    touch(tmp_path, *names.split())
    with pytest.raises(DataError, match=message):
        find(tmp_path)


def test_hub_data_set_by_name_and_config(monkeypatch):
    import datasets

    calls = []

    def load(*args):
        calls.append(args)
        return dict.fromkeys(("train", "validation", "extra"), SimpleNamespace())

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert list(load_hub_dataset("hf:owner/name:small")) == ["train", "valid"]
    load_hub_dataset("hf:name")
    assert calls == [("owner/name", "small"), ("name", None)]


def test_hub_failures_are_data_errors(monkeypatch):
    import datasets

    def fail(*args):
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(DataError, match="hf:name: cannot be loaded: it is not in the cache"):
        load_hub_dataset("hf:name")
    with pytest.raises(DataError, match="no data set is named"):
        load_hub_dataset("hf:")
    monkeypatch.setattr(datasets, "load_dataset", lambda *args: {"everything": None})
    with pytest.raises(DataError, match="no split named train; it has everything"):
        load_hub_dataset("hf:name")


class Numbers(tuple[int, ...]):
    def select(self, rows, /):
        return Numbers(self[row] for row in rows)


@pytest.mark.parametrize("missing", [("valid",), ("test",), ("valid", "test")])
def test_rows_are_those_of_the_fixed_shuffle(missing):
    order = list(range(97))
    random.Random("cut").shuffle(order)
    expected = {split: sorted(order[5 * i : 5 * i + 5]) for i, split in enumerate(missing)}
    present = {split: Numbers([-1]) for split in SPLITS if split not in missing}
    splits, described = cut_missing({**present, "train": Numbers(range(97))}, "x.tsv", {})
    assert list(splits) == list(SPLITS)
    assert {split: list(splits[split]) for split in missing} == expected
    assert list(splits["train"]) == sorted(order[5 * len(missing) :])
    assert described == {
        "cut_from_train": dict.fromkeys(missing, "5 of 97 rows, by a fixed shuffle")
    }


@pytest.mark.parametrize("missing", [(), ("valid",), ("test",), ("valid", "test")])
def test_a_text_is_cut_at_its_end_in_the_order_of_the_splits(missing):
    text = "".join(chr(97 + i % 26) for i in range(1010))
    present = {split: "own" for split in SPLITS[1:] if split not in missing}
    texts, described = cut_missing_text({"train": text, **present}, "x.txt", {})
    assert texts["train"] + "".join(texts[split] for split in missing) == text
    assert {len(texts[split]) for split in missing} <= {50}
    assert texts.items() >= present.items()
    assert described.get("cut_from_train", {}) == dict.fromkeys(missing, "contiguous 5%")


TEXTS = [{"text": f"line {number} of a text that is long enough to be cut"} for number in range(40)]
PAIRS = [{"de": f"eins {number}", "en": f"one {number}", "id": number} for number in range(60)]
NESTED = [{"translation": {"de": row["de"], "en": row["en"]}} for row in PAIRS]


def write(path, rows):
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet"])
def test_the_column_text_is_the_text(tmp_path, name):
    write(tmp_path / name, TEXTS)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "train.txt").write_text("".join(row["text"] + "\n" for row in TEXTS))
    plain, folder, file = (
        load_texts(DataOptions(str(path))) for path in (tmp_path / "x", tmp_path, tmp_path / name)
    )
    assert plain[0] == folder[0] == file[0]
    assert "sha256" in file[1]["files"]["train"]


@pytest.mark.parametrize("rows", [PAIRS, NESTED], ids=["columns", "nested"])
@pytest.mark.parametrize("name", ["train.jsonl", "train.parquet"])
def test_columns_by_language_are_the_pairs(tmp_path, name, rows):
    write(tmp_path / name, rows)
    for data in (tmp_path / name, tmp_path):
        loaded, _ = load_parallel(ParallelOptions(str(data), "de", "en"))
        pairs = [
            pair
            for split in loaded.values()
            for pair in zip(split.source, split.target, strict=True)
        ]
        assert sorted(pairs) == sorted((row["de"], row["en"]) for row in PAIRS)


def test_a_pair_without_text_is_named(tmp_path):
    path = write(tmp_path / "a.jsonl", [*PAIRS, {"de": None, "en": "one", "id": 1}])
    with pytest.raises(DataError, match=r"a\.jsonl:61: the row has no 'de'"):
        load_parallel(ParallelOptions(str(path), "de", "en"))


def test_parquet_without_its_package_names_the_extra(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", TEXTS)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ConfigError, match=r"parquet files need the package 'datasets'.*\[datasets\]"
    ):
        load_texts(DataOptions(str(path)))
