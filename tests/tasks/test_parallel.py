"""Sentence pairs: layouts of folders, tables, the hub; and one message with file:line for
everything that is wrong."""

from __future__ import annotations

import gzip
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.support.refusal import bad_config, bad_data

from wellposed.errors import DataError
from wellposed.tasks.data import parallel, splits
from wellposed.tasks.data.parallel import Languages, load_parallel

PAIRS = [(f"wort {i} .", f"word {i} .") for i in range(50)]
DE_EN = Languages("de", "en")


def write(folder: Path, name: str, texts: list[str]) -> Path:
    content = "".join(text + "\n" for text in texts).encode()
    path = folder / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


def write_split(folder: Path, stem: str, count: int, ending: str = "") -> None:
    write(folder, f"{stem}.de{ending}", [de for de, _ in PAIRS[:count]])
    write(folder, f"{stem}.en{ending}", [en for _, en in PAIRS[:count]])


LAYOUTS = {
    "multi30k": ["train*.gz", "val", "test_2016_flickr"],
    "iwslt": ["train*.gz", "valid*.gz", "test*.gz"],
    "fairseq": ["train.de-en", "valid.de-en", "test.de-en"],
    "wmt": ["corpus.train", "newsdev2017", "newstest2017"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("flipped", [False, True])
def test_every_layout_gives_the_same_pairs(tmp_path: Path, layout: str, flipped: bool) -> None:
    for name, count in zip(LAYOUTS[layout], (40, 7, 5), strict=True):
        stem, _, ending = name.partition("*")
        write_split(tmp_path, stem, count, ending)
    languages = Languages("en", "de") if flipped else DE_EN
    pairs, described = load_parallel(str(tmp_path), languages)
    assert {split: len(texts) for split, texts in pairs.items()} == {
        "train": 40,
        "valid": 7,
        "test": 5,
    }
    sides = (
        (pairs["train"].target, pairs["train"].source)
        if flipped
        else (pairs["train"].source, pairs["train"].target)
    )
    assert list(zip(*sides, strict=True)) == PAIRS[:40]
    assert len(described["files"]["test"]["de"]["sha256"]) == 64
    assert "cut_from_train" not in described


def test_a_test_set_is_chosen_among_several(tmp_path: Path) -> None:
    for stem, count in (
        ("train", 40),
        ("val", 5),
        ("test_2016_flickr", 4),
        ("test_2017_mscoco", 3),
    ):
        write_split(tmp_path, stem, count)
    with bad_data(
        match=r"2 files could be the test split; choose one with test_set:\n  test_2016_fl"
    ):
        load_parallel(str(tmp_path), DE_EN)
    pairs, _ = load_parallel(str(tmp_path), Languages("de", "en", test_set="2017"))
    assert len(pairs["test"]) == 3
    with bad_config(
        match=r"'2018' matches no test set; the folder holds: test_2016_flickr, test_2017"
    ):
        load_parallel(str(tmp_path), Languages("de", "en", test_set="2018"))


def test_missing_splits_are_cut_from_train_and_said_so(tmp_path: Path) -> None:
    write_split(tmp_path, "train", 40)
    pairs, described = load_parallel(str(tmp_path / "train.de"), DE_EN)
    assert described["cut_from_train"] == dict.fromkeys(
        ("valid", "test"), "2 of 40 pairs, by a fixed shuffle"
    )
    rows = [row for texts in pairs.values() for row in zip(texts.source, texts.target, strict=True)]
    assert sorted(rows) == sorted(PAIRS[:40])
    assert pairs["valid"].where(0, 1).startswith(f"{tmp_path / 'train.en'}:")
    write_split(tmp_path, "train", 39)
    with bad_data(match="39 pairs are too few"):
        load_parallel(str(tmp_path), DE_EN)


@pytest.mark.parametrize("header", [False, True])
def test_a_table_of_pairs(tmp_path: Path, header: bool) -> None:
    rows = [f"{i}\t{en}\t{de}" for i, (de, en) in enumerate(PAIRS)]
    write(tmp_path, "train.tsv.gz", (["id\ten\tde"] if header else []) + rows)
    write(tmp_path, "valid.tsv", (["id\ten\tde"] if header else []) + rows[:3])
    languages = DE_EN if header else Languages("de", "en", columns="id,en,de")
    pairs, described = load_parallel(str(tmp_path), languages)
    assert (pairs["valid"].source, pairs["valid"].target) == (
        ["wort 0 .", "wort 1 .", "wort 2 ."],
        [en for _, en in PAIRS[:3]],
    )
    assert described["files"]["valid"]["columns"] == f"id,en,de ({'header' if header else 'given'})"


def test_columns_without_names_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "all.tsv", [f"{en}\t{de}" for de, en in PAIRS])
    with bad_config(
        match=r"all\.tsv:1: no header names de and en \(the line has 2 columns: word 0"
    ):
        load_parallel(str(path), DE_EN)
    with bad_config(match="columns = 'de,fr' must hold en once"):
        load_parallel(str(path), Languages("de", "en", columns="de,fr"))
    write(tmp_path, "all.tsv", ["a\tb", "one", "c\td"])
    with bad_data(match=r"all\.tsv:2: 1 columns"):
        load_parallel(str(path), Languages("de", "en", columns="de,en"))


def test_files_of_different_length(tmp_path: Path) -> None:
    write_split(tmp_path, "train", 40)
    write(tmp_path, "train.en", [en for _, en in PAIRS[:43]])
    says = (
        r"train\.de has 40 lines, \S+train\.en has 43; .* partner is \S+train\.en:41: 'word 40 \.'"
    )
    with pytest.raises(DataError, match=says):
        load_parallel(str(tmp_path), DE_EN)


def test_empty_sides_are_all_named(tmp_path: Path) -> None:
    write_split(tmp_path, "train", 40)
    write(tmp_path, "train.en", ["a", " ", *[en for _, en in PAIRS[2:39]], ""])
    with bad_data(
        match=r"train\.en:2: the target is empty\n\s+\S+train\.en:40: the target is empty"
    ):
        load_parallel(str(tmp_path), DE_EN)


def test_an_unknown_language_names_those_that_exist(tmp_path: Path) -> None:
    write_split(tmp_path, "train", 40)
    with bad_data(match=r"no train file for language 'fr'.*languages that exist there: de, en"):
        load_parallel(str(tmp_path), Languages("de", "fr"))
    with bad_data(match=r"languages that exist there: de, en"):
        load_parallel(str(tmp_path), Languages("cs", "fr"))
    with bad_config(match="expected two languages"):
        load_parallel(str(tmp_path), Languages("de", "de"))
    with bad_data(match="no such file or folder"):
        load_parallel(str(tmp_path / "nowhere"), DE_EN)


class Rows(SimpleNamespace):
    def __getitem__(self, name: str) -> Any:
        return self.columns[name]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)


def test_pairs_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    nested = Rows(columns={"translation": [{"de": de, "en": en} for de, en in PAIRS]})
    flat = Rows(columns={"de": [de for de, _ in PAIRS[:3]], "en": [en for _, en in PAIRS[:3]]})
    monkeypatch.setattr(
        splits, "load_hub_dataset", lambda data: {"train": nested, "valid": flat, "test": flat}
    )
    pairs, _ = load_parallel("hf:some/pairs:de-en", DE_EN)
    assert list(zip(pairs["train"].source, pairs["train"].target, strict=True)) == PAIRS
    assert list(pairs["valid"].target) == [en for _, en in PAIRS[:3]]
    with bad_data(match=r"hf:some/pairs \(train\): no cs; it has de, en"):
        load_parallel("hf:some/pairs", Languages("cs", "en"))


def test_a_test_set_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train = tmp_path / "train.tsv"
    train.write_text("de\ten\n" + "".join(f"{de}\t{en}\n" for de, en in PAIRS * 20))
    other = tmp_path / "other"
    other.mkdir()
    for place, language in enumerate(("de", "en")):
        (other / f"newstest2014.{language}").write_text(
            "".join(f"{pair[place]}!\n" for pair in PAIRS[:2])
        )
    pairs, described = load_parallel(str(train), DE_EN, test=str(other / "newstest2014.en"))
    assert list(pairs["test"].source) == [f"{de}!" for de, _ in PAIRS[:2]]
    assert described["test"]["source"] == str(other / "newstest2014.en")
    assert set(described["cut_from_train"]) == {"valid"}
    (other / "pairs.tsv").write_text("de\ten\nja\tyes\n")
    assert list(
        load_parallel(str(train), DE_EN, test=str(other / "pairs.tsv"))[0]["test"].target
    ) == ["yes"]

    rows = Rows(columns={"translation": [{"de": "nein", "en": "no"}]})
    asked = []
    monkeypatch.setattr(
        parallel, "load_hub_split", lambda data, split: asked.append((data, split)) or rows
    )
    assert list(load_parallel(str(train), DE_EN, test="hf:wmt/wmt14:de-en")[0]["test"].target) == [
        "no"
    ]
    assert asked == [("hf:wmt/wmt14:de-en", "test")]
    with bad_data(match="no such file"):
        load_parallel(str(train), DE_EN, test=str(other / "newstest2013.en"))
    with bad_config(match="give one"):
        load_parallel(
            str(train), Languages("de", "en", test_set="2014"), test=str(other / "newstest2014.en")
        )
