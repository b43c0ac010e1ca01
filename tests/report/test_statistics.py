"""Statistics against hand-worked values and scipy."""

from __future__ import annotations

import math

import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from wellposed.errors import DataError
from wellposed.report.statistics import holm_correction, mean_and_standard_error, paired_comparison


def test_mean_and_standard_error_by_hand() -> None:
    # 2, 4, 4, 4, 5, 5, 7, 9: mean 5, sum of squares 32, s^2 = 32/7, error = sqrt(32/7/8)
    mean, error = mean_and_standard_error([2, 4, 4, 4, 5, 5, 7, 9])
    assert mean == 5
    assert error == pytest.approx(math.sqrt(4 / 7), rel=1e-15)


def test_one_value_has_no_standard_error() -> None:
    assert mean_and_standard_error([3.5]) == (3.5, None)


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_no_or_non_finite_values_are_refused(values: list[float]) -> None:
    with pytest.raises(DataError, match="received"):
        mean_and_standard_error(values)


def test_paired_test_by_hand() -> None:
    # differences 2, 2, 3: mean 7/3, s = 1/sqrt 3, error = 1/3, t = 7; two-sided p for 2 degrees = 1 - t/sqrt(t^2 + 2)
    c = paired_comparison([3, 4, 6], [1, 2, 3])
    assert c.t_statistic == pytest.approx(7, rel=1e-12)
    assert c.p_value == pytest.approx(1 - 7 / math.sqrt(51), rel=1e-9)
    assert c.verdict == "better by 2.333 (p = 0.0198, 3 seeds)"


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=3, max_size=9))
def test_agrees_with_scipy(pairs: list[tuple[float, float]]) -> None:
    values, first = ([pair[k] for pair in pairs] for k in (0, 1))
    differences = [a - b for a, b in pairs]
    if max(differences) - min(differences) < 1e-6:
        return
    expected = scipy.stats.ttest_rel(values, first)
    c = paired_comparison(values, first)
    # float64 statistics of fewer than ten numbers whose spread is at least 1e-6 of their size
    assert c.t_statistic == pytest.approx(expected.statistic, rel=1e-6, abs=1e-9)
    assert c.p_value == pytest.approx(expected.pvalue, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("higher", "word"), [(True, "better"), (False, "worse")])
def test_direction_follows_the_metric(higher: bool, word: str) -> None:
    assert paired_comparison([3, 4, 6], [1, 2, 3], higher_is_better=higher).verdict.startswith(f"{word} by 2.333")


def test_no_significant_difference_is_said() -> None:
    c = paired_comparison([1.0, 2.0, 3.0], [1.1, 1.8, 3.05])
    assert c.p_value is not None
    assert c.p_value > 0.05
    assert not c.significant
    assert c.verdict.startswith("no significant difference (")


def test_one_seed_has_no_test() -> None:
    c = paired_comparison([2.0], [1.0])
    assert c.p_value is None
    assert c.standard_error is None
    assert not c.significant
    assert c.verdict == "no significant difference can be claimed (one seed: no test); difference +1"


def test_equal_pairs_give_p_one() -> None:
    c = paired_comparison([0.1, 0.2, 0.3], [0.1, 0.2, 0.3])
    assert (c.p_value, c.t_statistic, c.significant) == (1.0, None, False)
    assert c.verdict == "no significant difference (equal on all 3 seeds)"


def test_equal_non_zero_differences_are_no_evidence_of_a_variance() -> None:
    c = paired_comparison([1.1, 2.1, 3.1], [1.0, 2.0, 3.0])  # all differ by 0.1 up to rounding
    assert c.p_value is None
    assert not c.significant
    assert c.verdict.startswith("no test: the difference is +0.1 on every one of 3 seeds")


def test_lengths_must_agree() -> None:
    with pytest.raises(DataError, match="received 2 and 1"):
        paired_comparison([1.0, 2.0], [1.0])


def test_holm_by_hand() -> None:
    # Holm (1979): 0.01 x 3, 0.02 x 2, 0.04 x 1, made monotone and capped at 1
    c = paired_comparison([3, 4, 6], [1, 2, 3])
    from dataclasses import replace

    for given_p, expected in [
        ((0.04, 0.01, 0.02), (0.04, 0.03, 0.04)),
        ((0.02, 0.5, 0.9), (0.06, 1.0, 1.0)),
        ((0.04, None), (0.04, None)),
    ]:
        corrected = holm_correction([replace(c, p_value=p) for p in given_p])
        assert [k.p_holm for k in corrected] == pytest.approx(expected)


def test_significance_uses_the_corrected_p_and_both_are_shown() -> None:
    one = paired_comparison([3, 4, 6], [1, 2, 3])
    corrected = holm_correction([one, one, one])
    assert corrected[0].p_value == pytest.approx(0.0198, abs=1e-4)
    assert corrected[0].p_holm == pytest.approx(0.0594, abs=1e-4)
    assert corrected[0].verdict == "no significant difference (+2.333; p = 0.0198, Holm 0.0594, 3 seeds)"


def test_differences_that_cancel_are_zero_not_rounding() -> None:
    found = paired_comparison([0.458, 0.458], [0.470, 0.446])
    assert found.mean_difference == 0.0
    assert found.p_value == pytest.approx(1.0)
    assert "+0;" in found.verdict
