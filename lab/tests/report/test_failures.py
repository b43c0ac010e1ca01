"""Failed runs are part of the verdict: the baseline stays the baseline, and survivors are never
called better."""

import json

import pytest
from tests.support.edited import edited

from wellposed_lab.report.aggregate import aggregate
from wellposed_lab.report.page import build_report

BETTER = {"post_ln": [0.40, 0.41, 0.42], "rezero": [0.50, 0.52, 0.53], "pre_ln": [0.45, 0.46, 0.48]}
DIVERGED = "step 40: loss is nan; first at model.layers.0: 3 NaN; lower the learning rate"


def fail(folder, variant, seed, *, status="failed", reason=DIVERGED):
    """Turn a finished run into one that ended as the training loop writes it."""
    with edited(folder / variant / f"seed-{seed}" / "result.json") as record:
        record["results"] = {record["task"]: {}}
        record["train_info"] |= {"status": status, "reason": reason}
        if reason == DIVERGED:
            record["failure"] = {
                "step": 40, "learning_rate": 1e-3, "what": "loss is nan", "layer": "model.layers.0", "reason": "3 NaN",
            }  # fmt: skip


def comparison_of(aggregated, variant):
    (result,) = (r for r in aggregated.tasks[0].variants if r.variant == variant)
    assert result.comparison is not None
    return result.comparison


def test_a_baseline_that_failed_on_every_seed_stays_the_baseline(compare, tmp_path):
    folder = compare(BETTER)
    for seed in range(3):
        fail(folder, "post_ln", seed)
    aggregated = aggregate([folder])
    (task,) = aggregated.tasks
    assert [result.variant for result in task.variants] == ["post_ln", "rezero", "pre_ln"]
    base = task.variants[0]
    assert (base.seeds, base.failed, base.comparison) == ((), (0, 1, 2), None)
    expected = "undecided: the baseline post_ln failed on all seeds"
    for variant in ("rezero", "pre_ln"):
        test = comparison_of(aggregated, variant)
        assert test.verdict == expected
        assert (test.pairs, test.significant) == (0, False)
        assert {test.mean_difference, test.p_value, test.p_holm} == {None}
        assert f"{variant} against post_ln: {expected}" in aggregated.table()
    assert "0 of 3" in aggregated.table()
    headline = [record for record in aggregated.records() if record["metric"] == task.metric]
    columns = [[record[n] for n in ("seeds", "failed", "mean", "verdict")] for record in headline]
    assert columns[0] == [0, 3, None, None]
    assert [verdict for *_, verdict in columns[1:]] == [expected] * 2
    page = build_report([folder], tmp_path / "report.html").read_text()
    assert page.count(f">{expected}</td>") == 2
    assert "By test accuracy, rezero, pre_ln: undecided." in page
    assert "Every variant learned" not in page
    assert "0 of 3" in page
    assert "diverged" not in page.split("Not counted</h2>")[0]
    assert "loss is nan; first at model.layers.0" in page.split("Not counted</h2>")[1]


def test_a_variant_with_one_failed_seed_is_never_better(compare, tmp_path):
    folder = compare(BETTER)
    assert comparison_of(aggregate([folder]), "rezero").verdict.startswith("better by ")
    fail(folder, "rezero", 2)
    aggregated = aggregate([folder])
    test = comparison_of(aggregated, "rezero")
    expected = "undecided: 1 of 3 seeds failed (diverged at step 40: loss is nan)"
    assert test.verdict == expected
    assert (test.pairs, test.p_value, test.p_holm, test.significant) == (2, None, None, False)
    assert test.mean_difference == pytest.approx(0.105)
    assert "2 of 3" in aggregated.table()
    assert f"rezero against post_ln: {expected}" in aggregated.table()
    # the other variant is tested, and alone: nothing to correct for
    other = comparison_of(aggregated, "pre_ln")
    assert other.p_value == other.p_holm
    assert other.verdict.startswith("better by ")
    page = build_report([folder], tmp_path / "report.html").read_text()
    assert f">{expected}</td>" in page
    assert "By test accuracy, pre_ln: better than post_ln; rezero: undecided." in page


def test_a_failed_seed_of_the_baseline_leaves_no_verdict_on_anyone(compare):
    folder = compare(BETTER)
    fail(folder, "post_ln", 1)
    fail(folder, "rezero", 1)
    aggregated = aggregate([folder])
    base = "the baseline post_ln: 1 of 3 seeds failed (diverged at step 40: loss is nan)"
    assert comparison_of(aggregated, "pre_ln").verdict == f"undecided: {base}"
    one = "1 of 3 seeds failed (diverged at step 40: loss is nan)"
    assert comparison_of(aggregated, "rezero").verdict == f"undecided: {one}; {base}"


@pytest.mark.parametrize(
    ("status", "reason", "ended"),
    [
        ("failed", "loss is nan", "failed"),
        ("cancelled", "interrupted after step 7", "did not finish"),
        ("unfinished", "no result.json: still running, or killed", "did not finish"),
    ],
)
def test_runs_that_did_not_succeed_are_listed_never_averaged_and_leave_no_verdict(
    compare, status, reason, ended
):
    folder = compare(BETTER)
    if status == "unfinished":
        (folder / "rezero" / "seed-0" / "result.json").unlink()
    else:
        fail(folder, "rezero", 0, status=status, reason=reason)
    aggregated = aggregate([folder])
    expected = f"undecided: 1 of 3 seeds {ended} ({reason}"
    assert comparison_of(aggregated, "rezero").verdict.startswith(expected)
    (run,) = aggregated.excluded
    assert (run.variant, run.seed, run.status) == ("rezero", "0", status)
    assert run.reason.startswith(reason)
    assert reason in aggregated.table()
    rezero = aggregated.tasks[0].variants[1]
    assert rezero.seeds == (1, 2)
    assert rezero.metrics["accuracy,test"].mean == pytest.approx(0.525)


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_a_run_without_a_finite_headline_has_failed(compare, bad):
    folder = compare(BETTER)
    with edited(folder / "rezero" / "seed-1" / "result.json") as record:
        record["results"]["listops"]["accuracy,test"] = bad
    aggregated = aggregate([folder])
    (run,) = aggregated.excluded
    assert (run.seed, run.status) == ("1", "failed")
    assert run.reason == f"the headline metric is not a finite number: accuracy,test = {bad}"
    verdict = comparison_of(aggregated, "rezero").verdict
    assert verdict == f"undecided: 1 of 3 seeds failed ({run.reason})"
    rezero = aggregated.tasks[0].variants[1]
    assert (rezero.seeds, rezero.failed) == ((0, 2), (1,))


def test_where_everything_failed_that_is_said(compare, tmp_path):
    folder = compare({"post_ln": [0.4], "rezero": [0.5]})
    for variant in ("post_ln", "rezero"):
        fail(folder, variant, 0)
    aggregated = aggregate([folder])
    expected = "listops: no verdict: no run of it finished"
    assert aggregated.tasks == ()
    assert expected in aggregated.table()
    page = build_report([folder], tmp_path / "report.html").read_text()
    assert expected in page
    assert "0 finished runs" in page
    assert "<svg" not in page


def test_a_run_that_was_repeated_with_success_has_not_failed(compare, make_run, tmp_path):
    folder = compare(BETTER)
    fail(folder, "rezero", 2)
    mended = {"variant": "rezero", "seed": 2, "value": 0.53}
    again = make_run(tmp_path / "again", **mended, date="2026-02-01T00:00:00+00:00")
    aggregated = aggregate([folder, again])
    assert comparison_of(aggregated, "rezero").verdict.startswith("better by ")
    assert [run.status for run in aggregated.excluded] == ["failed"]
    # a newer run that diverged is what this configuration does now; one that was only stopped says
    # nothing
    for status, failed in (("failed", (2,)), ("cancelled", ())):
        with edited(again / "result.json") as record:
            record["train_info"] |= {"status": status, "reason": "as told"}
        fixed = json.loads((folder / "rezero" / "seed-0" / "result.json").read_text()) | {"seed": 2}
        fixed["config"]["train"]["seed"] = 2
        (folder / "rezero" / "seed-2" / "result.json").write_text(json.dumps(fixed))
        variants = {r.variant: r for r in aggregate([folder, again]).tasks[0].variants}
        assert variants["rezero"].failed == failed
