"""Statistics against hand-worked values and scipy."""

import math
import re

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from wellposed.errors import DataError
from wellposed_lab.statistics import (
    Failure,
    PairedComparison,
    SeedResults,
    compare_seeds,
    holm_correction,
    mean_and_standard_error,
    paired_comparison,
    worth_it,
)


def test_mean_and_standard_error_by_hand():
    # 2, 4, 4, 4, 5, 5, 7, 9: mean 5, sum of squares 32, s^2 = 32/7, error = sqrt(32/7/8)
    mean, error = mean_and_standard_error([2, 4, 4, 4, 5, 5, 7, 9])
    assert (mean, error) == (5, pytest.approx(math.sqrt(4 / 7), rel=1e-15))
    assert mean_and_standard_error([3.5]) == (3.5, None)


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_no_or_non_finite_values_are_refused(values):
    with pytest.raises(DataError, match="received"):
        mean_and_standard_error(values)


# Two degrees of freedom: p = 1 - t / sqrt(t^2 + 2); one, a Cauchy distribution: 1 - 2 arctan(t) / pi.
@pytest.mark.parametrize(
    ("values", "first", "t", "p", "verdict"),
    [
        ([3, 4, 6], [1, 2, 3], 7, 1 - 7 / math.sqrt(51), "better by 2.333 (p = 0.0198, 3 seeds)"),
        (
            [2, 4],
            [1, 2],
            3,
            1 - 2 * math.atan(3) / math.pi,
            "no significant difference (+1.5; p = ",
        ),
        ([1, 2, 3], [1, 2, 3], None, 1, "no significant difference (equal on all 3 seeds)"),
        (
            [2],
            [1],
            None,
            None,
            "no significant difference can be claimed (one seed: no test); differ",
        ),
        # All differ by 0.1 up to rounding: no evidence of a variance.
        (
            [1.1, 2.1, 3.1],
            [1, 2, 3],
            None,
            None,
            "no test: the difference is +0.1 on every one of 3",
        ),
        # Differences that cancel are zero, not rounding.
        ([0.458, 0.458], [0.470, 0.446], 0, 1, "no significant difference (+0;"),
    ],
)
def test_paired_tests_by_hand(values, first, t, p, verdict):
    test = paired_comparison(values, first)
    assert test.t_statistic == (t if t is None else pytest.approx(t, rel=1e-12))
    assert test.p_value == (p if p is None else pytest.approx(p, rel=1e-9))
    assert test.significant is (p is not None and p < 0.05)
    assert test.verdict.startswith(verdict)


@pytest.mark.parametrize("scale", [1.0, 1e-7, 1e6])
@pytest.mark.parametrize(("share", "visible"), [(5e-7, False), (7e-5, False), (2e-4, True)])
def test_a_difference_that_four_digits_do_not_show_is_none(share, visible, scale):
    gains = [share, 1.01 * share, 0.99 * share]
    test = paired_comparison([scale * (0.8 + gain) for gain in gains], [0.8 * scale] * 3)
    assert test.p_value < 0.001
    assert test.significant is visible
    assert test.verdict.startswith("better by" if visible else "no difference in 4 digits (+")


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=3, max_size=9))
def test_agrees_with_scipy(pairs):
    values, first = ([pair[k] for pair in pairs] for k in (0, 1))
    differences = [a - b for a, b in pairs]
    if max(differences) - min(differences) < 1e-6:
        return
    expected = scipy.stats.ttest_rel(values, first)
    c = paired_comparison(values, first)
    # float64 statistics of fewer than ten numbers whose spread is at least 1e-6 of their size
    assert c.t_statistic == pytest.approx(expected.statistic, rel=1e-6, abs=1e-9)
    assert c.p_value == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-9)


def test_lengths_must_agree():
    with pytest.raises(DataError, match="received 2 and 1"):
        paired_comparison([1.0, 2.0], [1.0])


def test_significance_uses_the_corrected_p_and_both_are_shown():
    one = paired_comparison([3, 4, 6], [1, 2, 3])
    corrected = holm_correction([one, one, one])
    verdict = "no significant difference (+2.333; p = 0.0198, Holm 0.0594, 3 seeds)"
    assert [test.verdict for test in corrected] == [verdict] * 3


@pytest.mark.parametrize(
    ("sign", "higher", "word"), [(1, True, "better"), (-1, True, "worse"), (-1, False, "better")]
)
def test_a_difference_far_beyond_its_spread_has_a_tiny_p_on_its_own_side(sign, higher, word):
    values = [sign * (1e6 + noise) for noise in (0.0, 1e-3, -1e-3, 2e-3)]
    c = paired_comparison(values, [0.0] * 4, higher_is_better=higher)
    expected = scipy.stats.ttest_rel(values, [0.0] * 4)
    assert c.p_value == pytest.approx(expected.pvalue, rel=1e-6)
    assert 0 < c.p_value < 1e-20
    assert c.verdict.startswith(f"{word} by 1e+06")


def slow_holm(p_values):
    """Holm (1979): each p times the number of those that are no smaller; never below that of a
    smaller one, at most 1."""
    steps = {p: p * sum(other >= p for other in p_values) for p in p_values}
    return [min(1.0, max(steps[q] for q in p_values if q <= p)) for p in p_values]


def with_p(p_value):
    t = None if p_value is None else 1.0
    return PairedComparison(3, 0.1, 0.1, t, p_value, p_value, True, "")


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1) | st.sampled_from([0.0, 0.01, 0.05, 1.0]), max_size=8))
def test_holm_agrees_with_the_slow_loop(p_values):
    """Ties included: equal p-values get the same corrected one."""
    corrected = [c.p_holm for c in holm_correction([with_p(p) for p in p_values])]
    assert corrected == pytest.approx(slow_holm(p_values), rel=1e-15)


def test_comparisons_without_a_test_take_no_part_in_the_correction():
    failed = compare_seeds(
        SeedResults("a", {0: 9.0, 1: 9.1}, {2: Failure("failed", "diverged at step 3")}),
        SeedResults("base", {0: 1.0, 1: 1.1, 2: 1.2}),
    )
    corrected = holm_correction([with_p(0.03), failed, with_p(None), with_p(0.04)])
    assert [c.p_holm for c in corrected] == [0.06, None, None, 0.06]
    assert corrected[1].verdict == "undecided: 1 of 3 seeds failed (diverged at step 3)"


def test_seeds_are_paired_by_number_not_by_place():
    variant = SeedResults("a", {2: 4.0, 0: 2.0, 1: 3.5, 7: 99.0})
    baseline = SeedResults("base", {1: 1.5, 0: 1.0, 2: 2.0})
    assert compare_seeds(variant, baseline) == paired_comparison([2.0, 3.5, 4.0], [1.0, 1.5, 2.0])
    none = compare_seeds(SeedResults("a", {7: 2.0}), baseline)
    assert (none.pairs, none.mean_difference, none.p_value) == (0, None, None)
    assert none.verdict == "undecided: no seed is shared with the baseline base"


def test_what_failed_is_counted_and_named_once():
    nan = Failure("failed", "loss is nan")
    memory = Failure("failed", "out of memory")
    stopped = Failure("cancelled", "interrupted")
    assert str(SeedResults("a", {0: 1.0}, {1: nan, 2: nan})) == "2 of 3 seeds failed (loss is nan)"
    both = SeedResults("a", {}, {1: nan, 0: memory})
    assert str(both) == "2 of 2 seeds failed (out of memory; loss is nan)"
    assert str(SeedResults("a", {}, {0: stopped})) == "1 of 1 seed did not finish (interrupted)"
    base = SeedResults("base", {}, {0: stopped})
    verdict = compare_seeds(SeedResults("a", {0: 1.0}), base).verdict
    assert verdict == "undecided: the baseline base did not finish on all seeds"


@pytest.mark.parametrize(
    ("differences", "smallest", "verdict"),
    [
        ([0.02, 0.021, 0.022], 0.01, "worth it: better by 0.021, at least 0.01 was asked (p = 0.0"),
        ([0.002, 0.003, 0.002], 0.01, "not worth it: the gain is 0.002333 and at most 0.003768, l"),
        ([-0.02, -0.021, -0.022], 0.01, "not worth it: the gain is -0.021 and at most -0.01852"),
        ([0.0, 0.0, 0.0], 0.01, "not worth it: equal on all 3 seeds"),
        ([0.02, 0.0, 0.01], 0.01, "undecided with 3 seeds: the gain is 0.01, between -0.014"),
        ([0.02, 0.02, 0.02], 0.01, "undecided with 3 seeds: no test: the difference is +0.02"),
        ([0.002, 0.0021, 0.012], 0.001, "undecided with 3 seeds: the gain is 0.005367, betw"),
        ([0.02], 0.01, "undecided: one seed has no test, so give --seeds 3 or more"),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_three_seeds_can_say_yes_no_and_neither(differences, smallest, verdict, sign):
    values = [sign * difference for difference in differences]
    test = paired_comparison(values, [0.0] * len(values), higher_is_better=sign > 0)
    assert worth_it(test, smallest).startswith(
        verdict if sign > 0 else verdict.replace("+0.02", "-0.02")
    )


def test_the_seeds_that_are_named_would_see_the_gain():
    test = paired_comparison([0.02, 0.0, 0.01], [0.0, 0.0, 0.0])
    needed = int(re.findall(r"about (\d+) seeds", worth_it(test, 0.01))[0])
    # standard deviation 0.01: the least count whose t-test sees one deviation with a chance of 0.8
    assert needed == 10
    assert "100 or more seeds" in worth_it(test, 0.001)


def test_an_answer_is_wrong_as_rarely_as_it_says(monkeypatch):
    """4,000 draws of three seeds: at most 0.025 and three standard errors of that share."""
    monkeypatch.setattr("wellposed_lab.statistics.detectable_difference", lambda *_, **__: 0.0)
    draws = np.random.default_rng(0).normal(size=(4000, 3))
    for shift, wrong in ((0.0, "worth it"), (1.0, "not worth it")):
        rows = (draws + shift).tolist()
        hits = [worth_it(paired_comparison(row, [0.0] * 3), 1.0).startswith(wrong) for row in rows]
        assert 0 < np.mean(hits) <= 0.025 + 3 * math.sqrt(0.025 / 4000)
