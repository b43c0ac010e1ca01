"""Verdicts follow from the numbers: the same recipe holds or does not as its runs come out."""

import itertools
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest
from studies.tests.support.finished_runs import finished

from wellposed_studies.kim2021 import costs as kim
from wellposed_studies.recipe import Request
from wellposed_studies.reproduce import reproduce
from wellposed_studies.sengupta2023 import tables as sengupta
from wellposed_studies.sengupta2023.trained import LABELS as MODELS
from wellposed_studies.sengupta2023.trained import VARIANTS, text_study
from wellposed_studies.study import FinishedRun
from wellposed_studies.verdicts import OVERFITS, STILL_LEARNING, unsettled

ENTROPY = 3.0
ACCURACIES = ("accuracy,test", "accuracy,valid")
PAPERS = "l2_contractive_kim2021"
GOOD = {"lstm": 1.06, "dot_product": 1.0, "l2": 1.01, "l2_tied": 1.05, PAPERS: 1.1}
GOOD["l2_tied_wide"] = 1.04
GOOD["l2_contractive"] = 1.0  # by the sharp bound: beside the claim, never part of it


def language_models(monkeypatch, nll, deep, *, pairs=2.5, level=True):
    """Let the grid come out with these test NLL at one layer and at the deepest."""

    def trained(request, group, kinds, sizes):
        del request, group
        both = ("nats_per_char,test", "nats_per_char,valid")
        reference = {"nats_per_char": ENTROPY}
        runs = []
        for kind, depth, seed in itertools.product(kinds, sizes.depths, range(sizes.seeds)):
            value = (deep if depth == sizes.depths[-1] else nll)[kind] + seed / 1000
            options = {"depth": depth, "seed": seed, "reference": reference}
            runs.append(finished("char_lm", kind, dict.fromkeys(both, value), **options))
        return runs

    monkeypatch.setattr(kim, "train_models", trained)
    monkeypatch.setattr(kim, "pair_entropy", lambda run: pairs)
    monkeypatch.setattr(FinishedRun, "settled", level)


def test_a_model_that_the_claim_needs_and_that_does_not_train_is_named_and_ends_the_verdict(
    monkeypatch, tmp_path
):
    language_models(monkeypatch, GOOD, GOOD | {"dot_product": ENTROPY, "l2_tied": ENTROPY})
    result = reproduce("kim2021/figure-11", out=tmp_path).result
    assert result.holds is None
    (note,) = (note for note in result.notes if note.startswith("not judged: "))
    assert note == (
        "not judged: l2_tied of 12 layers on char_lm is not 3 standard errors better than a constant"
    )


@pytest.mark.parametrize("recipe", ["figure-4", "table-2", "figure-9"])
@pytest.mark.parametrize("lack", [{"pairs": GOOD["l2_tied"]}, {"level": False}])
def test_language_models_no_better_than_pairs_of_characters_or_that_still_learn_cannot_say(
    recipe: str, lack: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    language_models(monkeypatch, GOOD, GOOD | {PAPERS: 1.06}, **lack)
    assert reproduce(f"kim2021/{recipe}", out=tmp_path).result.holds is None


@pytest.mark.parametrize(
    ("recipe", "dot_product", "level", "holds"),
    [
        ("figure-11", GOOD["dot_product"], False, False),
        ("table-3", GOOD["dot_product"], False, False),
        ("figure-11", ENTROPY, False, None),  # it might train yet
        ("figure-11", ENTROPY, True, True),
        ("table-3", ENTROPY, False, None),  # values are compared too
    ],
)
def test_a_run_that_has_trained_need_not_level_off_where_nothing_else_is_judged(
    recipe, dot_product, level, holds, monkeypatch, tmp_path
):
    language_models(monkeypatch, GOOD, GOOD | {"dot_product": dot_product}, level=level)
    assert reproduce(f"kim2021/{recipe}", out=tmp_path).result.holds is holds


def five_models(monkeypatch, metric, values, *, level=True):
    """Let each model reach its value with every seed, about a thousandth more with each; None
    diverged."""

    def trained(request, study):
        del request
        runs = []
        for seed, (index, variant) in itertools.product(
            range(study.sizes.seeds), enumerate(values)
        ):
            reached = {}
            names = (f"{metric},test", f"{metric},valid")
            if (value := values[variant]) is not None:
                reached = dict.fromkeys(names, value + (seed + 1e-2 * (index + seed) ** 2) / 1000)
            constant = {metric: 0.5 if metric == "accuracy" else 900.0}
            runs.append(finished(study.task, variant, reached, seed=seed, reference=constant))
        return SimpleNamespace(reference=lambda: {metric: 0.5}), runs

    monkeypatch.setattr(sengupta, "train_study", trained)
    monkeypatch.setattr(FinishedRun, "settled", level)
    monkeypatch.setattr(
        sengupta, "ablations", lambda _, study, winner: ([], {(winner, "layers"): [-1.0, -1.1]}, "")
    )


@pytest.mark.parametrize(
    ("transject", "random", "holds"),
    [(0.8, 0.85, True), (0.8, 0.6, False), (0.6, 0.85, False), (None, 0.85, None)],
)
def test_table_1_wants_each_of_the_two_to_win_its_task(
    transject, random, holds, monkeypatch, tmp_path
):
    for name in ("imdb", "ag_news"):
        (tmp_path / "data" / name).mkdir(parents=True)
    plain = dict.fromkeys(("post_ln", "rezero", "orthogonal"), 0.7)
    values = {**plain, "transject": transject, "transject_random": random}
    five_models(monkeypatch, "accuracy", values)
    done = reproduce("sengupta2023/table-1", out=tmp_path, data=str(tmp_path / "data"))
    assert done.result.holds is holds
    every = [(task, model) for task in ("imdb", "ag_news") for model in MODELS.values()]
    assert [(row["task"], row["model"]) for row in done.result.rows] == every
    first = done.result.rows[0]
    reached = [70 + (seed + 1e-2 * seed**2) / 10 for seed in range(10)]
    assert first["ours"] == pytest.approx(fmean(reached))
    assert first["standard_error"] == pytest.approx(stdev(reached) / 10**0.5)
    assert first["over_transformer"] == 0
    assert first["paper"] == 81.3


@pytest.mark.parametrize("table", ["table-2", "table-3"])
def test_tables_say_nothing_while_models_still_learn(table, monkeypatch, tmp_path):
    for folder in ("imdb", "ptb"):
        (tmp_path / "data" / folder).mkdir(parents=True)
    metric = "perplexity" if table == "table-3" else "accuracy"
    values = {**dict.fromkeys(VARIANTS, 0.7), "transject": 0.9}
    five_models(monkeypatch, metric, values, level=False)
    done = reproduce(f"sengupta2023/{table}", out=tmp_path, data=str(tmp_path / "data"))
    assert done.result.holds is None
    assert any(note.startswith("data: ") for note in done.result.notes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ((-0.02, -0.021, -0.02), "a loss"),
        ((0.02, 0.021, 0.02), "no loss"),
        ((-0.02, 0.02, 0.0), "undecided"),
    ],
)
def test_ablations_are_beside_the_whole_model_of_the_same_seed(
    changes, words, monkeypatch, tmp_path
):
    def trained(request, study, *, variants, task=None):
        del request, task
        less = changes if study.name.endswith(("1", "0")) else (0.0, 0.0, 0.0)
        values = [dict.fromkeys(ACCURACIES, 0.7 + seed / 100 + less[seed]) for seed in range(3)]
        task = "text_classification"
        return None, [
            finished(task, variants[0], one_value, seed=n) for n, one_value in enumerate(values)
        ]

    monkeypatch.setattr(sengupta, "train_study", trained)
    monkeypatch.setattr(sengupta, "tuned_study", lambda request, study, task, variants: study)
    (tmp_path / "imdb").mkdir()
    study = text_study(Request("mini", tmp_path, str(tmp_path)), "imdb")
    request = Request("mini", tmp_path, str(tmp_path))
    rows, changed, text = sengupta.ablations(request, study, "transject")
    assert [(row["model"], row["split"], row["paper_change"]) for row in rows] == [
        ("Transformer, one head", "test", -2.1),
        ("TransJect, one expert", "valid", -4.7),
        ("TransJect, no layers", "test", None),
    ]
    assert text.count(f": {words}") == 3
    assert changed["transject", "layers"] == pytest.approx([100 * change for change in changes])
    elsewhere, *_ = sengupta.ablations(request, replace(study, name="ag_news"), "transject_random")
    assert [row["model"] for row in elsewhere] == ["Random-TransJect, no layers"]


def test_a_gain_that_does_not_need_the_layers_is_no_gain_of_theirs():
    assert sengupta.beyond_no_layers(True, True) is True
    assert sengupta.beyond_no_layers(True, None) is None
    assert sengupta.beyond_no_layers(True, False) is None
    assert sengupta.beyond_no_layers(False, False) is False


EVEN = [step / 8 for step in range(1, 9)]
FLAT = [4.0, 3.0, 2.5, 2.2, 2.1, 2.1, 2.1, 2.09]


def on_train(*losses):
    """Twenty losses on train; the given ones are the means of the four quarters, with noise."""
    noise = (0.0, 0.02, -0.02, 0.01, -0.01)
    return [
        ((5 * quarter + at + 1) / 20, loss + off)
        for quarter, loss in enumerate(losses)
        for at, off in enumerate(noise)
    ]


@pytest.mark.parametrize(
    ("losses", "trained", "errors", "reason"),
    [
        (FLAT, (), (), ""),
        (FLAT, on_train(4.0, 2.5, 2.1, 2.1), (), ""),
        (FLAT, on_train(4.0, 2.5, 2.1, 2.09), (), ""),  # less than its noise
        (FLAT, on_train(4.0, 2.5, 2.1, 1.8), (), STILL_LEARNING),  # on train alone
        ([8, 7, 6, 5, 4, 3, 2, 1], on_train(4.0, 2.5, 2.1, 2.1), (), STILL_LEARNING),
        ([4.0, 3.0, 2.1, 2.1, 2.1, 2.2, 2.3, 2.4], on_train(4.0, 2.5, 1.5, 1.0), (), OVERFITS),
        ([4.0, 3.0, 2.1, 2.1, 2.1, 2.2, 2.3, 2.4], (), [0.5] * 5 + [0.002] * 3, ""),
        ([4.0, 3.0, 2.1, 2.1, 2.1, 2.2, 2.3, 2.4], (), [0.5] * 5 + [0.002, 0.1, 0.002], OVERFITS),
        (FLAT[:7], (), (), STILL_LEARNING),  # too few evaluations
    ],
)
def test_a_training_is_level_on_held_out_data_and_on_train_and_does_not_overfit(
    losses, trained, errors, reason
):
    assert unsettled(losses, EVEN[: len(losses)], errors, trained) == reason


@pytest.mark.parametrize("reason", [OVERFITS, STILL_LEARNING])
def test_a_model_that_overfits_is_told_to_read_more(reason, monkeypatch, tmp_path):
    language_models(monkeypatch, GOOD, GOOD, level=False)
    monkeypatch.setattr(FinishedRun, "unsettled", reason)
    result = reproduce("kim2021/figure-4", out=tmp_path).result
    assert result.holds is None
    (note,) = (note for note in result.notes if note.startswith("not judged: "))
    assert note.startswith(f"not judged: lstm of 1 layers on char_lm {reason}; ")
