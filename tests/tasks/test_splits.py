"""Splits that a source lacks are cut from train: which rows, how many, and what is said of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.support.refusal import bad_config, bad_data

from wellposed.tasks.data.splits import (
    SPLITS,
    DataOptions,
    Split,
    cut_missing,
    cut_missing_text,
    find_split_folders,
    refuse_options,
)


class Numbers(tuple[int, ...]):
    def select(self, rows: Sequence[int], /) -> Numbers:
        return Numbers(self[row] for row in rows)


@pytest.mark.parametrize("missing", [("valid",), ("test",), ("valid", "test")])
def test_rows_are_those_of_the_fixed_shuffle(missing: tuple[Split, ...]) -> None:
    order = list(range(97))
    random.Random("cut").shuffle(order)
    expected = {split: sorted(order[5 * i : 5 * i + 5]) for i, split in enumerate(missing)}
    whole = {split: Numbers([-1]) for split in SPLITS if split not in missing}
    splits, described = cut_missing({**whole, "train": Numbers(range(97))}, "x.tsv")
    assert list(splits) == list(SPLITS)
    assert {split: list(splits[split]) for split in missing} == expected
    assert list(splits["train"]) == sorted(order[5 * len(missing) :])
    assert described == {
        "cut_from_train": dict.fromkeys(missing, "5 of 97 rows, by a fixed shuffle")
    }


def test_nothing_is_cut_where_nothing_is_missing() -> None:
    whole = {split: Numbers([1]) for split in SPLITS}
    assert cut_missing(whole, "x.tsv") == (whole, {})


def test_too_few_rows_say_how_many_are_needed() -> None:
    with bad_data(
        match=r"x: 9 pairs are too few to cut valid and test from, expected at least 10; do y"
    ):
        cut_missing({"train": Numbers(range(9))}, "x", noun="pairs", at_least=10, remedy="do y")


def test_groups_stay_together() -> None:
    splits, described = cut_missing(
        {"train": Numbers(range(40))},
        "x",
        noun="dialogues",
        note=", in pairs",
        draw=lambda train, missing, wanted: (
            {split: [2 * i, 2 * i + 1] for i, split in enumerate(missing)}
            | {"train": list(range(4, 40))}
        ),
    )
    assert [len(splits[split]) for split in SPLITS] == [36, 2, 2]
    assert described["cut_from_train"]["valid"] == "2 of 40 dialogues, in pairs, by a fixed shuffle"


@pytest.mark.parametrize("missing", [(), ("valid",), ("test",), ("valid", "test")])
def test_a_text_is_cut_at_its_end_in_the_order_of_the_splits(missing: tuple[Split, ...]) -> None:
    text = "".join(chr(97 + i % 26) for i in range(1010))
    whole: dict[Split, str] = {split: "own" for split in SPLITS[1:] if split not in missing}
    texts, described = cut_missing_text({"train": text, **whole}, "x.txt")
    assert texts["train"] + "".join(texts[split] for split in missing) == text
    assert all(len(texts[split]) == 50 for split in missing)
    assert all(texts[split] == "own" for split in whole)
    assert described == (
        {"cut_from_train": dict.fromkeys(missing, "contiguous 5%")} if missing else {}
    )


def test_folders_of_splits(tmp_path: Path) -> None:
    for name in ("train", "dev", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "test").write_text("a file")
    assert find_split_folders(tmp_path) == {"train": tmp_path / "train", "valid": tmp_path / "dev"}


def test_files_that_would_not_be_read_are_refused() -> None:
    refuse_options(DataOptions("x"), ("valid", "test"), "why")
    with bad_config(match="option valid and test: only with data=FILE; why"):
        refuse_options(DataOptions("x", "a", "b"), ("valid", "test"), "only with data=FILE; why")
