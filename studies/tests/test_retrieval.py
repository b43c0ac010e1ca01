"""Retrieval: AAN files, pairs made of labelled texts, builtin passages, bad rows by line, the
training loop."""

from collections import Counter

import pytest

from wellposed.errors import ConfigError, DataError
from wellposed_lab.tasks.data.splits import SPLITS
from wellposed_lab.tasks.task import build_task

PAIRS = [
    (i % 2, f"A{i % 7}", f"B{i % 5}", f"first paper {i % 7}", f"second é {i % 5}")
    for i in range(40)
]


def build(data="builtin", **options):
    return build_task("retrieval", {"data": str(data), **options})


def as_tsv(rows):
    return "".join("\t".join(map(str, row)) + "\n" for row in rows)


def decoded(task, split):
    decode = task.tokenizer.decode
    rows = task.dataset(split)
    names = ("input_ids", "input_ids_pair")
    return [(row["labels"][0], *(decode(row[name]) for name in names)) for row in rows]


def test_the_release_of_the_long_range_arena_is_read_as_it_is(tmp_path):
    for split, rows in {"train": PAIRS, "eval": PAIRS[:6], "test": PAIRS[3:12]}.items():
        floats = [(float(row[0]), *row[1:]) for row in rows]
        (tmp_path / f"new_aan_pairs.{split}.tsv").write_text(as_tsv(floats))
    task = build(tmp_path)
    for split, rows in {"train": PAIRS, "valid": PAIRS[:6], "test": PAIRS[3:12]}.items():
        assert decoded(task, split) == [(label, one, other) for label, _, _, one, other in rows]
    described = task.description()
    assert described["documents"] == {"train": 12, "valid": 11, "test": 12}
    assert described["documents_also_in_train"] == {"valid": 11, "test": 12}
    assert task.model_kwargs()["id2label"] == {0: "different", 1: "related"}
    assert task.lengths("train")[0] == len("first paper 0second é 0".encode())


BAD_ROWS = {
    ("1", "a", "b", "text"): "4 columns, expected 5: label, id1, id2, text1, text2",
    ("2", "a", "b", "x", "y"): "label '2', expected one of 0, 1, 0.0, 1.0",
    ("1", "a", "b", "x", ""): "text2 is empty",
}


@pytest.mark.parametrize("row", BAD_ROWS)
def test_bad_rows_are_named(tmp_path, row):
    path = tmp_path / "x.train.tsv"
    # A first row that is cut short does not change what the file is.
    for before in [6, 0][: 1 + (len(row) == 4)]:
        path.write_text(as_tsv([*PAIRS[:before], row, *PAIRS]))
        with pytest.raises(DataError) as caught:
            build(path)
        assert "1 rows that" in str(caught.value)
        assert f"{path}:{before + 1}: {BAD_ROWS[row]}" in str(caught.value)


def test_pairs_of_labelled_texts_are_balanced_distinct_and_true(tmp_path):
    label_of = {f"text {i} of {i % 3}": str(i % 3) for i in range(60)}
    for split in SPLITS:
        rows = [(label, f"{split} {text}") for text, label in label_of.items()]
        (tmp_path / f"{split}.tsv").write_text(as_tsv(rows))
    task = build(tmp_path, num_train=101, num_valid=30)
    assert [len(task.dataset(split)) for split in SPLITS] == [101, 30, 60]
    for split in SPLITS:
        rows = decoded(task, split)
        for related, *pair in rows:
            assert pair[0].startswith(split)
            one, other = (text.removeprefix(f"{split} ") for text in pair)
            assert one != other
            assert (label_of[one] == label_of[other]) == bool(related)
        assert len({frozenset(row[1:]) for row in rows}) == len(rows)
        counts = Counter(row[0] for row in rows)
        assert counts[1] - counts[0] in (0, 1)


def test_builtin_passages_share_no_section_between_splits():
    from wellposed_studies.tasks.retrieval import builtin_passages

    tables, _ = builtin_passages()
    sections = {split: set(tables[split].labels) for split in SPLITS}
    assert not sections["train"] & sections["valid"] | sections["train"] & sections["test"]
    assert all(len(text) == 600 for text in tables["test"].texts)
    task = build(num_train=50, num_valid=10, num_test=10, max_length=100)
    assert task.description()["truncated_documents"]["train"] > 0
    assert task.reference() == {"accuracy": 0.5}


def test_each_side_is_padded_by_itself(tmp_path):
    made = [(i % 2, i, i, "a" * (i + 1), "b" * (41 - i)) for i in range(40)]
    (tmp_path / "x.train.tsv").write_text(as_tsv(made))
    task = build(tmp_path / "x.train.tsv")
    rows = task.dataset("train")[:3]
    batch = task.collate(rows)
    for side in ("", "_pair"):
        lengths = [len(row[f"input_ids{side}"]) for row in rows]
        assert batch[f"input_ids{side}"].shape[1] == max(lengths)
        assert batch[f"attention_mask{side}"].sum(1).tolist() == lengths


def test_options_that_cannot_be_used(tmp_path):
    (tmp_path / "x.train.tsv").write_text(as_tsv(PAIRS))
    path = tmp_path / "x.train.tsv"
    with pytest.raises(ConfigError, match=r"num_train: says what is drawn; .*x.train.tsv brings"):
        build(path, num_train=3)
    with pytest.raises(DataError, match="more than max_length = 3 tokens"):
        build(path, max_length=3, overflow="error")
