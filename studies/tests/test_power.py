"""Smallest effect that a verdict can detect: against scipy's distribution, a simulation, by hand."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import nct, t

from wellposed.errors import DataError
from wellposed_lab.statistics import detectable_difference
from wellposed_studies.recipe import RECIPES, Request
from wellposed_studies.verdicts import Power


@pytest.mark.parametrize("pairs", [2, 3, 5, 10, 40])
@pytest.mark.parametrize("level", [0.05, 0.05 / 3])
def test_the_power_at_the_difference_is_that_of_the_noncentral_t(pairs, level):
    shift = detectable_difference(2.0, pairs, level=level) / 2.0 * math.sqrt(pairs)
    critical = t.isf(level / 2, pairs - 1)
    assert nct.sf(critical, pairs - 1, shift) == pytest.approx(0.8, abs=1e-3), (
        "the other side has hardly any share"
    )


def test_a_rule_in_standard_errors_sees_it_as_often():
    rng = np.random.default_rng(1)
    shift = detectable_difference(1.0, 3, critical=2.0)
    drawn = rng.normal(shift, 1.0, (20_000, 3))
    detected = np.abs(drawn.mean(1)) > 2 * drawn.std(1, ddof=1) / math.sqrt(3)
    assert detected.mean() == pytest.approx(0.8, abs=0.015)
    assert shift < detectable_difference(1.0, 3)


@pytest.mark.parametrize(
    ("deviation", "pairs"), [(1.0, 1), (-1.0, 3), (math.nan, 3), (math.inf, 3)]
)
def test_bad_input(deviation, pairs):
    with pytest.raises(DataError, match="expected pairs >= 2 and a deviation >= 0"):
        detectable_difference(deviation, pairs)


def test_every_recipe_that_trains_states_its_power_at_every_scale(tmp_path):
    trains = [name for name in RECIPES if RECIPES.get(name).power is not None]
    assert len(trains) >= 30
    for name in trains:
        power = RECIPES.get(name).power
        assert power is not None
        for scale in ("mini", "medium"):
            plan = power(Request(scale, tmp_path))
            assert plan["seeds"] >= 1
            assert (plan["smallest_seen"] is None) == (plan["seeds"] == 1)
            assert plan["words"]
            assert (power.deviation is None) == (power.quantity == "" and power.source == "")


def test_what_every_seed_has_to_agree_on():
    power = Power(lambda request: 4)
    plan = power(Request("mini", Path()))
    assert (1 - plan["smallest_seen"]) ** 4 == pytest.approx(0.2)
    assert (
        "one training of each kind"
        in replace(power, seeds=lambda request: 1)(Request("mini", Path()))["words"]
    )
