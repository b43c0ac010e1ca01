"""The parts of the study of certified accuracy: rates, what counts as settled, what falls to an
attack."""

import csv
import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from lab.tests.training.certified.test_run import write_texts

from wellposed.errors import ConfigError, DataError
from wellposed_lab.compare.rates import rates_about
from wellposed_lab.compare.runs import PlannedRun
from wellposed_lab.tasks.task import build_task
from wellposed_lab.training.config import RunConfig, TrainOptions
from wellposed_lab.training.loop.train import train
from wellposed_studies.frontier import certified as strong_attack
from wellposed_studies.frontier.accuracy import DRAWN, JUDGED, MODELS, Evidence, judge_accuracy
from wellposed_studies.frontier.certified import CORPORA, find_texts, text_run
from wellposed_studies.recipe import Request
from wellposed_studies.study import FinishedRun, Sizes
from wellposed_studies.tuning import tune

SEEDS = (0.80, 0.81, 0.805)
PLAINER = {"post_ln": (0.79, 0.80, 0.795), "rezero": (0.75, 0.76, 0.75)}


def evidence(corpus="ag_news", **changes):
    default = Evidence(corpus, SEEDS, PLAINER, (0.7, 0.71, 0.7), 4000, attacked=50, fallen=0)
    return dataclasses.replace(default, **changes)


@pytest.mark.parametrize(
    ("changes", "holds"),
    [
        ({}, True),
        (
            {"accuracy": [0.7905, 0.8, 0.794]},
            True,
        ),  # below the better plain one by less than a point
        ({"accuracy": [0.77, 0.781, 0.774]}, False),
        ({"accuracy": [0.75, 0.85, 0.79]}, None),
        ({"accuracy": [0.80, math.nan, 0.805]}, None),
        ({"accuracy": [0.80], "plain": {"post_ln": [0.7], "rezero": [0.7]}}, None),
        ({"certified": [0.3, 0.31, 0.3]}, False),
        ({"certified": [0.61, 0.60, 0.605], "examples": 40}, None),
        ({"fallen": 1}, False),
        ({"attacked": 0}, None),
    ],
)
def test_each_part_of_the_claim_can_decide_the_verdict(changes, holds):
    assert judge_accuracy([evidence("imdb"), evidence(**changes)]) is holds
    assert judge_accuracy([evidence(), evidence("imdb", **changes)]) is holds


def test_a_corpus_with_a_goal_that_was_not_run_leaves_the_verdict_open_unless_another_is_against_it():
    assert judge_accuracy([evidence()]) is None
    assert judge_accuracy([evidence(fallen=1)]) is False
    assert judge_accuracy([evidence(), evidence("imdb"), evidence("sst")]) is True
    assert judge_accuracy([]) is None


def test_the_plain_side_is_the_one_with_the_higher_mean():
    assert evidence().better_plain == "post_ln"
    assert evidence(plain={"post_ln": [0.7, 0.7], "rezero": [0.71, 0.7]}).better_plain == "rezero"


@pytest.mark.parametrize(
    ("accuracy", "widen", "first_seed", "chosen_rate"),
    [
        ({0.007: 0.7, 0.02: 0.9, 0.06: None}, False, [0.007, 0.02, 0.06], 0.02),
        ({0.007: 0.7, 0.02: 0.8, 0.06: 0.9}, False, [0.007, 0.02, 0.06], 0.06),
        ({0.007: 0.7, 0.02: 0.9, 0.06: None}, True, [0.007, 0.02, 0.06], 0.02),
        ({0.007: 0.7, 0.02: 0.8, 0.06: 0.9, 0.2: None}, True, [0.007, 0.02, 0.06, 0.2], 0.06),
        (
            {0.007: 0.9, 0.02: 0.8, 0.06: 0.7, 0.002: 0.95, 0.0007: 0.9},
            True,
            [0.007, 0.02, 0.06, 0.002, 0.0007],
            0.002,
        ),
        (
            {0.007: 0.1, 0.02: 0.2, 0.06: 0.3, 0.2: 0.4, 0.6: 0.5, 2.0: 0.6, 6.0: 0.7},
            True,
            [0.007, 0.02, 0.06, 0.2, 0.6, 2.0],
            2.0,
        ),
    ],
)
def test_a_model_is_trained_at_every_rate_with_one_seed_and_at_the_best_with_the_others(
    accuracy, widen, first_seed, chosen_rate, tmp_path
):
    """A rate without accuracy diverges."""
    asked = []

    def plan(rate, seed):
        base = text_run("ag_news", "nowhere", Sizes(1, 1, learning_rate=rate), seed)
        return PlannedRun(tmp_path, "", base)

    def trained(planned):
        asked.extend((run.config.train.learning_rate, run.config.train.seed) for run in planned)
        runs = []
        for folder, _, config in planned:
            value = accuracy[config.train.learning_rate]
            metrics = {} if value is None else {"accuracy,valid": value}
            runs.append(FinishedRun(config, folder, metrics))
        return runs

    tuned = tune(trained, plan, rates_about(0.02), seeds=3, widen=widen)
    assert asked == [*((rate, 0) for rate in first_seed), (chosen_rate, 1), (chosen_rate, 2)]
    assert (tuned.rate, [run.seed for run in tuned.runs]) == (chosen_rate, [0, 1, 2])
    assert len(tuned.trials) == len(first_seed)


@pytest.mark.parametrize(
    ("losses", "schedule", "settled"),
    [
        ([4, 3, 2.5, 2.1, 2.1, 2.1, 2.1, 2.09], "constant", True),
        (range(8, 0, -1), "constant", False),
        # A rate that falls to 0 flattens the curve although the model still learns.
        ([4, 3.5, 3, 2.5, 2.2, 2.1, 2.1, 2.09], "constant", True),
        ([4, 3.5, 3, 2.5, 2.2, 2.1, 2.1, 2.09], "cosine", False),
        ([4, 3, 2.1, 2.1, 2.1, 2.1, 2.1, 2.09], "cosine", True),
        # It overfits: its best loss was long ago.
        ([4, 3, 2.1, 2.1, 2.1, 2.1, 2.2, 2.4], "constant", False),
    ],
)
def test_runs_are_settled_where_every_one_has_levelled_off(losses, schedule, settled):
    def run(curve, failure=""):
        train = TrainOptions(steps=8, schedule=schedule, learning_rate=0.1)
        config = RunConfig("text_classification", train=train)
        rows = [{"step": k, "split": "valid", "loss": loss} for k, loss in enumerate(curve, 1)]
        run = SimpleNamespace(failure=failure, config=config, logged=lambda: rows)
        run.unsettled = vars(FinishedRun)["unsettled"].fget(run)
        run.settled = vars(FinishedRun)["settled"].fget(run)
        return cast("FinishedRun", run)

    assert run(losses).settled is settled
    assert run(losses, "diverged at step 3").settled, "it failed for good"


def test_every_temperature_has_its_control_without_blocks():
    for label in [label for label in MODELS if label.startswith("lipschitz")]:
        control = MODELS[label.replace("lipschitz", "no blocks")]
        assert control.config(text_run("imdb", "x", Sizes(1, 1), 0)).model.num_hidden_layers == 0
        assert dataclasses.replace(control, blocks=True) == MODELS[label]
    assert {JUDGED, "post_ln", "rezero"} <= set(DRAWN)


def test_a_study_without_its_texts_says_what_it_needs(tmp_path):
    with pytest.raises(ConfigError, match="ag_news, imdb"):
        find_texts(Request("toy", tmp_path))
    with pytest.raises(DataError, match="found none"):
        find_texts(Request("toy", tmp_path, data=str(tmp_path)))


def test_corpora_are_found_in_a_folder_of_many_or_are_the_folder(tmp_path):
    write_texts(tmp_path / "trec")
    (tmp_path / "minbert").mkdir()
    (tmp_path / "minbert" / CORPORA["sst"].train).touch()
    assert set(find_texts(Request("toy", tmp_path, str(tmp_path)))) == {"trec", "sst"}
    assert set(find_texts(Request("toy", tmp_path, str(tmp_path / "trec")))) == {"trec"}


@pytest.fixture(scope="module")
def certified_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attacked")
    data = write_texts(folder / "ag_news")
    base = text_run("ag_news", str(data), Sizes(20, 1, width=8, batch_size=8), 0)
    faster = dataclasses.replace(base.train, learning_rate=1e-2)
    config = MODELS[JUDGED].config(dataclasses.replace(base, train=faster))
    task = build_task(config.task, config.task_options)
    assert train(config, folder / "run", task=task).status == "success"
    return folder / "run", task


def test_no_certified_example_falls_and_of_an_unsound_certificate_they_do(
    certified_run, monkeypatch
):
    folder, task = certified_run
    attack = strong_attack.Attack(among=4, count=3, steps=30, restarts=2)
    sound = strong_attack.attack_certified(folder, task, radius=0.01, attack=attack)
    assert sound == (3, 0)
    assert strong_attack.attack_certified(folder, task, radius=50.0, attack=attack) == (0, 0)

    honest = strong_attack.best_certificate

    def lying(*args):
        return dataclasses.replace(honest(*args), total=1e-6, layers=())

    monkeypatch.setattr(strong_attack, "best_certificate", lying)
    unsound = strong_attack.attack_certified(folder, task, radius=3.0, attack=attack)
    assert unsound[1] > 0


def test_what_is_certified_on_more_examples_is_what_the_curve_says_of_them(certified_run):
    folder, task = certified_run
    sure = [strong_attack.certified_share(folder, task, share=s, examples=4) for s in (0, 0.1, 50)]
    assert sure == sorted(sure, reverse=True)
    assert sure[-1] == 0.0


def test_the_committed_rows_are_those_of_the_recipe():
    path = Path(__file__).parents[2] / "benchmarks" / "reproduction" / "frontier-accuracy.csv"
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    curves = [row for row in rows if row["radius"]]
    assert {row["model"] for row in curves} == set(MODELS)
    assert all(float(row["certified"]) <= float(row["attacked"]) for row in curves)
