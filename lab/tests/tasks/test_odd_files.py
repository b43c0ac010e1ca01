"""Files as other people write them: which columns are read, which rows are not, and the messages."""

import json
import re

import pytest

from wellposed.errors import DataError
from wellposed_lab.tasks.data.remarks import data_remarks
from wellposed_lab.tasks.task import build_task

TEXTS = [f"a text about number {i}, written down" for i in range(40)]
LABELS = ["ham", "spam"] * 20
CHINESE = [f"这部电影的第{i}场戏拍得非常好看" for i in range(40)]


def table(names, texts=TEXTS, labels=LABELS, *, mark=",", first=""):
    """Return a csv of named columns, ``name:kind`` unless the name is the kind (label, id, text).
    Without names, a row is a label and a text, and there is no header."""
    pairs = [name.partition(":") for name in names or ("label", "text")]
    rows = [[name for name, *_ in pairs]] if names else []
    for i, (text, label) in enumerate(zip(texts, labels, strict=True)):
        cells = {"label": label, "id": str(i)}
        rows.append([cells.get(kind or name, text.replace(mark, " ")) for name, _, kind in pairs])
    return first + "".join(mark.join(row) + "\n" for row in rows)


OBJECTS = [{"tweet": t, "stance": s} for t, s in zip(TEXTS, LABELS, strict=True)]
SPAM = table(["text", "label"])
NAMED = ("header, label 'label'",)
NONE = ("no header, label in column 0",)
ASKS = "looks like a header, .*; give label_column=NAME text_column=NAME, or give header='no'"
FILES = {
    "usual names": ("a.csv", SPAM, NAMED),
    "with a mark": ("a.csv", "\ufeff" + SPAM, NAMED),
    "semicolons": ("a.csv", table(["text", "label"], mark=";"), NAMED),
    "no header": ("a.csv", table([]), NONE),
    "a name as a value": ("a.csv", table([], labels=["text", "class"] * 20), NONE),
    "label is a value": ("a.csv", table(["text", "spam:label"]), ASKS),
    "before the text": ("a.csv", table(["intent:label", "Text"]), ASKS),
    "in Chinese": ("a.csv", table(["text", "情感:label"], CHINESE), ASKS),
    "text of an unknown name": ("a.csv", table(["mail:text", "label"]), ASKS),
    "two unknown names": ("a.csv", table(["mail:text", "klasse:label"]), ASKS),
    "tabs": ("a.tsv", table(["text", "spam:label"], mark="\t"), ASKS),
    "of Excel": ("a.csv", table(["text", "spam:label"], mark=";", first="sep=;\n"), ASKS),
    "objects": ("a.jsonl", "".join(json.dumps(row) + "\n" for row in OBJECTS), "no label column named"),
    "two texts": ("a.csv", table(["a:text", "b:text"]), "every row|different labels"),
    "known and two more": ("a.csv", table(["text", "b:label", "c:label"]), ASKS),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_odd_files_are_read_as_meant_or_refused(tmp_path, name):
    file, content, message = FILES[name]
    (tmp_path / file).write_text(content, encoding="utf-8", newline="")

    def build():
        return build_task("text_classification", {"data": str(tmp_path / file)})

    if isinstance(message, str):
        with pytest.raises(ValueError, match=message):
            build()
        return
    task = build()
    described = task.description()
    columns = described["files"]["train"]["columns"]
    assert all(part in columns for part in message), columns
    assert set(task.labels) <= {"ham", "spam", "text", "class"}
    assert sum(described["examples"].values()) == 40  # no header among the texts, and none is lost


@pytest.mark.parametrize("file", ["a.csv", "a.tsv", "a.jsonl"])
def test_blank_rows_are_skipped_and_counted(tmp_path, file):
    mark = {"a.csv": ",", "a.tsv": "\t"}.get(file)
    rows = [
        f"{label}{mark}{text.replace(',', '')}" for label, text in zip(LABELS, TEXTS, strict=True)
    ]
    if mark is None:
        rows = [
            json.dumps({"label": label, "text": text})
            for label, text in zip(LABELS, TEXTS, strict=True)
        ]
    blanks = ["", "  ", *([mark, f" {mark} "] if mark else [])]
    lines = ["", *rows[:20], *blanks, *rows[20:], ""]
    (tmp_path / file).write_text("\n".join(lines) + "\n", encoding="utf-8")
    described = build_task("text_classification", {"data": str(tmp_path / file)}).description()
    assert sum(described["examples"].values()) == len(rows)
    remark = f"{tmp_path / file}: {len(blanks) + 2} blank rows were skipped"
    assert remark in data_remarks(described)


def test_what_was_done_to_the_data_is_said(tmp_path):
    rows = [(f"{i % 3}.5", f"one two three {i // 2}") for i in range(60)] + [
        ("9.5", "one more")
    ] * 3
    write = {"train": rows, "valid": rows[:4], "test": [("0.5", "a b c d e f"), ("1.5", "new one")]}
    for split, some in write.items():
        lines = [f"{label}\t{text}\n" for label, text in some]
        (tmp_path / f"{split}.tsv").write_text("".join(lines), encoding="utf-8")
    options = {"data": str(tmp_path), "max_length": 4}
    remarks = data_remarks(build_task("text_classification", options).description())
    assert remarks == [
        "valid has no text of 1 classes of train: '9.5'",
        "test has no text of 2 classes of train: '2.5', '9.5'",
        "1 of 2 texts of test were cut to max_length = 4",
        "4 of 4 texts of valid are also in train",
    ]


def test_texts_without_blanks_are_said(tmp_path):
    (tmp_path / "a.csv").write_text(table(["text", "label"], CHINESE), encoding="utf-8")
    for tokenizer, count in (("word", 3), ("character", 0)):
        options = {"data": str(tmp_path / "a.csv"), "tokenizer": tokenizer}
        remarks = data_remarks(build_task("text_classification", options).description())
        assert sum("have no blanks between words" in line for line in remarks) == count


@pytest.mark.parametrize(
    "value", [None, 3, "x", [1], {"train": 3}, {"train": None}, {"train": ["x"]}]
)
def test_descriptions_of_others_are_no_traceback(value):
    names = ("files", "labels", "examples", "texts_also_in_train", "truncated_texts")
    data_remarks(dict.fromkeys((*names, "cut_to_max_tokens"), value))


def test_a_half_empty_row_is_still_an_error(tmp_path):
    (tmp_path / "a.csv").write_text(SPAM + ",spam\n", encoding="utf-8")
    with pytest.raises(DataError, match=re.escape("a.csv:42: the text is empty")):
        build_task("text_classification", {"data": str(tmp_path / "a.csv")})
