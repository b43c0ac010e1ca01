"""``reproduce frontier/methods``: its search, schedule and verdict by hand, one run of each method, and a
study of seconds that resumes."""

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch

from wellposed.errors import ConfigError, ConvergenceError
from wellposed_lab.statistics import paired_comparison
from wellposed_studies.frontier import classifiers, method_runs
from wellposed_studies.frontier import methods as study
from wellposed_studies.frontier.method_data import Text, Training, read_labelled, read_text
from wellposed_studies.frontier.method_runs import rate_at, train
from wellposed_studies.frontier.method_store import Store
from wellposed_studies.frontier.training_methods import METHODS
from wellposed_studies.recipe import RECIPES, Request
from wellposed_studies.reproduce import reproduce

TINY = Training("ours", "AdamW", 1e-2, 0, steps=4, layers=1, width=16, heads=2, block=8, batch=4, warmup=1,
                decay=0.1)  # fmt: skip
STREAM = torch.arange(400) % 7
TEXT = Text(STREAM[:360], STREAM[360:], 7)


def test_the_rate_is_searched_by_half_decades_and_beyond_the_ends():
    tried = []

    def loss(rate):
        tried.append(rate)
        return abs(math.log10(rate) + 1)  # best at 0.1

    losses = study.searched([3e-4, 1e-3, 3e-3, 1e-2], loss)
    assert tried == [3e-4, 1e-3, 3e-3, 1e-2, 0.03, 0.09]
    assert [*losses] == sorted(tried)
    assert [*study.searched([1e-3], lambda rate: 0.0)] == [1e-3]


def test_a_search_that_waits_for_a_training_goes_no_further():
    losses = study.searched([1e-3, 3e-3, 1e-2], {1e-3: 2.0, 3e-3: 1.0}.get)
    assert losses == {1e-3: 2.0, 3e-3: 1.0, 1e-2: None}


def test_the_schedule_warms_up_and_ends_at_a_tenth():
    training = replace(TINY, steps=100, warmup=9)
    assert rate_at(0, training) == pytest.approx(0.1)
    assert rate_at(9, training) == 1.0
    assert rate_at(100, training) == pytest.approx(0.1)
    assert rate_at(0, replace(training, warmup=0)) == 1.0


def test_methods_read_the_same_batches_and_the_loss_is_by_hand():
    first, again = (list(TEXT.batches(TINY)) for _ in range(2))
    for name in ("input_ids", "labels"):
        assert all(torch.equal(one[name], two[name]) for one, two in zip(first, again, strict=True))
    model = method_runs.build(TINY, TEXT)
    model.eval()
    batch = first[0]
    assert torch.equal(batch["labels"][:, :-1], batch["input_ids"][:, 1:])
    logits = model(input_ids=batch["input_ids"]).logits.detach().double()
    rows = logits.log_softmax(-1)
    expected = -sum(rows[i, j, batch["labels"][i, j]] for i in range(4) for j in range(8)) / 32
    loss = TEXT.loss(model, batch).item()
    assert loss == pytest.approx(float(expected), rel=1e-5)


def tried(method, losses, by_rate=None):
    runs = [{"valid": loss, "needs_blocks": True} for loss in losses]
    return study.Tried("ours", method, by_rate or {1e-3: losses[0]}, runs, 2.0, 2.0, 0)


def test_the_verdict_needs_a_gain_over_the_better_baseline_after_holm():
    muon = tried("Muon", [1.80, 1.81, 1.82])
    same = tried("spectral cap", [1.80, 1.812, 1.819])
    better = tried("Scion", [1.70, 1.71, 1.7201])
    diverged = tried("hammer", [math.inf, 1.7, 1.7])
    tests = study.compared([same, better, diverged], muon)
    assert len(tests) == 2
    assert study.judge(tests) is True
    assert study.judge(study.compared([same, tried("x", [1.8, 1.81, 1.8201])], muon)) == "smaller"
    one = study.compared([better], muon)[0]
    assert one.p_value == paired_comparison([1.7, 1.71, 1.7201], [1.8, 1.81, 1.82]).p_value


def test_good_rates_are_counted_and_the_study_stops_without_the_level():
    item = tried("AdamW", [1.9], {1e-4: 2.3, 1e-3: 1.9, 3e-3: 1.94, 1e-2: math.inf})
    assert item.good_rates == 2
    assert item.rate == 1e-3
    study.check_level(1.89)
    for loss in (2.0, 1.8, math.nan):
        with pytest.raises(ConvergenceError, match=rf"{loss:.3f} nats on valid, expected 1\.88"):
            study.check_level(loss)


@pytest.mark.parametrize("kind", ["ours", "llama"])
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.slow
def test_every_method_trains_and_is_measured(name, kind):
    method = METHODS[name]
    if kind == "llama" and method.model:
        pytest.skip("a method of our models")
    result = train(replace(TINY, method=name, model=kind), TEXT)
    assert result["failed"] == ""
    assert result["valid"] < 3.0
    assert result["sigma_max"] > 0
    assert result["logit_max"] is not None
    if kind == "llama":
        assert result["certified"] is None


def test_the_largest_singular_value_is_that_of_the_layers():
    started = method_runs.start(replace(TINY, layers=2), TEXT)
    matrices = {
        name: weight.detach().double()
        for name, weight in started.model.named_parameters()
        if weight.ndim == 2 and ".layers." in name
    }
    with torch.no_grad():
        for name, weight in started.model.named_parameters():
            if name.endswith("token.weight"):
                weight.mul_(100.0)
    assert len(matrices) == 12
    largest = max(torch.linalg.matrix_norm(weight, 2).item() for weight in matrices.values())
    end = method_runs.at_the_end(started)
    assert end["sigma_max"] == pytest.approx(largest, rel=1e-4)


def test_the_model_of_nanogpt_is_trained_alike():
    result = train(replace(TINY, model="gpt2", steps=40), TEXT)
    assert result["failed"] == ""
    assert result["valid"] < 1.9


def test_a_training_is_kept_and_read_again(tmp_path):
    path = tmp_path / "made" / "runs.jsonl"
    result = Store(path).find_or(TINY, lambda training: train(training, TEXT))
    record = json.loads(path.read_text("utf-8"))
    assert record["training"]["method"] == "AdamW"
    assert record["result"] == result
    again = Store(path)
    assert again.find_or(TINY, lambda _: pytest.fail("it trained again")) == result
    assert again.find(replace(TINY, seed=1)) is None


def test_a_line_that_was_cut_short_is_no_result_and_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "runs.jsonl"
    Store(path).find_or(TINY, lambda _: {"valid": 1.0})
    with path.open("a") as file:
        file.write('{"training": {"mod')
    second = replace(TINY, seed=1)
    Store(path).find_or(second, lambda _: {"valid": math.inf})
    read = Store(path)
    assert read.find(TINY) == {"valid": 1.0}
    assert read.find(second) == {"valid": math.inf}
    assert len(read.results) == 2


def test_a_diverging_run_says_at_which_step():
    result = train(replace(TINY, rate=1e30, steps=8), TEXT)
    assert result["valid"] == math.inf
    assert "at step" in result["failed"]


def test_models_that_learned_nothing_earn_no_verdict():
    even = math.log(7)
    assert TEXT.constant_loss == pytest.approx(even, rel=1e-2)
    blind = tried("AdamW", [even + 0.1] * 3)
    constant, pairs = study.unfit([blind, tried("Muon", [1.0] * 3), tried("x", [9.0] * 3)], TEXT)
    assert "not judged: AdamW not better than a constant" in constant
    assert "not judged: AdamW, Muon not better than a table of pairs" in pairs
    assert study.unfit([tried("AdamW", [TEXT.pairs_loss - 0.01] * 3)], TEXT) == ()


def test_the_table_of_pairs_is_counted_by_hand_and_idle_blocks_are_named():
    text = Text(torch.tensor([0, 1, 0, 1, 0, 2]), torch.tensor([0, 1, 0]), 3)
    # After 0 came 1, 1, 2 and after 1 came 0, 0, each count increased by one.
    assert text.pairs_loss == pytest.approx(-(math.log(3 / 6) + math.log(3 / 5)) / 2)
    idle = tried("Muon", [0.0] * 3)
    idle.runs[1]["needs_blocks"] = False
    (reason,) = study.unfit([idle], text)
    assert reason == "not judged: Muon as good on train with blocks that return their inputs"
    unknown = tried("Muon", [0.0] * 3)
    for run in unknown.runs:
        run["needs_blocks"] = None
    (reason,) = study.unfit([unknown], text)
    assert reason == "not judged: no seed of Muon says whether it needs its blocks"


ROOT = Path(__file__).parents[2]


def test_the_committed_row_is_that_of_the_committed_trainings():
    folder = ROOT / "benchmarks" / "reproduction"
    trainings = {}
    for key, result in Store(folder / "frontier-methods-mini.jsonl").results.items():
        training = json.loads(key)
        if training["warmup"] and training["layers"] == 4 and training["model"] != study.NANOGPT:
            rates = trainings.setdefault((training["model"], training["method"]), {})
            rates.setdefault(training["rate"], {})[training["seed"]] = result["valid"]
    file = folder / "frontier-methods.csv"
    rows = [*csv.DictReader(file.read_text("utf-8").splitlines())]
    assert {(row["model"], row["method"]) for row in rows} == trainings.keys()
    for row in rows:
        by_rate = trainings[row["model"], row["method"]]
        best = min(by_rate, key=lambda rate: by_rate[rate][0])
        assert float(row["rate"]) == best
        assert row["by_seed"].split() == [f"{by_rate[best][n]:.4f}" for n in sorted(by_rate[best])]
        assert float(row["valid"]) == pytest.approx(fmean(by_rate[best].values()), rel=1e-12)
        assert len(row["rates"].split()) == len(by_rate)


def test_the_page_quotes_the_training_of_the_public_loss():
    page = (ROOT / "docs" / "howto" / "choose.md").read_text("utf-8")
    store = Store(ROOT / "benchmarks" / "reproduction" / "frontier-methods-mini.jsonl")
    nanogpt = study.training_of(study.sizes_of(Request("mini", ROOT)), "gpt2", "AdamW", 1e-3)
    assert f"ends at {store.find(nanogpt)['valid']:.3f} here" in page
    assert len(METHODS) == 20


def test_a_text_is_cut_at_nine_tenths(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("abcdefghij" * 300, "utf-8")
    text = read_text(str(path), None)
    assert text.vocabulary == 12  # padding and unknown characters have numbers, too
    assert len(text.train) == 9 * len(text.valid)


@pytest.mark.slow
def test_a_study_of_seconds_resumes(tmp_path, monkeypatch):
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be, that is the question. " * 100, "utf-8")
    request = Request("toy", tmp_path / "out", data=str(path))
    first = study.methods(request)
    assert first.holds is None
    assert {row["model"] for row in first.rows} == {"ours", "llama"}
    assert [row["method"] for row in first.rows if row["model"] == "llama"] == [
        "AdamW", "Muon", "Scion", "soft cap"]  # fmt: skip
    monkeypatch.setattr(study, "train", lambda *_, **__: pytest.fail("it trained again"))
    counted = ("cpu_ratio", "launches", "peak_bytes", "kept_bytes")
    assert all(row.keys() >= set(counted) for row in first.rows)
    monkeypatch.setattr(study, "cost_columns", lambda *_: dict.fromkeys(counted))
    again = study.methods(request)
    for one, two in zip(again.rows, first.rows, strict=True):
        assert one == {**two, **dict.fromkeys(counted)}


@pytest.mark.slow
def test_a_study_that_ran_out_of_time_says_so_and_goes_on(tmp_path, monkeypatch):
    path = tmp_path / "text.txt"
    path.write_text("to be or not to be, that is the question. " * 100, "utf-8")
    out = tmp_path / "out"
    clock = iter(range(10_000))
    monkeypatch.setattr(study, "monotonic", lambda: 60.0 * next(clock))
    first = reproduce("frontier/methods", scale="toy", out=out, data=str(path), minutes=3)
    methods = [row["method"] for row in first.result.rows]
    assert methods == ["AdamW", "Muon", "Scion"]
    assert {row["seeds"] for row in first.result.rows} == {1}
    assert first.result.notes[0].startswith("running: 3 trainings have ended, ")
    assert first.result.missing > 3
    assert first.result.holds is None
    assert RECIPES.get("frontier/methods").kind("mini") == "trained"
    assert first.result.size["seeds"] == 1
    assert "undecided at " in first.row()
    assert "width 16, depth 1" in first.row()
    second = reproduce("frontier/methods", scale="toy", out=out, data=str(path))
    assert len(second.result.rows) == 9
    assert second.result.missing == 0
    assert not any("running" in note for note in second.result.notes)
    with pytest.raises(ConfigError, match="reads no minutes, received minutes=3"):
        reproduce("frontier/depth", scale="toy", out=out, minutes=3)
    with pytest.raises(ConfigError, match="minutes = 0, expected a finite number > 0"):
        reproduce("frontier/methods", scale="toy", out=out, minutes=0)


LABELLED = replace(TINY, model="classifier", block=16, steps=30, warmup=3)


@pytest.fixture(scope="module")
def texts():
    return read_labelled(None, 200, 16)


def test_the_loss_of_labels_is_by_hand_and_valid_is_read_once(texts):
    started = method_runs.start(LABELLED, texts)
    started.model.eval()
    valid = list(texts.valid_batches(LABELLED))
    assert sum(len(batch["labels"]) for batch in valid) == len(texts.task.dataset("valid"))
    total = 0.0
    for batch in valid:
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        rows = started.model(**inputs).logits.detach().double().log_softmax(-1)
        total -= float(rows[torch.arange(len(rows)), batch["labels"]].sum())
    expected = total / len(texts.task.dataset("valid"))
    assert method_runs.evaluate(started) == pytest.approx(expected, rel=1e-5)
    counts = torch.bincount(torch.as_tensor(texts.task.split_labels("valid")).long()).double()
    shares = counts / counts.sum()
    assert texts.constant_loss == pytest.approx(float(-(shares * shares.log()).sum()))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.slow
def test_every_method_trains_a_classifier(name, texts):
    result = train(replace(LABELLED, method=name, steps=4), texts)
    assert result["failed"] == ""
    assert result["valid"] < 2.0
    assert result["sigma_max"] > 0


def test_a_classifier_learns():
    texts = read_labelled(None, 1500, 24)
    result = train(replace(LABELLED, block=24, batch=16, steps=200), texts)
    assert result["valid"] < 0.8 * texts.constant_loss


@pytest.mark.slow
def test_a_study_of_classifiers_resumes(tmp_path, monkeypatch):
    request = Request("toy", tmp_path / "out")
    first = classifiers.classifiers(request)
    assert first.holds is None
    assert {row["model"] for row in first.rows} == {"classifier"}
    assert len(first.rows) == 5
    assert first.size["read"] == "200 texts"
    monkeypatch.setattr(study, "train", lambda *_, **__: pytest.fail("it trained again"))
    monkeypatch.setattr(study, "cost_columns", lambda *_: {})
    classifiers.classifiers(request)
    assert (tmp_path / "out" / "frontier-classifiers-toy.jsonl").is_file()
    assert RECIPES.get("frontier/classifiers").kind("mini") == "trained"
