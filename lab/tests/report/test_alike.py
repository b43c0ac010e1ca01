"""An answer names what differs between two trainings and belongs to no idea, and a penalty that hardly
moves the weights earns no verdict."""

import json

import pytest
from tests.support.edited import edited

from wellposed_lab.report.aggregate import aggregate
from wellposed_lab.report.comparison import verdict
from wellposed_lab.report.page import build_report

VALUES = {"plain": [0.5, 0.51, 0.52], "other": [0.7, 0.72, 0.71]}
SHARED = {"learning_rate": 0.001, "schedule": "cosine", "warmup_steps": 0, "gamma": 1.0}


def written(compare, first, other, rates=()):
    """Write a comparison whose variants were trained with these options; return its folder."""
    folder = compare(VALUES)
    for name, options in (("plain", first), ("other", other)):
        for path in (folder / name).rglob("result.json"):
            with edited(path) as record:
                record["config"]["train"] |= SHARED | options
    if rates:
        trial = {"rate": 0.1, "chosen": True, "loss": 1.0, "metric": "accuracy", "value": 0.5}
        rows = [{"variant": name, **trial} for name in rates]
        (folder / "compare.json").write_text(json.dumps({"variants": [*VALUES], "rates": rows}))
    return folder


@pytest.mark.parametrize(
    ("first", "other", "rates", "unlike"),
    [
        ({}, {}, [], ""),
        ({}, {"learning_rate": 0.05}, [], "learning rate 0.05 (plain: 0.001)"),
        ({}, {"learning_rate": 0.05}, ["plain"], "learning rate 0.05 (plain: 0.001)"),
        ({}, {"learning_rate": 0.05}, ["plain", "other"], ""),
        (
            {"warmup_steps": 100},
            {"learning_rate": 0.05},
            ["plain", "other"],
            "warmup steps 0 (plain: 100)",
        ),
        ({}, {"weight_decay": 0.1}, [], "weight decay 0.1 (plain: none)"),
        ({}, {"steps": 400}, [], "steps 400 (plain: 100)"),
        ({}, {"gamma": 3.0}, [], ""),  # the cosine does not read it
        (
            {"schedule": "kim2021"},
            {"schedule": "kim2021", "gamma": 3.0, "learning_rate": 0.5},
            [],
            "gamma 3 (plain: 1)",
        ),
        ({}, {"logit_scale": 10.0, "margin_loss": "words:2"}, [], ""),  # the idea of a variant
    ],
)
def test_what_is_no_part_of_the_idea_is_named_beside_the_answer(
    compare, tmp_path, first, other, rates, unlike
):
    folder = written(compare, first, other, rates)
    comparison = aggregate([folder])
    (task,) = comparison.tasks
    clause = f"; not tuned alike: {unlike}" if unlike else ""
    assert task.variants[1].not_tuned_alike == clause
    assert task.worth(0.01)[1].endswith(clause)
    assert ("not tuned alike: other" in verdict(task)) is bool(unlike)
    assert ("not tuned alike" in comparison.table()) is bool(unlike)
    page = build_report([folder], tmp_path / "page.html").read_text("utf-8")
    assert ("not tuned alike" in page) is bool(unlike)


def penalised(compare, moves, **model):
    folder = compare(VALUES)
    for path in (folder / "other").rglob("result.json"):
        with edited(path) as record:
            record["config"]["penalty"] = {"affinity": 1e-6, "form": "gram_squared"}
            record["config"]["model"] |= model
            if moves is not None:
                record["train_info"]["penalty_moves"] = moves
    (task,) = aggregate([folder]).tasks
    return task


def test_a_penalty_that_hardly_moves_the_weights_earns_no_verdict(compare):
    task = penalised(compare, 1e-4)
    answer = task.worth(0.01)[1]
    assert answer.startswith("other: undecided: its penalty moves the weights by 0.01 % of their")
    assert "give other:1e-02" in answer
    assert "undecided" in verdict(task)


@pytest.mark.parametrize(
    ("moves", "model"),
    [(0.02, {}), (None, {}), (1e-4, {"norm": "none"})],
    ids=["it moves them", "not estimated", "another difference"],
)
def test_other_penalties_are_judged(compare, moves, model):
    assert penalised(compare, moves, **model).worth(0.01)[1].startswith("other: worth it")
