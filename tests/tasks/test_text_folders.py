"""Texts in folders by class, as the public release of IMDb holds them."""

from __future__ import annotations

from pathlib import Path

import pytest

from wellposed.errors import ConfigError, DataError
from wellposed.tasks import SPLITS, build_task


def write(root: Path) -> None:
    for split, count in (("train", 12), ("test", 5)):
        for name in ("neg", "pos"):
            (root / split / name).mkdir(parents=True)
            for index in range(count):
                (root / split / name / f"{index}_{index % 10}.txt").write_text(
                    f"{name} {split} {index} é"
                )
        (root / split / "urls_pos.txt").write_text("http://somewhere")
    (root / "train" / "unsup").mkdir()
    (root / "train" / "unsup" / "0_0.txt").write_text("no label")


def test_the_release_of_imdb_is_read_as_it_is(tmp_path: Path) -> None:
    write(tmp_path)
    task = build_task("text_classification", {"data": str(tmp_path), "tokenizer": "byte"})
    assert [len(task.dataset(split)) for split in SPLITS] == [23, 1, 10]
    names = task.model_kwargs()["id2label"]
    for split in SPLITS:
        for example in task.dataset(split):
            assert (
                task.tokenizer.decode(example["input_ids"]).split()[0]
                == names[example["labels"][0]]
            )
    described = task.description()
    assert described["left_out_without_label"] == ["train/unsup"]
    assert described["files"]["test"]["files"] == 10
    assert described["cut_from_train"] == {"valid": "1 of 24 rows, by a fixed shuffle"}


@pytest.mark.parametrize("inside", ["train", "train/pos"])
def test_a_folder_inside_the_release_names_the_one_to_give(tmp_path: Path, inside: str) -> None:
    write(tmp_path / "aclImdb")
    with pytest.raises(
        DataError, match=f"expected the folder that holds train; give {tmp_path / 'aclImdb'}$"
    ):
        build_task("text_classification", {"data": str(tmp_path / "aclImdb" / inside)})


def test_bad_files_are_named(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "test" / "pos" / "9_9.txt").write_bytes(b"caf\xe9")
    (tmp_path / "test" / "zero").mkdir()
    with pytest.raises(DataError) as caught:
        build_task("text_classification", {"data": str(tmp_path)})
    assert f"{tmp_path / 'test' / 'pos' / '9_9.txt'}: not UTF-8: byte 0xe9 at offset 3" in str(
        caught.value
    )
    assert f"{tmp_path / 'test' / 'zero'}: no .txt file" in str(caught.value)
    (tmp_path / "test" / "zero").rmdir()
    (tmp_path / "test" / "pos" / "9_9.txt").write_text(" ")
    with pytest.raises(DataError, match=r"pos/9_9.txt: the text is empty"):
        build_task("text_classification", {"data": str(tmp_path)})
    with pytest.raises(ConfigError, match="folders of texts by class bring their own splits"):
        build_task("text_classification", {"data": str(tmp_path), "valid": "x.tsv"})
