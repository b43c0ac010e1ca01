"""`compare` trains each variant at every learning rate of a grid and compares it at its own best."""

import pytest
from tests.support.films import write_films

from wellposed.errors import ConfigError
from wellposed.model_options import ModelOptions
from wellposed_lab.cli.main import main
from wellposed_lab.compare.compare import compare
from wellposed_lab.compare.rates import chosen_rates
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
    out, lines = tmp_path_factory.mktemp("tuned") / "out", []
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
        read_result(out / place) for place in (f"rates/post_ln/{best:g}", "post_ln/seed-0")
    )
    assert compared.result == tried.result


def test_the_report_shows_loss_against_rate_and_counts_the_comparison_alone(tuned):
    _, out, _ = tuned
    comparison = aggregate([out])
    assert [row.variant for row in comparison.tasks[0].variants] == VARIANTS
    assert [row.seeds for row in comparison.tasks[0].variants] == [(0, 1), (0, 1)]
    page = build_report([out], out / "report.html").read_text("utf-8")
    assert "Learning rates" in page
    assert "the best of 3 on valid" in page


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
    rows = chosen_rates(["a"], [3.0, 1.0, 2.0], [_ended(*outcome) for outcome in ended])
    assert [row["rate"] for row in rows if row["chosen"]] == [best]


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
