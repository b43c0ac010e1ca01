"""`compare` trains each variant at every learning rate of a grid and compares it at its own best."""

import pytest
from tests.support.films import write_films

from wellposed.errors import ConfigError
from wellposed.model_options import ModelOptions
from wellposed_lab.cli.main import main
from wellposed_lab.compare.compare import compare
from wellposed_lab.compare.rates import (
    Search,
    chosen_rates,
    rates_beyond,
    search_of,
    shorter_run,
)
from wellposed_lab.report.aggregate import aggregate
from wellposed_lab.report.page import build_report
from wellposed_lab.training.config import RunConfig, TrainOptions
from wellposed_lab.training.folder.result import RunResult, read_result

SMALL = ModelOptions(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
OPTIONS = {"limit_chars": 9000, "seq_len": 64}
TRAIN = TrainOptions(steps=2, batch_size=16, eval_batches=1, schedule="constant")
BASE = RunConfig("char_lm", OPTIONS, model=SMALL, train=TRAIN)
VARIANTS = ["post_ln", "transject:0.5"]
RATES = [3e-2, 1e-3, 1e-2]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    out = tmp_path_factory.mktemp("tuned") / "out"
    lines = []
    settings = {"progress": False, "announce": lines.append, "learning_rates": RATES}
    return compare(BASE, VARIANTS, seeds=2, out=out, **settings), out, lines


def losses(out, folder):
    """Return the validation loss of every rate by a read of the run folders."""
    runs = [read_result(out / "rates" / folder / f"{rate:g}") for rate in RATES]
    return {
        rate: run.result["results"]["char_lm"]["loss,valid"]
        for rate, run in zip(RATES, runs, strict=True)
    }


@pytest.mark.slow
def test_each_variant_is_compared_at_the_rate_that_is_best_on_valid(tuned):
    runs, out, lines = tuned
    for name, folder, factor in (
        ("post_ln", "post_ln", 1),
        ("transject:0.5", "transject-0.5", 0.5),
    ):
        by_rate = losses(out, folder)
        best = min(by_rate, key=by_rate.get)
        used = [
            run.result["config"]["train"]["learning_rate"]
            for run in runs.results
            if run.result["variant"] == name
        ]
        assert used == [pytest.approx(factor * best)] * 2
        (line,) = [line for line in lines if line.startswith(f"{name}: learning rate")]
        assert f"{best:g}" in line
        assert ("widen" in line) is (best != 1e-2)


def test_the_run_that_chose_is_the_first_seed_of_the_comparison(tuned):
    _, out, _ = tuned
    best = min(by_rate := losses(out, "post_ln"), key=by_rate.get)
    tried, compared = (
        read_result(out / run_folder)
        for run_folder in (f"rates/post_ln/{best:g}", "post_ln/seed-0")
    )
    assert compared.result == tried.result


def test_the_report_shows_loss_against_rate_and_counts_the_comparison_alone(tuned):
    _, out, _ = tuned
    comparison = aggregate([out])
    assert [row.variant for row in comparison.tasks[0].variants] == VARIANTS
    assert [row.seeds for row in comparison.tasks[0].variants] == [(0, 1), (0, 1)]
    page = build_report([out], out / "report.html").read_text("utf-8")
    assert "Learning rates" in page
    assert "the best of 3 on valid after 2 steps" in page


def test_a_comparison_goes_on_where_it_was_stopped(tuned):
    runs, out, _ = tuned
    dates = [run.result["date"] for run in runs.results]
    settings = {"progress": False, "learning_rates": RATES, "resume": "auto"}
    again = compare(BASE, VARIANTS, seeds=2, out=out, **settings)
    assert [run.result["date"] for run in again.results] == dates


def _ended(status, value=0.5, loss=1.0):
    config = {"train": {"learning_rate": 1.0}}
    result = {"task": "t", "headline": "accuracy", "higher_is_better": {"accuracy": True}}
    result |= {"results": {"t": {"accuracy,valid": value, "loss,valid": loss}}, "config": config}
    return RunResult(status, "out", result)


@pytest.mark.parametrize(
    ("ended", "best"),
    [
        ([("success", 0.5), ("success", 0.7), ("success", 0.6)], 2.0),
        ([("success", 0.5, 1.0), ("success", 0.5, 0.9), ("failed",)], 2.0),
        ([("failed",), ("failed",), ("success", 0.1)], 3.0),
        ([("failed",), ("failed",), ("failed",)], 1.0),
    ],
)
def test_the_headline_chooses_then_the_loss_and_failures_have_none(ended, best):
    outcomes = [*zip([1.0, 2.0, 3.0], ended, strict=True)]
    rows = chosen_rates({"a": {rate: _ended(*outcome) for rate, outcome in outcomes[::-1]}})
    assert [row["rate"] for row in rows if row["chosen"]] == [best]


@pytest.mark.parametrize(
    ("options", "rates", "why"),
    [
        ({"steps": 30}, (3e-4, 1e-3, 3e-3), ""),
        ({"steps": 1, "epochs": 2.0}, (3e-4, 1e-3, 3e-3), ""),
        ({"steps": 30, "learning_rate": 0.02}, (7e-3, 0.02, 0.06), ""),
        ({"steps": 29}, None, "a third of 29 steps ranks no rates"),
        ({"steps": 90, "schedule": "kim2021", "warmup_steps": 9}, None, "kim2021 reads gamma"),
    ],
)
def test_an_automatic_search_is_about_the_rate_of_the_base_or_says_why_not(options, rates, why):
    search, reason = search_of(RunConfig("char_lm", train=TrainOptions(**options)), "auto")
    assert (search.rates if search else None) == rates
    assert why in reason
    assert bool(why) is bool(reason)


@pytest.mark.parametrize("steps", [30, 31, 100])
@pytest.mark.parametrize("schedule", ["cosine", "linear", "inverse_sqrt_warmup", "constant"])
def test_a_shorter_run_is_a_valid_one_with_the_same_shape(schedule, steps):
    for warmup in (1, steps // 10, steps - 1):
        options = TrainOptions(steps=steps, schedule=schedule, warmup_steps=warmup)
        train = shorter_run(RunConfig("char_lm", train=options), 3).train
        assert 1 <= train.warmup_steps < train.steps == -(-steps // 3)
        assert abs(train.warmup_steps - warmup / 3) <= 1


def test_a_rate_at_an_end_is_followed_until_it_is_inside_or_five_were_tried():
    def tried(*values):
        rates = (1e-3, 3e-3, 9e-3, 3e-2, 9e-2)
        return {"a": {r: _ended("success", v) for r, v in zip(rates, values, strict=False)}}

    search = Search((1e-3, 3e-3, 9e-3), 3, 5)
    assert rates_beyond(tried(0.1, 0.3, 0.2), search) == []
    assert rates_beyond(tried(0.1, 0.2, 0.3), search) == [("a", 0.03)]
    assert rates_beyond(tried(0.3, 0.2, 0.1), search) == [("a", 0.0003)]
    assert rates_beyond(tried(0.1, 0.2, 0.3, 0.4, 0.5), search) == []
    assert rates_beyond(tried(0.1, 0.2, 0.3), Search((1e-3, 3e-3, 9e-3))) == []
    failed = {"a": {1e-3: _ended("failed"), 3e-3: _ended("failed"), 9e-3: _ended("failed")}}
    assert rates_beyond(failed, search) == []


@pytest.mark.slow
def test_the_command_searches_unless_a_rate_is_given(tmp_path, capsys):
    """By default: three rates or more on a third of the steps, then whole runs at the best."""
    words = ["compare", "char_lm", "--variants", "post_ln,rezero", "--seeds", "1", "--steps", "30"]
    words += ["--model.hidden-size", "8", "--model.num-hidden-layers", "1", "--eval-batches", "1"]
    words += ["--model.num-attention-heads", "2", "--limit-chars", "9000", "--seq-len", "16"]
    assert main([*words, "--out", str(tmp_path / "auto")]) == 0
    printed = capsys.readouterr().out
    for name in ("post_ln", "rezero"):
        trials = [*(tmp_path / "auto/rates" / name).iterdir()]
        assert 3 <= len(trials) <= 5
        assert {read_result(folder).result["config"]["train"]["steps"] for folder in trials} == {10}
        assert f"{name}: learning rate" in printed
        [run] = (tmp_path / "auto" / name).iterdir()
        assert read_result(run).result["config"]["train"]["steps"] == 30
    for more in (["--learning-rate", "1e-3"], ["--learning-rates", "none"]):
        out = tmp_path / more[0]
        assert main([*words, "--out", str(out), *more]) == 0
        assert not (out / "rates").exists()


@pytest.mark.parametrize("rates", [[1e-3], [1e-3, 1e-3], [0.0, 1e-3], [float("nan"), 1e-3]])
def test_what_is_no_grid_is_refused_before_anything_trains(tmp_path, rates):
    settings = {"seeds": 1, "out": tmp_path / "out", "learning_rates": rates}
    with pytest.raises(ConfigError, match="two or more different finite"):
        compare(BASE, ["post_ln"], **settings)
    assert not (tmp_path / "out").exists()


def test_a_variant_may_not_have_the_name_of_the_folder_of_rates(tmp_path):
    with pytest.raises(ConfigError, match="folder of the runs that choose"):
        compare(BASE, ["rates"], seeds=1, out=tmp_path)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--learning-rates", "1e-3;1e-2"], "joined by commas"),
        (["--learning-rates", "1e-3,1e-2", "--learning-rate", "0.5"], "give one of them"),
        (
            ["--learning-rates", "1e-3,1e-2", "--schedule", "kim2021", "--warmup-steps", "4"],
            "gamma",
        ),
    ],
)
def test_the_command_refuses_by_name(tmp_path, capsys, words, what):
    data = ["--data", str(write_films(tmp_path / "f.tsv")), "--out", str(tmp_path / "out")]
    assert main(["compare", "text_classification", *data, *words]) == 2
    assert what in capsys.readouterr().err
