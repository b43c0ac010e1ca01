"""Labelled texts: formats, headers, releases as they are, splits, truncation, one message with file:line
for each bad row; and the sentences that ship with Python."""

import ast
import csv
import datetime
import gzip
import io
import json
import random
import re
import sysconfig
from pathlib import Path

import pytest
from tests.support.bert import make_checkpoint

from wellposed.errors import ConfigError, DataError
from wellposed_lab.tasks.data.splits import SPLITS
from wellposed_lab.tasks.data.texts import labelled_docstrings
from wellposed_lab.tasks.task import build_task

ROWS = [
    (["neg", "pos"][i % 2], f'He said "word{i}", twice\\once' + " again" * (i % 4))
    for i in range(40)
]


def build(data, **options):
    values = {"data": str(data), "tokenizer": "byte", "max_length": 400, **options}
    return build_task("text_classification", values)


def texts(task, split="train"):
    decode = task.tokenizer.decode
    return [(task.labels[e["labels"][0]], str(decode(e["input_ids"]))) for e in task.dataset(split)]


def columns(task):
    return task.description()["files"]["train"]["columns"]


def as_tsv(rows, header=None):
    return "".join("\t".join(row) + "\n" for row in ([header] if header else []) + rows)


def as_csv(rows, header=None, delimiter=","):
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter).writerows(([header] if header else []) + rows)
    return out.getvalue()


def as_json(rows, *names):
    return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows)


def write_parquet(path, **columns):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


FORMATS = {
    "a.tsv": as_tsv(ROWS),
    "b.tsv": as_tsv([(text, label) for label, text in ROWS], ["Text", "Label"]),
    "c.tsv": as_tsv([(label, str(i), text) for i, (label, text) in enumerate(ROWS)]),
    "d.csv": as_csv(ROWS, ["label", "text"]),
    "e.csv": as_csv(
        [("9", text, label) for label, text in ROWS], ["id", "sentence", "sentiment"], "\t"
    ),
    "f.jsonl": as_json([(3, *row) for row in ROWS], "id", "label", "text"),
    "g.tsv": as_tsv(ROWS).replace("\n", "\r\n"),
    "h.csv": as_csv(ROWS),
    **{f"{mark}.csv": as_csv(ROWS, ["label", "text"], mark) for mark in ";|\t"},
    "i.tsv": as_tsv(ROWS).removesuffix("\n"),
}


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("name", [*FORMATS, "k.parquet"])
def test_every_format_gives_the_same_rows(tmp_path, name, zipped):
    path = tmp_path / (name + ".gz" * zipped)
    if name == "k.parquet":
        columns = zip(*ROWS, strict=True)
        path = write_parquet(tmp_path / name, **dict(zip(("label", "text"), columns, strict=True)))
    else:
        content = FORMATS[name].encode()
        path.write_bytes(gzip.compress(content) if zipped else content)
    task = build(path)
    assert sorted(row for split in SPLITS for row in texts(task, split)) == sorted(ROWS)
    assert len(task.description()["files"]["train"]["sha256"]) == 64


def write_splits(folder, **rows):
    for split in SPLITS:
        (folder / f"{split}.tsv").write_text(as_tsv(rows.get(split, ROWS)))


def test_truncation_is_counted_and_error_is_a_choice(tmp_path):
    train = [("a", "x" * 10), ("b", "y" * 4)] * 5
    write_splits(tmp_path, train=train, valid=[("a", "z" * 5)], test=[("b", "zz")])
    task = build(tmp_path, max_length=4)
    assert texts(task)[:2] == [("a", "xxxx"), ("b", "yyyy")]
    assert (
        build(tmp_path, tokenizer="word", max_words=1).description()["unknown_pieces"]["test"][
            "count"
        ]
        == 1
    )
    assert task.description()["truncated_texts"] == {"train": 5, "valid": 1, "test": 0}
    assert task.model_kwargs()["max_position_embeddings"] == 4
    first = build(tmp_path, limit_train=3)
    assert (len(first.dataset("train")), len(first.dataset("test"))) == (3, 1)
    assert first.description()["train_texts_left_out_by_limit_train"] == 7
    path = tmp_path / "train.tsv"
    with pytest.raises(DataError) as caught:
        build(tmp_path, max_length=4, overflow="error")
    assert f"{path}:1: 10 tokens" in str(caught.value)
    assert f"{path}:3: 10 tokens" in str(caught.value)
    assert "4 tokens; raise max_length" in str(caught.value)


def test_labels_are_those_of_train_in_order(tmp_path):
    train = [(str(label), "t") for label in (10, 2, -1)] * 4
    write_splits(tmp_path, train=train, valid=[("2", "t")] * 2 + [("10", "t")], test=[("10", "u")])
    task = build(tmp_path)
    assert task.model_kwargs()["id2label"] == {0: "-1", 1: "2", 2: "10"}
    assert task.model_kwargs()["label2id"] == {"-1": 0, "2": 1, "10": 2}
    assert task.reference() == {"accuracy": pytest.approx(2 / 3)}
    assert task.description()["texts_also_in_train"] == {"valid": 3, "test": 0}
    write_splits(tmp_path, valid=[*ROWS, ("neutral", "x"), ("Pos", "y")])
    path = tmp_path / "valid.tsv"
    with pytest.raises(DataError) as caught:
        build(tmp_path)
    assert "known: 'neg', 'pos'" in str(caught.value)
    assert f"{path}:41: label 'neutral'" in str(caught.value)
    assert f"{path}:42: label 'Pos'" in str(caught.value)


GOOD = {
    "x.tsv": ["pos\tgood", "neg\tbad"],
    "x.csv": ['pos,"good"', "neg,bad"],
    "x.jsonl": ['{"label": "pos", "text": "good"}', '{"label": "neg", "text": "bad"}'],
}
BAD_ROWS = [
    ("x.tsv", "only one column", "1 columns, expected 2 as in line 1"),
    ("x.tsv", "\ttext", "the label is empty"),
    ("x.tsv", "pos\t", "the text is empty"),
    ("x.csv", 'pos,"never closed', "not a row of quoted fields"),
    ("x.csv", 'pos,"closed" then more', "double the quotes inside"),
    ("x.jsonl", '{"label": "pos"}', "no key 'text'; it has 'label'"),
    ("x.jsonl", '{"label": "pos", "text": 3}', "'text' is int, expected a string"),
    ("x.jsonl", '{"label": null, "text": "a"}', "the row has no 'label'"),
    ("x.jsonl", '{"label": "pos", ', "not JSON"),
    ("x.jsonl", "[1]", "list, expected a JSON object"),
    ("x.jsonl", r'{"label": "pos", "text": "a \ud800"}', r"half a character, '\ud800'"),
    ("x.jsonl", f'{{"label": {"9" * 5000}, "text": "a"}}', "not JSON: Exceeds the limit"),
]


@pytest.mark.parametrize(("name", "row", "problem"), BAD_ROWS)
@pytest.mark.parametrize("tokenizer", ["byte", "character", "word"])
def test_bad_rows_are_named(tmp_path, name, row, problem, tokenizer):
    lines = GOOD[name] * 15
    lines.insert(7, row)
    path = tmp_path / name
    path.write_text("".join(line + "\n" for line in lines))
    with pytest.raises(DataError) as caught:
        build(path, tokenizer=tokenizer)
    assert f"{path}:8: " in str(caught.value)
    assert problem in str(caught.value)


def test_all_bad_rows_of_a_file_are_in_one_message_by_the_lines_of_the_file(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text('label,text\npos,"two\nlines"\nneg,fine\n' + "short\n" * 15)
    with pytest.raises(DataError) as caught:
        build(path)
    assert "15 rows that cannot be used; correct or remove" in str(caught.value)
    assert f"{path}:5: " in str(caught.value)
    assert "and 5 more" in str(caught.value)


def test_parquet_of_other_values_than_texts_is_named(tmp_path):
    import pyarrow

    path = tmp_path / "a.parquet"
    raw = pyarrow.array([*(f"text {i}".encode() for i in range(39)), b"caf\xe9"])
    broken = pyarrow.Array.from_buffers(pyarrow.string(), 40, raw.buffers())
    labels = pyarrow.array(["a", "b"] * 20)
    with pytest.raises(
        DataError, match=re.escape("a.parquet:40: 'text' holds bytes that are not UTF-8")
    ):
        build(write_parquet(path, text=broken, label=labels))
    days = pyarrow.array([datetime.date(2026, 1, 1)] * 40)
    with pytest.raises(
        DataError, match=re.escape("a.parquet:1: 'label' is date, expected a string")
    ):
        build(write_parquet(path, text=labels, label=days))
    path.write_text("no parquet")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        build(path)


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
}


@pytest.mark.parametrize("header", COMMON_LAYOUTS)
def test_common_layouts_run_without_options(tmp_path, header, caplog):
    names = header.split(",")
    path = tmp_path / "mine.csv"
    label, text = COMMON_LAYOUTS[header]
    rows = [{name: f"{name} {i}, really" for name in names} for i in range(60)]
    rows = [{**row, label: f"c{i % 3}"} for i, row in enumerate(rows)]
    path.write_text(as_csv([list(row.values()) for row in rows], names))
    caplog.set_level("INFO", "wellposed_lab.tasks")
    named = build(path, label_column=label, text_column=text)
    assert named.labels == ("c0", "c1", "c2")
    assert f"{path}: header, label {label!r}, text {text.split(',')[0]!r}" in caplog.text
    assert texts(build(path)) == texts(named)


def test_a_column_of_ids_leads_to_the_column_of_labels(tmp_path):
    rows = [(f"id{i}", text, label) for i, (label, text) in enumerate(ROWS)]
    (tmp_path / "a.csv").write_text(as_csv(rows))
    with pytest.raises(DataError) as caught:
        build(tmp_path / "a.csv")
    assert "36 different labels in 36 rows" in str(caught.value)
    assert "name the columns in a first line" in str(caught.value)


def test_columns_that_are_asked_for(tmp_path):
    path = tmp_path / "x.csv"
    rows = [(str(i), label, f"h{i}", f"b{i}") for i, (label, _) in enumerate(ROWS)]
    path.write_text(as_csv(rows, ["id", "stars", "head", "body"]))
    task = build(path, label_column="stars", text_column="head,body")
    assert set(texts(task)) < {(label, f"{head} {body}") for _, label, head, body in rows}
    assert columns(task).endswith("text 'head' + 'body' joined by a space; not read: 'id'")
    with pytest.raises(DataError) as caught:
        build(path, label_column="stars", text_column="head,boby")
    assert f"{path}:1: no text column 'boby' (nearest: body" in str(caught.value)
    assert "give text_column=NAME" in str(caught.value)
    with pytest.raises(DataError, match="label and text are both 'head'"):
        build(path, label_column="head", text_column="head,body")
    with pytest.raises(ConfigError, match="columns body without a header"):
        build(path, text_column="body", header="no")


@pytest.mark.parametrize("windows", [0, 2])
def test_two_columns_are_no_pair_and_are_said_not_to_be(tmp_path, windows):
    """Only windows, which are of words, join them for a tokenizer of transformers."""
    path = tmp_path / "x.csv"
    rows = [(label, f"h{i}", f"b{i}") for i, (label, _) in enumerate(ROWS)]
    path.write_text(as_csv(rows, ["label", "head", "body"]))
    make_checkpoint(tmp_path / "bert")
    args = {"tokenizer": f"hf:{tmp_path / 'bert'}", "certified_windows": windows, "max_length": 16}
    if not windows:
        with pytest.raises(ConfigError, match="pairs of texts are no longer supported"):
            build(path, text_column="head,body", **args)
        return
    assert columns(build(path, text_column="head,body", **args)).endswith("joined by a space")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", "pos\ta\n", "expected a name in .tsv, .csv, .jsonl"),
        ("x.tsv", "no delimiter\n", "x.tsv:1: one column, expected label and text"),
        ("x.tsv", as_tsv(ROWS[:10]), "10 rows are too few to cut valid and test from"),
        ("x.tsv", "pos\ta\n" * 30, "every row has label 'pos', expected two or more"),
        ("x.tsv", "", "the file is empty"),
        ("x.csv", "label,text", "a header and no rows"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError) as caught:
        build(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)
    assert message in str(caught.value)


def test_a_pretrained_tokenizer_classifies_with_its_own_ids(tmp_path):
    from wellposed_lab.tasks.text.tokenizers import CharacterEncoder

    folder = tmp_path / "tokenizer"
    generator = random.Random(0)
    CharacterEncoder("abc ").tokenizer(max_length=9).save_pretrained(folder)
    rows = [(str(i % 2), "".join(generator.choices("abc ", k=5)) + "a") for i in range(40)]
    (tmp_path / "x.tsv").write_text(as_tsv(rows))
    characters = build(tmp_path / "x.tsv", tokenizer="character")
    named = build(tmp_path / "x.tsv", tokenizer=f"hf:{folder}")
    assert list(characters.dataset("train")) == list(named.dataset("train"))
    assert characters.model_kwargs() == named.model_kwargs()


# The releases of Zhang et al. (2015). Class, title and description between quotes, doubled inside;
# a lone backslash replaces a line end.
AG_NEWS = r'''"3","Wall St. Bears Claw Back (Reuters)","Reuters - Wall Street's dwindling\band, are seeing green."
"4","""Microsoft"" patch, due","AP - The company's ""fix"", a 5\"" one, isn't out\\yet."
"1","Rebels #39;agree to talks#39;","LAGOS (Reuters) - A group &lt;b&gt;said&lt;/b&gt; so."
"2","Phelps wins","ATHENS -- Eight,\medals."
'''
CLASSES = ["World", "Sports", "Business", "Sci/Tech"]
FIELDS = list(csv.reader(io.StringIO(AG_NEWS)))
EXPECTED = [(label, f"{title} {text}") for label, title, text in FIELDS]


def release(folder, content=AG_NEWS):
    for split in SPLITS:
        (folder / f"{split}.csv").write_text(content)
    return folder


def test_ag_news_is_read_as_it_is_released(tmp_path):
    task = build(release(tmp_path))
    assert EXPECTED[1][1].startswith('"Microsoft" patch, due AP - The company\'s "fix", a 5\\" one')
    assert [texts(task, split) for split in SPLITS] == [EXPECTED] * 3
    assert list(task.labels) == ["1", "2", "3", "4"]
    message = "no header, label in column 0, text in columns 1, 2 joined by a space"
    assert columns(task) == message


def test_the_same_columns_otherwise(tmp_path, monkeypatch):
    import datasets

    swapped = [(title, label, words) for label, title, words in FIELDS]
    for header, rows in (
        ("Class Index,Title,Description", FIELDS),
        ("label,title,content", FIELDS),
        ("title,label,description", swapped),
    ):
        assert texts(build(release(tmp_path, as_csv(rows, header.split(","))))) == EXPECTED
    for split in SPLITS:
        (tmp_path / f"{split}.csv").unlink()
    numbered = [(int(label), title, text) for label, title, text in FIELDS]
    for split in SPLITS:
        (tmp_path / f"{split}.jsonl").write_text(as_json(numbered, "label", "title", "content"))
    assert texts(build(tmp_path), "valid") == EXPECTED
    text = datasets.Value("string")
    classes = datasets.ClassLabel(names=CLASSES)
    features = datasets.Features({"label": classes, "title": text, "content": text})
    values = [{"label": n - 1, "title": title, "content": words} for n, title, words in numbered]
    hub = datasets.Dataset.from_list(values, features=features)
    hub_splits = {"train": hub, "validation": hub, "test": hub}
    monkeypatch.setattr(datasets, "load_dataset", lambda *args: hub_splits)
    named = [(CLASSES[int(label) - 1], text) for label, text in EXPECTED]
    assert texts(build("hf:dbpedia_14"), "test") == named
    assert build("hf:dbpedia_14").description()["splits"] == "published"
    hub_splits["test"] = datasets.Dataset.from_list([{**values[0], "label": -1}], features=features)
    with pytest.raises(DataError, match=re.escape("hf:name (test):1: the row has no 'label'")):
        build("hf:name")


@pytest.mark.slow
def test_every_sentence_stands_in_the_file_that_it_names_and_only_once():
    table, described = labelled_docstrings()
    assert described["rows"] == len(table) == len(set(table.texts)) > 1000
    assert min(table.labels.count(topic) for topic in ("code", "network")) > 500
    library = Path(sysconfig.get_paths()["stdlib"])
    for text, source_file in list(zip(table.texts, table.places, strict=True))[:20]:
        source = ast.unparse(ast.parse((library / str(source_file)).read_bytes())).lower()
        assert all(word in source for word in text.split()), source_file


def test_the_task_cuts_splits_and_takes_no_files_beside():
    task = build_task("text_classification", {"data": "builtin"})
    train, valid, test = (len(task.dataset(split)) for split in ("train", "valid", "test"))
    assert valid == test == round(0.15 * (train + valid + test))


def test_a_library_without_source_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError, match="no source here; give data=FILE"):
        labelled_docstrings.__wrapped__()
