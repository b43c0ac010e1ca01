"""Running text and pairs from JSON lines, JSON lists and parquet."""

import json
import sys

import pytest
from tests.support.refusal import bad_config, bad_data

from wellposed.tasks.data.parallel import ParallelOptions, load_parallel
from wellposed.tasks.data.splits import DataOptions
from wellposed.tasks.data.texts import load_texts

TEXTS = [{"text": f"line {number} of a text that is long enough to be cut"} for number in range(40)]
PAIRS = [{"de": f"eins {number}", "en": f"one {number}", "id": number} for number in range(60)]
NESTED = [{"translation": {"de": row["de"], "en": row["en"]}} for row in PAIRS]


def write(path, rows):
    if path.suffix == ".parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["train.jsonl", "train.json", "train.parquet"])
def test_the_column_text_is_the_text(tmp_path, name):
    write(tmp_path / name, TEXTS)
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "train.txt").write_text("".join(row["text"] + "\n" for row in TEXTS))
    expected, _ = load_texts(DataOptions(str(tmp_path / "plain")))
    for data in (tmp_path / name, tmp_path):
        found, described = load_texts(DataOptions(str(data)))
        assert found == expected
        assert "sha256" in described["files"]["train"]


@pytest.mark.parametrize("rows", [PAIRS, NESTED], ids=["columns", "nested"])
@pytest.mark.parametrize("name", ["train.jsonl", "train.json", "train.parquet"])
def test_columns_by_language_are_the_pairs(tmp_path, name, rows):
    write(tmp_path / name, rows)
    for data in (tmp_path / name, tmp_path):
        found, _ = load_parallel(ParallelOptions(str(data), "de", "en"))
        pairs = [
            pair
            for split in found.values()
            for pair in zip(split.source, split.target, strict=True)
        ]
        assert sorted(pairs) == sorted((row["de"], row["en"]) for row in PAIRS)


def test_a_pair_without_text_is_named(tmp_path):
    path = write(tmp_path / "a.json", [*PAIRS, {"de": None, "en": "one", "id": 1}])
    with bad_data(match=r"a\.json:61: 'de' is NoneType, expected a string"):
        load_parallel(ParallelOptions(str(path), "de", "en"))


def test_parquet_without_its_package_names_the_extra(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", TEXTS)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with bad_config(match=r"parquet files need the package 'datasets'.*wellposed\[hf\]"):
        load_texts(DataOptions(str(path)))
