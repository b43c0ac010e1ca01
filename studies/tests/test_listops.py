"""ListOps: labels against an independent evaluator, the law against a plain sampler, files row by
row."""

import statistics
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wellposed.errors import ConfigError, DataError
from wellposed_lab.tasks.data.splits import SPLITS
from wellposed_lab.tasks.task import build_task
from wellposed_studies.tasks.listops import VOCABULARY, evaluate

SMALL = {"num_train": 300, "num_valid": 100, "num_test": 100}


def build(data="builtin", **options):
    return build_task("listops", {"data": str(data), **options})


def value_of(text):
    """Evaluate by nesting Python lists: no stack, no shared code with the library."""
    python = text.replace("(", " ").replace(")", " ")
    for name in ("MIN", "MAX", "MED", "SM", "FIRST", "LAST"):
        python = python.replace(f"[{name} ", f"['{name}', ")
    python = " ".join(token if token.endswith(",") else f"{token}," for token in python.split())

    def value(node):
        if isinstance(node, int):
            return node
        values = [value(child) for child in node[1:]]
        results = {
            "MIN": sorted(values)[0],
            "MAX": sorted(values)[-1],
            "MED": int(statistics.median(values)),
            "SM": sum(values) - 10 * (sum(values) // 10),
            "FIRST": values[0],
            "LAST": values[-1],
        }
        return results[node[0]]

    return value(eval(python.removesuffix(",")))


def texts(task, split):
    tokens = ["<pad>", "<unk>", *VOCABULARY]
    return [" ".join(tokens[i] for i in example["input_ids"]) for example in task.dataset(split)]


def shape(text):
    """Return the depth of digits (the root has depth 1) and the number of arguments of every
    operator."""
    depth = 1
    deepest = 1
    open_counts = [0]
    counts = []
    for token in text.split():
        if token == "]":
            counts.append(open_counts.pop())
            depth -= 1
        else:
            open_counts[-1] += 1
            deepest = max(deepest, depth)
            if token.startswith("["):
                open_counts.append(0)
                depth += 1
    return deepest, counts


EXPRESSIONS = st.recursive(
    st.integers(0, 9).map(str),
    lambda inner: st.builds(
        lambda name, values: f"[{name} {' '.join(values)} ]",
        st.sampled_from(["MIN", "MAX", "MED", "SM", "FIRST", "LAST"]),
        st.lists(inner, min_size=1, max_size=5),
    ),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None)
@given(text=EXPRESSIONS)
def test_evaluate_equals_the_independent_evaluator(text):
    assert evaluate(text.split()) == value_of(text)


@pytest.mark.parametrize(
    ("setting", "train", "max_depth", "max_args", "min_length", "max_length"),
    [("short", 2000, 4, 5, 5, 50), ("lra", 60, 10, 10, 500, 2000)],
)
def test_expressions_are_exact_and_within_the_bounds(
    setting, train, max_depth, max_args, min_length, max_length
):
    task = build(setting=setting, num_train=train, num_valid=train // 3, num_test=train // 3)
    for split in SPLITS:
        for example, text in zip(task.dataset(split), texts(task, split), strict=True):
            assert task.labels[example["labels"][0]] == str(value_of(text))
    shapes = [shape(text) for split in SPLITS for text in texts(task, split)]
    assert max(depth for depth, _ in shapes) == max_depth
    counts = Counter(count for _, operators in shapes for count in operators)
    assert set(counts) == set(range(2, max_args + 1))
    lengths = [length for split in SPLITS for length in task.lengths(split)]
    assert min_length < min(lengths)
    assert max(lengths) < max_length
    assert task.model_kwargs()["max_position_embeddings"] == max(lengths)


def test_expressions_are_those_of_the_version():
    # A change of this digest is a change of every published ListOps number: raise GENERATOR_VERSION
    # with it.
    described = build(**SMALL).description()
    assert described["generator_version"] == 1
    assert described["sha256"].startswith("81d50fca2943c48d")


def test_impossible_bounds_are_refused(monkeypatch):
    with pytest.raises(ConfigError, match=r"(?s)max_depth = 1.*max_args = 1, expected an int"):
        build(max_depth=1, max_args=1)
    with pytest.raises(ConfigError, match="leave no length strictly between"):
        build(min_length=20, max_length=21)
    monkeypatch.setattr("wellposed_studies.tasks.listops.MAX_FRUITLESS_TRIES", 3000)
    few = {**SMALL, "max_depth": 2, "max_args": 2}
    with pytest.raises(ConfigError, match="400 found, 500 wanted; lower"):
        build(**few, min_length=3, max_length=6)
    with pytest.raises(ConfigError, match="no expression within the bounds"):
        build(**few, min_length=10, max_length=20)


def write_rows(path, rows):
    path.write_text("".join(row + "\n" for row in rows))
    return str(path)


GOOD = ["5\t( ( ( [SM 7 ) 8 ) ] )", "3\t[MIN 3 9 ]", "3\t( ( ( [LAST 9 ) 3 ) ] )"] * 8


def test_files_of_label_and_expression(tmp_path):
    for split in SPLITS:
        write_rows(tmp_path / f"x_{split}.tsv", GOOD)
    task = build(tmp_path / "x_train.tsv")
    assert [len(task.dataset(split)) for split in SPLITS] == [24, 24, 24]
    assert texts(task, "train")[:3] == ["[SM 7 8 ]", "[MIN 3 9 ]", "[LAST 9 3 ]"]
    encoded = task.tokenizer("( ( ( [SM 7 ) 8 ) ] )")["input_ids"]
    assert encoded == task.dataset("train")[0]["input_ids"]


def test_long_range_arena_files_with_header(tmp_path):
    rows = ["Source\tTarget", *("\t".join(reversed(row.split("\t"))) for row in GOOD)]
    for split in ("train", "val", "test"):
        write_rows(tmp_path / f"basic_{split}.tsv", rows)
    task = build(tmp_path)
    columns = task.description()["files"]["valid"]["columns"]
    assert columns == "header, label 'Target', text 'Source'"
    assert len(task.dataset("valid")) == 24


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ("4\t[SM 7 8 ]", "label '4', but the expression has the value 5"),
        ("5\t[SM 7 8", "'[SM' is not closed by ']'"),
        ("5\t[SM 7 8 ] ]", "token 5 is ']' without an open operator"),
        ("5\t[SM 7 18 ]", "token 3 is '18', expected 0, 1, 2"),
        ("5\t[AVG 7 8 ]", "token 1 is '[AVG', expected"),
        ("0\t[SM ]", "token 2 closes '[SM', which has no argument"),
        ("5\t5 5", "2 expressions, expected one"),
        ("5\t( [SM 7 8 ]", "1 '(' and 0 ')'"),
        ("5\t ", "0 expressions, expected one"),
    ],
)
def test_malformed_rows_are_named(tmp_path, row, problem):
    data = write_rows(tmp_path / "train.tsv", [*GOOD[:5], row, *GOOD])
    with pytest.raises(DataError) as caught:
        build(data)
    assert f"{data}:6: " in str(caught.value)
    assert problem in str(caught.value)
    write_rows(tmp_path / "train.tsv", [*GOOD, "5\t[SM 7 8 0 ]"])
    with pytest.raises(DataError) as caught:
        build(data, max_length=4)
    assert "max_length = 4 tokens" in str(caught.value)
    assert f"{data}:25: 5 tokens" in str(caught.value)
