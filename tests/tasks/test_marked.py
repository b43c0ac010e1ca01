"""Task ``marked``: the answer is read from the row, and no bag of its words tells it more often
than stated."""

import itertools
from collections import Counter, defaultdict

import pytest
from tests.support.refusal import bad_config

from wellposed.errors import ConfigError
from wellposed.tasks import SPLITS, MarkedTask, build_task
from wellposed.tasks.marked import Drawn, MarkedOptions, bag_accuracy, draw_distinct

SMALL = {"num_train": 60, "num_valid": 20, "num_test": 20}


def rows_of(task):
    rows = [
        task.dataset(split)[index] for split in SPLITS for index in range(SMALL[f"num_{split}"])
    ]
    return [
        (task.tokenizer.decode(row["input_ids"]), task.labels[row["labels"][0]]) for row in rows
    ]


@pytest.mark.parametrize("question", ["order", "recall"])
def test_every_row_has_the_label_that_a_reader_finds(question):
    task = build_task("marked", {"question": question, "slots": 5, "words": 4, **SMALL})
    assert isinstance(task, MarkedTask)
    rows = rows_of(task)
    assert len(set(rows)) == len(rows) == 100
    for text, label in rows:
        ask, *slots = text.split()
        assert len(slots) == 5
        if question == "recall":
            assert slots[["@0", "@1", "@2", "@3", "@4"].index(ask)] == label
        else:
            words = [word for word in slots if word[0] == "w"]
            assert len(set(words)) == 2
            assert words[0] == label


def test_without_repeats_every_slot_is_as_good_a_guess():
    drawn = draw_distinct(MarkedOptions("recall", 4, 6, repeats=False), 50, seed=0)
    assert all(len(set(row.tokens)) == 5 for row in drawn)
    assert bag_accuracy(drawn) == 0.25


def test_the_best_guess_from_the_bag_is_found_by_counting_every_row():
    """Over all rows of recall, the best guess for each bag of words, by brute force."""
    words, slots = ("w0", "w1", "w2"), 3
    drawn = [
        Drawn((f"@{place}", *row), row[place])
        for row in itertools.product(words, repeat=slots)
        for place in range(slots)
    ]
    answers = defaultdict(Counter)
    for tokens, answer in drawn:
        answers[tuple(sorted(tokens))][answer] += 1
    best = sum(max(counts.values()) for counts in answers.values())
    assert bag_accuracy(drawn) == pytest.approx(best / len(drawn))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"question": "recall", "slots": 5, "words": 4, "repeats": False},
            "words = 4, expected at least slots = 5",
        ),
        ({"repeats": False}, "repeats = False belongs to question recall"),
        ({"slots": 1}, "slots = 1, expected an integer >= 2"),
        ({"words": 1}, "words = 1"),
        ({"num_test": 0}, "num_test = 0"),
    ],
)
def test_impossible_sizes_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        build_task("marked", {**SMALL, **options})


def test_more_rows_than_there_are_is_refused_with_the_way_out():
    with bad_config(match=r"too few different rows: 8 found, 100 wanted; lower num_train"):
        build_task("marked", {"question": "recall", "slots": 2, "words": 2, **SMALL})
