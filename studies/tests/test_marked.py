"""Task ``marked``: the answer is read from the row, and no bag of its words tells it more often
than stated."""

import itertools
from collections import Counter, defaultdict

import pytest

from wellposed.errors import ConfigError
from wellposed_lab.tasks.data.splits import SPLITS
from wellposed_lab.tasks.task import build_task
from wellposed_studies.tasks.marked import Drawn, MarkedOptions, bag_accuracy, draw_rows

SMALL = {"num_train": 60, "num_valid": 20, "num_test": 20}


def rows_of(task):
    rows = [row for split in SPLITS for row in task.dataset(split)]
    return [
        (task.tokenizer.decode(row["input_ids"]), task.labels[row["labels"][0]]) for row in rows
    ]


@pytest.mark.parametrize("question", ["order", "recall"])
def test_every_row_has_the_label_that_a_reader_finds(question):
    task = build_task("marked", {"question": question, "slots": 5, "words": 4, **SMALL})
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
    drawn = draw_rows(MarkedOptions("recall", 4, 6, repeats=False), 50, seed=0)
    assert all(len(set(row.tokens)) == 5 for row in drawn)
    assert bag_accuracy(drawn) == 0.25


def test_the_best_guess_from_the_bag_is_found_by_counting_every_row():
    """Over all rows of recall, the best guess for each bag of words, by brute force."""
    words = ("w0", "w1", "w2")
    slots = 3
    drawn = [
        Drawn((f"@{slot}", *row), row[slot])
        for row in itertools.product(words, repeat=slots)
        for slot in range(slots)
    ]
    answers = defaultdict(Counter)
    for tokens, answer in drawn:
        answers[tuple(sorted(tokens))][answer] += 1
    best = sum(max(counts.values()) for counts in answers.values())
    assert bag_accuracy(drawn) == pytest.approx(best / len(drawn))


RECALL = {"question": "recall"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {**RECALL, "slots": 5, "words": 4, "repeats": False},
            "words = 4, expected at least slots",
        ),
        ({"repeats": False}, "repeats = False belongs to question recall"),
        ({"slots": 1}, "slots = 1, expected an integer >= 2"),
        (
            {**RECALL, "slots": 2, "words": 2},
            "too few different rows: 8 found, 100 wanted; lower num_train, num_valid and num_test,"
            " or raise slots or words",
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        build_task("marked", {**SMALL, **options})
