"""The published data sets, as far as they are at hand: counts, vocabularies, labels."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest
from tests.support.tokenizer_folders import bert_words

from wellposed.tasks import SPLITS, CharLMTask, Task, build_task

pytestmark = pytest.mark.data


def sizes(task: Task) -> list[int]:
    return [len(task.dataset(split)) for split in SPLITS]


def test_penn_treebank_characters(shared_data: Path) -> None:
    task = build_task(
        "char_lm", {"data": str(shared_data / "ptb" / "ptb.char.train.txt.gz"), "seq_len": 256}
    )
    assert isinstance(task, CharLMTask)
    described = task.description()
    assert described["tokenizer"]["vocabulary"] == 50 + 2
    assert all(described["unknown_characters"][split]["count"] == 0 for split in SPLITS)
    # The word files hold the same sentences: one line feed and the text between the outer spaces
    # per line.
    for split in SPLITS:
        words = gzip.decompress((shared_data / "ptb" / f"ptb.{split}.txt.gz").read_bytes()).decode()
        lines = [line.strip() for line in words.removesuffix("\n").split("\n")]
        assert described["characters"][split] == sum(map(len, lines)) + len(lines)
        assert len(task.dataset(split).tokens) == described["characters"][split]
    decoded = task.tokenizer.decode(task.dataset("valid")[0]["input_ids"])
    assert decoded.startswith(
        "consumers may want to move their telephones a little closer to the tv set\n<unk> <unk> "
    )
    assert task.reference()["nats_per_char"] == pytest.approx(3.005, abs=0.001)


def test_listops_d20s_labels_all_equal_an_independent_evaluation(shared_data: Path) -> None:
    folder = shared_data / "listops"
    task = build_task("listops", {"data": str(folder / "d20s_train.tsv.gz")})
    assert sizes(task) == [8000, 1000, 1000]
    # Evaluate by rewriting innermost brackets until a digit is left.
    innermost = re.compile(r"\[(MIN|MAX|MED|SM)((?: \d)+) \]")

    def reduce(match: re.Match[str]) -> str:
        values = sorted(map(int, match[2].split()))
        n = len(values)
        middle = int((values[(n - 1) // 2] + values[n // 2]) / 2)
        return str(
            {"MIN": values[0], "MAX": values[-1], "MED": middle, "SM": sum(values) % 10}[match[1]]
        )

    rows = gzip.decompress((folder / "d20s_test.tsv.gz").read_bytes()).decode().splitlines()
    for row, example in zip(rows, task.dataset("test"), strict=True):
        label, expression = row.split("\t")
        text = " ".join(expression.replace("(", " ").replace(")", " ").split())
        assert len(text.split()) == len(example["input_ids"])
        while "[" in text:
            text = innermost.sub(reduce, text)
        assert text == label == str(example["labels"][0])


def test_listops_d8_with_first_and_last(shared_data: Path) -> None:
    task = build_task("listops", {"data": str(shared_data / "listops" / "d8_test.tsv.gz")})
    assert sizes(task) == [9000, 500, 500]


def test_ag_news_folder(shared_data: Path) -> None:
    task = build_task(
        "text_classification", {"data": str(shared_data / "ag_news"), "tokenizer": "byte"}
    )
    assert sizes(task) == [9000, 1000, 3800]
    assert task.model_kwargs()["num_labels"] == 4
    described = task.description()
    assert described["files"]["test"]["path"].endswith("test_even.tsv.gz")
    assert (
        described["files"]["train"]["columns"] == "no header, label in column 0, text in column 1"
    )


def test_sst_with_header_and_quotes(shared_data: Path) -> None:
    task = build_task(
        "text_classification", {"data": str(shared_data / "minbert" / "ids-sst-train.csv.gz")}
    )
    assert len(task.dataset("valid")) == 1101
    assert len(task.dataset("train")) + len(task.dataset("test")) == 8544
    columns = "header, label 'sentiment', text 'sentence'; not read: '', 'id'"
    assert task.description()["files"]["train"]["columns"] == columns


@pytest.mark.slow
def test_quora_pairs_with_a_tokenizer_that_has_a_form_for_them(
    shared_data: Path, tmp_path: Path
) -> None:
    bert_words(["What", "is", "the", "How", "I"]).save_pretrained(tmp_path)
    columns = {"text_column": "sentence1,sentence2", "label_column": "is_duplicate"}
    columns["tokenizer"] = f"hf:{tmp_path}"
    data = str(shared_data / "minbert" / "quora-train-15k.csv.gz")
    task = build_task("text_classification", {"data": data, "max_length": 64, **columns})
    assert sum(sizes(task)) == 15212
    assert task.model_kwargs()["id2label"] == {0: "0.0", 1: "1.0"}
    described = task.description()
    assert "text 'sentence1' + 'sentence2' as a pair" in described["files"]["train"]["columns"]
    example = task.dataset("train")[0]
    ids, end = example["input_ids"], task.tokenizer.sep_token_id
    first, second = (place for place, token in enumerate(ids) if token == end)
    assert example["token_type_ids"] == [0] * (first + 1) + [1] * (second - first)


@pytest.mark.slow
def test_imdb_folder_with_the_defaults_of_the_command_line(shared_data: Path) -> None:
    task = build_task("text_classification", {"data": str(shared_data / "imdb")})
    assert sizes(task) == [20000, 5000, 12500]
    described = task.description()
    assert described["files"]["test"]["path"].endswith("test_a.tsv.gz")
    assert described["labels"]["train"] == {"0": 10000, "1": 10000}
    assert described["texts_also_in_train"]["valid"] == 23
    assert described["truncated_texts"]["train"] > 0
    assert task.reference() == {"accuracy": 0.5}


def test_cifar_in_gray(shared_data: Path) -> None:
    task = build_task("image", {"data": str(shared_data / "cifar10_subset")})
    assert sizes(task) == [10000, 1000, 2000]
    assert set(task.lengths("train")) == {1024}
    assert task.model_kwargs()["num_labels"] == 10
    assert task.reference() == {"accuracy": 0.1}


def test_cifar_in_colour(shared_data: Path) -> None:
    task = build_task(
        "image", {"data": str(shared_data / "cifar10_subset"), "color": "rgb", "size": 16}
    )
    assert sizes(task) == [2850, 150, 1000]
    assert set(task.lengths("test")) == {768}


def test_ag_news_as_pairs(shared_data: Path) -> None:
    options = {"data": str(shared_data / "ag_news"), "num_train": 2000, "max_length": 256}
    task = build_task("retrieval", options)
    assert sizes(task) == [2000, 1000, 3800]
    described = task.description()
    assert described["files"]["test"]["path"].endswith("test_even.tsv.gz")
    assert described["labels"]["train"] == {"different": 1000, "related": 1000}
