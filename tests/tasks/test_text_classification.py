"""Text classification: formats, headers, splits, truncation, and one message with file:line for
each bad row."""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest

from wellposed.errors import ConfigError, DataError
from wellposed.tasks import SPLITS, Task, TextClassificationTask, build_task

ROWS = [
    (["neg", "pos"][i % 2], f'He said "word{i}", twice\\once' + " again" * (i % 4))
    for i in range(40)
]


def build(data: Path | str, **options: Any) -> TextClassificationTask:
    task = build_task("text_classification", {"data": str(data), "tokenizer": "byte", **options})
    assert isinstance(task, TextClassificationTask)
    return task


def texts(task: Task, split: Any = "train") -> list[tuple[str, str]]:
    labels = task.model_kwargs()["id2label"]
    return [
        (labels[e["labels"][0]], task.tokenizer.decode(e["input_ids"])) for e in task.dataset(split)
    ]


def as_tsv(rows: list[Any], header: list[str] | None = None) -> str:
    return "".join("\t".join(row) + "\n" for row in ([header] if header else []) + rows)


def as_csv(rows: list[Any], header: list[str] | None = None, delimiter: str = ",") -> str:
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter).writerows(([header] if header else []) + rows)
    return out.getvalue()


FORMATS = {
    "a.tsv": as_tsv(ROWS),
    "b.tsv": as_tsv([(text, label) for label, text in ROWS], ["Text", "Label"]),
    "c.tsv": as_tsv([(label, str(i), text) for i, (label, text) in enumerate(ROWS)]),
    "d.csv": as_csv(ROWS, ["label", "text"]),
    "e.csv": as_csv(
        [("9", text, label) for label, text in ROWS], ["id", "sentence", "sentiment"], "\t"
    ),
    "f.jsonl": "".join(
        json.dumps({"text": text, "id": 3, "label": label}) + "\n" for label, text in ROWS
    ),
    "g.tsv": as_tsv(ROWS).replace("\n", "\r\n"),
    "h.csv": as_csv(ROWS),
    "i.tsv": as_tsv(ROWS).removesuffix("\n"),
}


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str, zipped: bool) -> None:
    path = tmp_path / (name + ".gz" * zipped)
    content = FORMATS[name].encode()
    path.write_bytes(gzip.compress(content) if zipped else content)
    task = build(path)
    every = [row for split in SPLITS for row in texts(task, split)]
    assert sorted(every) == sorted(ROWS)


def test_quoting_can_be_overridden(tmp_path: Path) -> None:
    quoted = [(label, text.replace("\\", "\n")) for label, text in ROWS]
    (tmp_path / "a.tsv").write_text(as_csv(quoted, delimiter="\t"))
    assert set(texts(build(tmp_path / "a.tsv", quoting="csv"))) < set(quoted)
    (tmp_path / "b.csv").write_text("".join(f'{label},5" tall\n' for label, _ in ROWS))
    assert texts(build(tmp_path / "b.csv", quoting="none"))[0][1] == '5" tall'


def test_a_missing_split_is_cut_from_train_by_a_fixed_shuffle(tmp_path: Path) -> None:
    # All of one label first: a contiguous cut would give test one label only.
    rows = [("a" if i < 200 else "b", f"text {i}") for i in range(400)]
    (tmp_path / "all.tsv").write_text(as_tsv(rows))
    task = build(tmp_path / "all.tsv")
    parts = [texts(task, split) for split in SPLITS]
    assert [len(part) for part in parts] == [360, 20, 20]
    assert sorted(row for part in parts for row in part) == sorted(rows)
    assert {label for label, _ in parts[2]} == {"a", "b"}
    assert task.description()["cut_from_train"] == dict.fromkeys(
        ("valid", "test"), "20 of 400 rows, by a fixed shuffle"
    )
    again = build(tmp_path / "all.tsv")
    assert [texts(again, split) for split in SPLITS] == parts


def write_splits(folder: Path, **rows: list[Any]) -> None:
    for split in SPLITS:
        (folder / f"{split}.tsv").write_text(as_tsv(rows.get(split, ROWS)))


def test_truncation_is_counted_and_error_is_a_choice(tmp_path: Path) -> None:
    write_splits(
        tmp_path,
        train=[("a", "x" * 10), ("b", "y" * 4)] * 5,
        valid=[("a", "z" * 5)],
        test=[("b", "zz")],
    )
    task = build(tmp_path, max_length=4)
    assert texts(task)[:2] == [("a", "xxxx"), ("b", "yyyy")]
    described = task.description()
    assert described["truncated_texts"] == {"train": 5, "valid": 1, "test": 0}
    assert described["overflow"] == "truncate"
    assert task.model_kwargs()["max_position_embeddings"] == 4
    with pytest.raises(DataError) as caught:
        build(tmp_path, max_length=4, overflow="error")
    message = str(caught.value)
    assert f"{tmp_path / 'train.tsv'}:1: 10 tokens" in message
    assert f"{tmp_path / 'train.tsv'}:3: 10 tokens" in message
    assert (
        "more than max_length = 4 tokens; raise max_length, or give overflow='truncate'" in message
    )


def test_labels_are_those_of_train_in_order(tmp_path: Path) -> None:
    write_splits(
        tmp_path,
        train=[(str(label), "t") for label in (10, 2, -1)] * 4,
        valid=[("2", "t")],
        test=[("10", "t")],
    )
    kwargs = build(tmp_path).model_kwargs()
    assert kwargs["id2label"] == {0: "-1", 1: "2", 2: "10"}
    assert kwargs["label2id"] == {"-1": 0, "2": 1, "10": 2}
    assert kwargs["num_labels"] == 3


def test_reference_accuracy_and_repeated_texts(tmp_path: Path) -> None:
    write_splits(
        tmp_path, valid=[("neg", "a"), ("neg", "b"), ("pos", ROWS[0][1])], test=[("pos", "c")]
    )
    task = build(tmp_path)
    assert task.reference() == {"accuracy": pytest.approx(2 / 3)}
    assert task.description()["texts_also_in_train"] == {"valid": 1, "test": 0}
    assert task.summarize({"accuracy": (3.0, 4.0)}) == {"accuracy": 0.75}


def test_word_vocabulary_comes_from_train_and_unknown_words_are_counted(tmp_path: Path) -> None:
    write_splits(
        tmp_path,
        train=[("a", "x y z"), ("b", "x y")] * 5,
        valid=[("a", "x new")],
        test=[("a", "new new")],
    )
    described = build(tmp_path, tokenizer="word", max_words=2).description()
    assert described["tokenizer"] == {"kind": "word", "vocabulary": 4}
    assert {split: described["unknown_pieces"][split]["count"] for split in SPLITS} == {
        "train": 5,
        "valid": 1,
        "test": 2,
    }


BAD_ROWS = [
    ("x.tsv", "only one column", "1 columns, expected 2 columns as in line 1"),
    ("x.tsv", "pos\ta\tb", "3 columns, expected 2 columns as in line 1"),
    ("x.tsv", "", "an empty line, expected 2 columns"),
    ("x.tsv", "\ttext", "the label is empty"),
    ("x.tsv", "pos\t", "the text is empty"),
    ("x.csv", "pos", "1 columns, expected 2 columns"),
    ("x.csv", 'pos,"never closed', "not a row of quoted fields"),
    ("x.csv", 'pos,"closed" then more', "give quoting='none'"),
    ("x.jsonl", '{"label": "pos"}', "no key 'text'; it has 'label'"),
    ("x.jsonl", '{"text": "a"}', "no key 'label'; it has 'text'"),
    ("x.jsonl", '{"label": "pos", "text": 3}', "'text' is int, expected a string"),
    (
        "x.jsonl",
        '{"label": null, "text": "a"}',
        "the row has no label",
    ),
    ("x.jsonl", '{"label": "pos", ', "not JSON"),
    ("x.jsonl", "[1]", "list, expected a JSON object"),
    ("x.jsonl", "", "an empty line, expected a JSON object"),
]


@pytest.mark.parametrize(("name", "row", "problem"), BAD_ROWS)
def test_bad_rows_are_named(tmp_path: Path, name: str, row: str, problem: str) -> None:
    good = {
        "x.tsv": ["pos\tgood", "neg\tbad"],
        "x.csv": ['pos,"good"', "neg,bad"],
        "x.jsonl": ['{"label": "pos", "text": "good"}', '{"label": "neg", "text": "bad"}'],
    }[name]
    lines = good * 15
    lines.insert(7, row)
    path = tmp_path / name
    path.write_text("".join(line + "\n" for line in lines))
    with pytest.raises(DataError) as caught:
        build(path)
    assert f"{path}:8: " in str(caught.value)
    assert problem in str(caught.value)


def test_all_bad_rows_of_a_file_are_in_one_message(tmp_path: Path) -> None:
    path = tmp_path / "x.tsv"
    path.write_text(as_tsv(ROWS) + "short\n" * 15)
    with pytest.raises(
        DataError, match="15 rows that cannot be used; correct or remove them"
    ) as caught:
        build(path)
    assert f"{path}:41: " in str(caught.value)
    assert "... and 5 more" in str(caught.value)


def test_unknown_label_in_valid_names_the_line_and_the_known_labels(tmp_path: Path) -> None:
    write_splits(tmp_path, valid=[*ROWS, ("neutral", "x"), ("Pos", "y")])
    with pytest.raises(DataError) as caught:
        build(tmp_path)
    message = str(caught.value)
    assert "valid has labels that train does not have; known: 'neg', 'pos'" in message
    assert f"{tmp_path / 'valid.tsv'}:41: label 'neutral'" in message
    assert f"{tmp_path / 'valid.tsv'}:42: label 'Pos'" in message


def test_a_column_that_is_not_there_lists_the_header(tmp_path: Path) -> None:
    path = tmp_path / "x.tsv"
    path.write_text(as_tsv(ROWS, ["label", "text"]))
    with pytest.raises(DataError) as caught:
        build(path, label_column="lable")
    message = str(caught.value)
    assert "['label', 'text'] lacks a column" in message
    assert (
        f"{path}:1: no label column 'lable' (nearest: label, text); give label_column=NAME"
        in message
    )
    with pytest.raises(DataError, match="no text column 'body'"):
        build(path, text_column="body")
    with pytest.raises(ConfigError, match="columns body are names, and header is 'no'"):
        build(path, text_column="body", header="no")
    with pytest.raises(DataError, match="label_column = 7, expected a number below 2"):
        build(path, label_column="7", header="no")
    with pytest.raises(DataError, match="label and text are both column 1"):
        build(path, label_column="1", header="no")


def test_a_header_of_unknown_names_is_not_taken_for_a_row(tmp_path: Path) -> None:
    path = tmp_path / "x.tsv"
    path.write_text(as_tsv(ROWS, ["polarity", "tweet"]))
    with pytest.raises(
        DataError,
        match=r"looks like a header.*; give label_column=polarity text_column=tweet, or.*='no'",
    ):
        build(path)
    with pytest.raises(DataError, match="no label column named label or labels or target"):
        build(path, header="yes")
    assert len(build(path, label_column="polarity", text_column="tweet").dataset("train")) == 36


COMMON_LAYOUTS = {
    "id,headline,topic": ("topic", "headline"),
    "topic,headline": ("topic", "headline"),
    "text,label": ("label", "text"),
    "sentence,label": ("label", "sentence"),
    "review,sentiment": ("sentiment", "review"),
    "Class Index,Title,Description": ("Class Index", "Title,Description"),
    "id,keyword,text,target": ("target", "text"),
    "category,content": ("category", "content"),
    "body,category": ("category", "body"),
    "title,body,labels": ("labels", "title,body"),
    "class,title,text": ("class", "text"),
    "tweet,polarity": None,
}


@pytest.mark.parametrize("header", COMMON_LAYOUTS)
def test_common_layouts_run_without_options_or_say_the_ones_to_give(
    tmp_path: Path, header: str, caplog: pytest.LogCaptureFixture
) -> None:
    names, path = header.split(","), tmp_path / "mine.csv"
    labels = {"topic", "label", "labels", "sentiment", "Class Index", "target", "category", "class"}
    labels |= {"polarity"}
    rows = [
        [f"c{i % 3}" if name in labels else f"{name} {i}, really" for name in names]
        for i in range(60)
    ]
    path.write_text(as_csv(rows, names))
    caplog.set_level("INFO", "wellposed.tasks")
    expected = COMMON_LAYOUTS[header]
    if expected is None:
        with pytest.raises(DataError, match="give label_column=polarity text_column=tweet") as told:
            build(path)
        assert "\n" not in str(told.value)
        expected = ("polarity", "tweet")
    label, text = expected
    named = build(path, label_column=label, text_column=text)
    if header != "tweet,polarity":
        assert texts(build(path)) == texts(named)
    assert named.model_kwargs()["num_labels"] == 3
    assert f"{path}: header, label {label!r}, text {text.split(',')[0]!r}" in caplog.text


def test_a_column_of_ids_leads_to_the_column_of_labels(tmp_path: Path) -> None:
    rows = [(f"id{i}", text, label) for i, (label, text) in enumerate(ROWS)]
    (tmp_path / "a.csv").write_text(as_csv(rows))
    with pytest.raises(
        DataError, match=r"not the label column; give label_column=2 \(2 different values\)"
    ):
        build(tmp_path / "a.csv")
    assert build(tmp_path / "a.csv", label_column="2", text_column="1").labels == ("neg", "pos")


@pytest.mark.parametrize("tokenizer", ["byte", "character", "word"])
@pytest.mark.parametrize("name", ["text", "label"])
def test_half_characters_are_named(tmp_path: Path, tokenizer: str, name: str) -> None:
    rows = [{"text": f"text {i}", "label": "ab"[i % 2]} for i in range(40)]
    rows[6][name] = "a \ud800 b"
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match=rf"a\.jsonl:7: '{name}' holds half a character, '\\ud800'"):
        build(tmp_path / "a.jsonl", tokenizer=tokenizer)


def test_parquet_of_other_values_than_texts_is_named(tmp_path: Path) -> None:
    import datetime

    import pyarrow
    import pyarrow.parquet

    raw = pyarrow.array([*(f"text {i}".encode() for i in range(39)), b"caf\xe9"])
    texts = pyarrow.Array.from_buffers(pyarrow.string(), 40, raw.buffers())
    labels = pyarrow.array(["a", "b"] * 20)
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": texts, "label": labels}), path)
    with pytest.raises(DataError, match=r"a\.parquet:40: 'text' holds bytes that are not UTF-8"):
        build(path)
    days = pyarrow.array([datetime.date(2026, 1, 1)] * 40)
    pyarrow.parquet.write_table(pyarrow.table({"text": labels, "label": days}), path)
    with pytest.raises(DataError, match=r"a\.parquet:1: 'label' is date, expected a string"):
        build(path)


def test_labels_of_thousands_of_digits_are_names(tmp_path: Path) -> None:
    long = "9" * 5000
    (tmp_path / "a.tsv").write_text(
        as_tsv([(str(i % 2) if i % 3 else long, "x") for i in range(40)])
    )
    assert set(build(tmp_path / "a.tsv").labels) == {"0", "1", long}
    with pytest.raises(DataError, match=r"no label column '8888"):
        build(tmp_path / "a.tsv", label_column="8" * 5000)
    (tmp_path / "a.jsonl").write_text(f'{{"text": "a", "label": {long}}}\n' * 40)
    with pytest.raises(DataError, match=r"a\.jsonl:1: not JSON: Exceeds the limit"):
        build(tmp_path / "a.jsonl")
    (tmp_path / "train.txt").write_text(f"{long} your persona: x\n")
    with pytest.raises(DataError, match=r"train\.txt:1: "):
        build_task("dialogue", {"data": str(tmp_path / "train.txt"), "format": "personachat"})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", "pos\ta\n", r"expected a name that ends in \.tsv, \.csv, \.jsonl"),
        ("x.tsv", "no delimiter\n", r"x\.tsv:1: one column, expected a label and a text"),
        (
            "x.tsv",
            as_tsv(ROWS[:10]),
            "10 rows are too few to cut valid and test from, expected at least 20",
        ),
        ("x.tsv", "pos\ta\n" * 30, "every row has the label 'pos', expected two labels or more"),
        ("x.tsv", "", "the file is empty"),
        ("x.csv", "label,text\n", "a header and no rows"),
        ("x.csv", "label,text", "a header and no rows"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message) as caught:
        build(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_options_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no built-in data"):
        build("builtin")
    with pytest.raises(
        ConfigError,
        match=r"(?s)max_length = 0, expected an integer >= 1.*max_words = -1, expected",
    ):
        build(tmp_path, max_length=0, max_words=-1)
    with pytest.raises(
        ConfigError, match="option valid needs data=FILE; hf: data sets bring their own splits"
    ):
        build("hf:name", valid="x.tsv")


def test_hub_data_with_class_names(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])}
    )
    rows = {"text": [f"text {i}" for i in range(40)], "label": [i % 2 for i in range(40)]}
    train = datasets.Dataset.from_dict(rows, features=features)
    monkeypatch.setattr(datasets, "load_dataset", lambda *args: {"train": train, "test": train})
    task = build("hf:name:config")
    assert task.model_kwargs()["label2id"] == {"neg": 0, "pos": 1}
    assert texts(task, "test")[1] == ("pos", "text 1")
    assert task.description()["splits"] == "published"
    unlabelled = datasets.Dataset.from_dict({**rows, "label": [-1] * 40}, features=features)
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *args: {"train": train, "test": unlabelled}
    )
    with pytest.raises(DataError, match=r"hf:name \(test\):1: the row has no label"):
        build("hf:name")


def test_a_pretrained_tokenizer_classifies_with_its_own_ids(tmp_path: Path) -> None:
    from wellposed.tasks.text.tokenizers import CharacterEncoder

    folder = tmp_path / "tokenizer"
    CharacterEncoder("abc ").tokenizer(max_length=9).save_pretrained(folder)
    generator = random.Random(0)
    rows = [
        (str(i % 2), "".join(generator.choice("abc ") for _ in range(5)) + "a") for i in range(40)
    ]
    (tmp_path / "x.tsv").write_text(as_tsv(rows))
    own, named = (
        build(tmp_path / "x.tsv", tokenizer="character"),
        build(tmp_path / "x.tsv", tokenizer=f"hf:{folder}"),
    )
    assert list(own.dataset("train")) == list(named.dataset("train"))
    assert own.model_kwargs() == named.model_kwargs()


def test_lists_of_json_and_parquet_give_the_same_rows(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = [{"text": text, "label": label} for label, text in ROWS]
    (tmp_path / "a.json").write_text(json.dumps(rows, indent=1))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    for name in ("a.json", "a.parquet"):
        task = build(tmp_path / name)
        assert sorted(row for split in SPLITS for row in texts(task, split)) == sorted(ROWS)
        assert "sha256" in task.description()["files"]["train"]


def test_a_bad_list_of_json_and_a_bad_parquet_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(
        json.dumps([{"text": "x", "label": "a"}, {"text": 3, "label": "b"}])
    )
    with pytest.raises(DataError, match=r"a\.json:2: 'text' is int, expected a string"):
        build(tmp_path / "a.json")
    (tmp_path / "b.json").write_text("{}")
    with pytest.raises(DataError, match="dict, expected a list of objects"):
        build(tmp_path / "b.json")
    (tmp_path / "c.parquet").write_text("no parquet")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        build(tmp_path / "c.parquet")
