"""From run folders to a comparison: which runs count, in which order, and the verdicts."""

import csv
import json

import pytest
import scipy.stats
from tests.support.edited import edited
from tests.support.words import python

from wellposed.errors import DataError
from wellposed_lab.report.aggregate import aggregate
from wellposed_lab.report.page import build_report

SPLITS = ("test", "valid")
VALUES = {"post_ln": [0.40, 0.42, 0.44], "oc3:1e-4": [0.45, 0.46, 0.50]}
VALUES["ablated"] = [0.41, 0.41, 0.44]


def test_numbers_of_a_comparison(compare):
    (task,) = aggregate([compare(VALUES)]).tasks
    assert (task.task, task.metric, task.higher_is_better) == ("listops", "accuracy,test", True)
    assert [result.variant for result in task.variants] == list(VALUES)
    first, second, third = task.variants
    assert first.metrics["accuracy,test"].mean == pytest.approx(0.42)
    assert first.metrics["accuracy,test"].standard_error == pytest.approx(0.02 / 3**0.5)
    assert first.comparison is None
    assert third.comparison is not None
    expected = scipy.stats.ttest_rel(VALUES["oc3:1e-4"], VALUES["post_ln"])
    assert second.comparison.p_value == pytest.approx(expected.pvalue)
    one = scipy.stats.ttest_1samp([0.05, 0.04, 0.06], 0).confidence_interval(0.95)
    assert second.comparison.interval == pytest.approx(tuple(one))
    # two comparisons: Holm doubles the smaller p
    assert second.comparison.p_holm == pytest.approx(2 * expected.pvalue)
    assert all(result.learned for result in task.variants)


def test_the_first_variant_is_that_of_the_comparison_not_of_the_alphabet(compare):
    folder = compare(VALUES)
    for paths in (
        [folder],
        sorted(path for path in folder.iterdir() if path.is_dir()),
        sorted(folder.glob("*/seed-*")),
    ):
        assert paths[0].name != "post_ln"
        assert aggregate(paths).tasks[0].variants[0].variant == "post_ln"


def test_without_a_comparison_file_the_given_order_counts_then_the_date(
    compare, make_run, tmp_path
):
    folder = compare(VALUES)
    (folder / "compare.json").unlink()
    paths = [folder / "post_ln" / "seed-0", folder / "ablated" / "seed-0"]
    assert [r.variant for r in aggregate(paths).tasks[0].variants] == ["post_ln", "ablated"]
    make_run(tmp_path / "x" / "b", variant="b", date="2026-01-01T00:00:00+00:00")
    make_run(tmp_path / "x" / "a", variant="a", date="2026-01-02T00:00:00+00:00")
    assert [r.variant for r in aggregate([tmp_path / "x"]).tasks[0].variants] == ["b", "a"]


def test_pairs_are_runs_of_the_same_seed(compare):
    folder = compare(VALUES)
    with edited(folder / "oc3-1e-4" / "seed-2" / "result.json") as record:
        record["seed"] = 7
    (task,) = aggregate([folder]).tasks
    comparison = task.variants[1].comparison
    assert comparison.pairs == 2
    assert comparison.mean_difference == pytest.approx(0.045)
    assert task.notes == ("oc3:1e-4 is tested on the 2 seeds it shares with the first variant",)
    assert task.variants[1].seeds == (0, 1, 7)


def test_a_repeated_run_counts_once_the_newest(compare, make_run, tmp_path):
    folder = compare({"post_ln": [0.4, 0.5]})
    newer = make_run(tmp_path / "again", value=0.6, date="2026-02-01T00:00:00+00:00")
    comparison = aggregate([folder, newer])
    assert comparison.tasks[0].variants[0].metrics["accuracy,test"].values == (0.6, 0.5)
    (repeated,) = comparison.excluded
    assert (repeated.status, repeated.folder.name) == ("repeated", "seed-0")


def test_configurations_are_never_pooled(make_run, tmp_path):
    for seed in (0, 1):
        make_run(tmp_path / f"small{seed}", seed=seed, model={"hidden_size": 32})
        make_run(tmp_path / f"large{seed}", seed=seed, model={"hidden_size": 64}, value=0.5)
    names = [result.variant for result in aggregate([tmp_path]).tasks[0].variants]
    assert sorted(names) == ["post_ln (hidden_size=32)", "post_ln (hidden_size=64)"]


def test_tasks_and_data_are_kept_apart(compare, make_run, tmp_path):
    compare({"post_ln": [0.4]})
    compare({"post_ln": [2.0], "pre_ln": [3.5]}, task="char_lm")
    other = make_run(tmp_path / "other", task="char_lm", value=1.9)
    with edited(other / "result.json") as record:
        record["config"]["task_options"] = {"data": "ptb"}
    tasks = {task.task: task for task in aggregate([tmp_path]).tasks}
    assert set(tasks) == {"listops", "char_lm (data=builtin)", "char_lm (data=ptb)"}
    language = tasks["char_lm (data=builtin)"]
    assert not language.higher_is_better
    # the reference is 2.87 nats on valid: 3.5 has not learned
    assert [result.learned for result in language.variants] == [True, False]
    assert " no " in aggregate([tmp_path]).table()


def test_other_metrics_that_are_not_finite_are_left_out(compare):
    folder = compare({"post_ln": [0.4, 0.5]})
    with edited(folder / "post_ln" / "seed-0" / "result.json") as record:
        record["results"]["listops"]["loss,test"] = None
    assert "loss,test" not in aggregate([folder]).tasks[0].variants[0].metrics


def test_every_damaged_file_is_named_at_once(compare, tmp_path):
    folder = compare(VALUES)
    (folder / "post_ln" / "seed-0" / "result.json").write_text('{"schema_version": 1, "task":')
    with edited(folder / "post_ln" / "seed-1" / "result.json") as record:
        record["headline"] = "f1"
    with edited(folder / "post_ln" / "seed-2" / "result.json") as record:
        del record["variant"], record["seed"]
    for seed, results in enumerate(({}, {"listops": [1]})):
        with edited(folder / "ablated" / f"seed-{seed}" / "result.json") as record:
            record["results"] = results
    with pytest.raises(DataError) as caught:
        aggregate([folder, tmp_path / "nowhere"])
    message = str(caught.value)
    assert "seed-0/result.json: not valid JSON" in message
    assert "seed-1/result.json: results lacks the headline metric 'f1'" in message
    assert "seed-2/result.json: lacks variant, seed" in message
    assert message.count("result.json: results has no metrics of task 'listops'") == 2
    assert "nowhere: does not exist" in message


def test_table_and_csv(compare, tmp_path):
    comparison = aggregate([compare(VALUES)])
    table = comparison.table()
    parts = ("listops", "post_ln", "0.42 ± 0.012", "higher is better", "oc3:1e-4 against post_ln:")
    assert all(part in table for part in parts)
    rows = list(csv.DictReader(comparison.to_csv(tmp_path / "c.csv").read_text().splitlines()))
    (row,) = [r for r in rows if r["variant"] == "oc3:1e-4" and r["metric"] == "accuracy,test"]
    assert row["values"] == "0.45 0.46 0.5"
    assert float(row["p_holm"]) == pytest.approx(2 * float(row["p_value"]))
    assert len(comparison.records()) == len(rows) == 12


def test_aggregating_does_not_import_torch(compare):
    code = (
        "import pathlib, sys; from wellposed_lab.report.aggregate import aggregate;"
        " print(aggregate([pathlib.Path(sys.argv[1])]).table());"
        " sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    done = python(["-c", code, compare(VALUES)], check=True)
    assert "post_ln" in done.stdout


@pytest.fixture
def runs(tmp_path, make_run):
    """Write two variants with two seeds; the second has the better BLEU and has not learnt its
    targets."""
    for variant, scores, loss in (("post_ln", (20.0, 22.0), 2.0), ("oc3", (25.0, 26.0), 6.0)):
        for seed, score in enumerate(scores):
            names = {"task": "translation", "variant": variant, "seed": seed}
            folder = make_run(tmp_path / variant / f"seed-{seed}", **names)
            values = {"bleu": score, "loss": loss}
            with edited(folder / "result.json") as result:
                named = {f"{name},{split}": v for name, v in values.items() for split in SPLITS}
                result["results"]["translation"] = named
                result["headline"] = "bleu"
                result["higher_is_better"] = {"bleu": True, "loss": False, "perplexity": False}
                result["reference"] = {"loss": 5.5, "perplexity": 244.7}
    (tmp_path / "compare.json").write_text(json.dumps({"variants": ["post_ln", "oc3"]}))
    return tmp_path


@pytest.mark.slow
def test_bleu_is_the_headline_and_the_loss_says_what_learnt(runs, tmp_path):
    task = aggregate([runs]).tasks[0]
    assert (task.metric, task.higher_is_better) == ("bleu,test", True)
    assert (task.reference_metric, task.reference_value) == ("loss,valid", 5.5)
    first, second = task.variants
    assert (first.metrics["bleu,test"].mean, first.learned) == (21.0, True)
    assert (second.metrics["bleu,test"].mean, second.learned) == (25.5, False)
    assert first.metrics["bleu,test"].standard_error == pytest.approx(1.0)
    assert second.comparison.mean_difference == pytest.approx(4.5)

    page = build_report([runs], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Test BLEU: higher is better" in page
    assert "validation loss (nats) 6 is no better than the reference 5.5" in page
