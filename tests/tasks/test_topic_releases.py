"""The releases of Zhang et al. (2015) as they are: AG News, DBpedia, Yelp, Yahoo; the same rows as
headers and JSON."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from wellposed.errors import ConfigError, DataError
from wellposed.tasks import SPLITS, Task, build_task

# Class, title and description between quotes, doubled inside; a lone backslash stands where a line
# ended.
AG_NEWS = r'''"3","Wall St. Bears Claw Back (Reuters)","Reuters - Wall Street's dwindling\band, are seeing green."
"4","""Microsoft"" patch, due","AP - The company's ""fix"", a 5\"" one, isn't out\\yet."
"1","Rebels #39;agree to talks#39;","LAGOS (Reuters) - A group &lt;b&gt;said&lt;/b&gt; so."
"2","Phelps wins","ATHENS -- Eight,\medals."
'''
EXPECTED = [
    (
        "Business",
        (
            r"Wall St. Bears Claw Back (Reuters) Reuters - Wall Street's dwindling\band, are seeing"
            r" green."
        ),
    ),
    (
        "Sci/Tech",
        r""""Microsoft" patch, due AP - The company's "fix", a 5\" one, isn't out\\yet.""",
    ),
    (
        "World",
        "Rebels #39;agree to talks#39; LAGOS (Reuters) - A group &lt;b&gt;said&lt;/b&gt; so.",
    ),
    ("Sports", r"Phelps wins ATHENS -- Eight,\medals."),
]
CLASSES = "World\nSports\nBusiness\nSci/Tech\n"


def build(data: Path | str, **options: Any) -> Task:
    return build_task(
        "text_classification",
        {"data": str(data), "tokenizer": "byte", "max_length": 400, **options},
    )


def rows(task: Task, split: Any) -> list[tuple[str, str]]:
    names = task.model_kwargs()["id2label"]
    return [
        (names[row["labels"][0]], str(task.tokenizer.decode(row["input_ids"])))
        for row in task.dataset(split)
    ]


def release(folder: Path, content: str = AG_NEWS, classes: str | None = CLASSES) -> Path:
    for name in ("train.csv", "valid.csv", "test.csv"):
        (folder / name).write_text(content)
    if classes is not None:
        (folder / "classes.txt").write_text(classes)
    return folder


def test_ag_news_is_read_as_it_is_released(tmp_path: Path) -> None:
    task = build(release(tmp_path))
    for split in SPLITS:
        assert rows(task, split) == EXPECTED
    assert task.model_kwargs()["id2label"] == {
        0: "World",
        1: "Sports",
        2: "Business",
        3: "Sci/Tech",
    }
    described = json.loads(json.dumps(task.description()))
    assert (
        described["files"]["train"]["columns"]
        == "no header, label in column 0, text in columns 1, 2 joined by a space"
    )
    assert described["class_names"]["path"] == str(tmp_path / "classes.txt")


@pytest.mark.parametrize(
    "header", ["Class Index,Title,Description", "label,title,content", "title,label,description"]
)
def test_the_same_columns_with_a_header(tmp_path: Path, header: str) -> None:
    names = header.lower().split(",")
    out = io.StringIO()
    csv.writer(out).writerow(header.split(","))
    for label, title, text in csv.reader(io.StringIO(AG_NEWS)):
        values = {
            "class index": label,
            "label": label,
            "title": title,
            "description": text,
            "content": text,
        }
        csv.writer(out).writerow([values[name] for name in names])
    task = build(release(tmp_path, out.getvalue()))
    assert rows(task, "train") == EXPECTED
    assert "joined by a space" in task.description()["files"]["train"]["columns"]


def test_the_same_columns_as_json_and_as_a_hub_data_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    fields = list(csv.reader(io.StringIO(AG_NEWS)))
    lines = [
        json.dumps({"label": int(label), "title": title, "content": text})
        for label, title, text in fields
    ]
    for split in SPLITS:
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "classes.txt").write_text(CLASSES)
    assert rows(build(tmp_path), "valid") == EXPECTED
    text = datasets.Value("string")
    names = list(map(str, CLASSES.split()))
    features = datasets.Features(
        {"label": datasets.ClassLabel(names=names), "title": text, "content": text}
    )
    labels, titles, texts = zip(*fields, strict=True)
    columns = {"label": [int(label) - 1 for label in labels], "title": titles, "content": texts}
    hub = datasets.Dataset.from_dict(columns, features=features)
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *args: dict.fromkeys(("train", "validation", "test"), hub)
    )
    assert rows(build("hf:dbpedia_14"), "test") == EXPECTED


def test_yelp_has_one_text_and_yahoo_three_of_which_some_are_empty(tmp_path: Path) -> None:
    yelp = '"1","Don\'t.\\n\\n""Never"" again."\n"2","Good."\n'
    expected = [("1", 'Don\'t.\\n\\n"Never" again.'), ("2", "Good.")]
    assert rows(build(release(tmp_path, yelp, None)), "train") == expected
    yahoo = '"1","why?","","because"\n"2","","how?",""\n'
    assert rows(build(release(tmp_path, yahoo, None)), "train") == [
        ("1", "why? because"),
        ("2", "how?"),
    ]
    release(tmp_path, '"1","a","b"\n"2",""," "\n', None)
    with pytest.raises(DataError, match=r"train\.csv:2: the text is empty"):
        build(tmp_path)


def test_columns_that_are_asked_for(tmp_path: Path) -> None:
    release(tmp_path)
    assert rows(build(tmp_path, text_column="1"), "test")[3] == ("Sports", "Phelps wins")
    assert rows(build(tmp_path, text_column="2, 1"), "test")[3] == (
        "Sports",
        "ATHENS -- Eight,\\medals. Phelps wins",
    )
    assert (
        build(tmp_path, text_column="1")
        .description()["files"]["test"]["columns"]
        .endswith("not read: column 2")
    )
    with pytest.raises(DataError, match="text_column = 3, expected a number below 3"):
        build(tmp_path, text_column="1,3")
    with pytest.raises(DataError, match="label and text are both column 0"):
        build(tmp_path, text_column="0,1")
    release(
        tmp_path,
        "id,stars,head,body\n" + "\n".join(f"{i},{i % 2},h{i},b{i}" for i in range(4)) + "\n",
        None,
    )
    task = build(tmp_path, label_column="stars", text_column="head,body")
    assert rows(task, "train")[3] == ("1", "h3 b3")
    assert task.description()["files"]["train"]["columns"].endswith("not read: 'id'")
    with pytest.raises(DataError, match=r"train\.csv:1: no text column 'boby' \(nearest: body"):
        build(tmp_path, label_column="stars", text_column="head,boby")


def test_names_of_classes_that_do_not_fit_are_said_not_to_be_used(tmp_path: Path) -> None:
    zero = AG_NEWS.replace('"4"', '"0"', 1)
    described = build(release(tmp_path, zero)).description()
    assert (
        "classes.txt not used: labels are 0, 1, 2, 3, expected some of 1 to 4"
        in described["class_names"]
    )
    given = build(tmp_path, class_names="Sci/Tech, World,Sports,Business")
    assert rows(given, "train") == EXPECTED
    with pytest.raises(
        ConfigError, match=r"2 names, expected 4 distinct ones.*in this order: 0, 1, 2, 3"
    ):
        build(tmp_path, class_names="a,b")


def test_a_tab_file_without_a_header_keeps_its_last_column(tmp_path: Path) -> None:
    for split in SPLITS:
        (tmp_path / f"{split}.tsv").write_text("1\t0_9\tgood\n0\t1_2\tbad\n")
    task = build(tmp_path)
    assert rows(task, "train") == [("1", "good"), ("0", "bad")]
    columns = "no header, label in column 0, text in column 2; not read: column 1"
    assert task.description()["files"]["train"]["columns"] == columns
