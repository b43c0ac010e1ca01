"""The data sets of Sengupta et al. (2023), as far as they are at hand: counts, labels, token
lengths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from wellposed.tasks import SPLITS, build_task

pytestmark = pytest.mark.data


@pytest.mark.parametrize(("color", "sizes", "tokens"), [("gray", [10000, 1000, 2000], 1024)])
def test_cifar_in_gray(shared_data: Path, color: str, sizes: list[int], tokens: int) -> None:
    task = build_task("image", {"data": str(shared_data / "cifar10_subset"), "color": color})
    assert [len(task.dataset(split)) for split in SPLITS] == sizes
    assert set(task.lengths("train")) == {tokens}
    assert task.model_kwargs()["num_labels"] == 10
    assert task.reference() == {"accuracy": 0.1}


def test_cifar_in_colour(shared_data: Path) -> None:
    task = build_task(
        "image", {"data": str(shared_data / "cifar10_subset"), "color": "rgb", "size": 16}
    )
    assert [len(task.dataset(split)) for split in SPLITS] == [2850, 150, 1000]
    assert set(task.lengths("test")) == {768}


def test_ag_news_as_pairs(shared_data: Path) -> None:
    options: dict[str, Any] = {
        "data": str(shared_data / "ag_news"),
        "num_train": 2000,
        "max_length": 256,
    }
    task = build_task("retrieval", options)
    assert [len(task.dataset(split)) for split in SPLITS] == [2000, 1000, 3800]
    described = task.description()
    assert described["files"]["test"]["path"].endswith("test_even.tsv.gz")
    assert described["labels"]["train"] == {"different": 1000, "related": 1000}


def test_ag_news_words_out_of_the_box(shared_data: Path) -> None:
    task = build_task("text_classification", {"data": str(shared_data / "ag_news")})
    assert [len(task.dataset(split)) for split in SPLITS] == [9000, 1000, 3800]
    assert task.model_kwargs()["id2label"] == {0: "0", 1: "1", 2: "2", 3: "3"}
