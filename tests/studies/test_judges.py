"""Each verdict function is fed a made-up result on either side, and says so."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from wellposed.errors import ConfigError
from wellposed.recipes.recipe import Reproduction
from wellposed_studies.huang2020 import signal, theorem_3_1, updates
from wellposed_studies.huang2020 import table_1 as huang
from wellposed_studies.kim2021 import bound_ratio, table_1_speed
from wellposed_studies.kim2021 import figures_2_7_8_bounds as bounds
from wellposed_studies.kim2021 import figures_3_5_6_10_inverse as inverse
from wellposed_studies.sengupta2023 import (
    figure_3a,
    figure_3b,
    figure_5,
    figure_6,
    figure_7,
    figures_1_4,
    table_4_speed,
    table_5_parameters,
)
from wellposed_studies.sengupta2023.trained import LABELS
from wellposed_studies.zhang2021 import theorem_2_1

NEAR = (0.0, 0.01, -0.01)
"""Three seeds that agree."""
APART = (1.0, -1.0, 0.1)
"""Three that do not."""


def seeds(value: float, spread: Sequence[float] = NEAR) -> list[float]:
    return [value + offset for offset in spread]


def two_bounds(ratio: float, checked: float = 1.0) -> list[dict[str, float]]:
    row = {
        "upper": 1.0,
        "lower": ratio,
        "lower_over_upper": ratio,
        "checked_by_autograd": checked * ratio,
    }
    return [row, row]


def lower_bounds(growth: Callable[[float], float], upper: float = 1e3) -> list[dict[str, float]]:
    return [
        {"N": n, "lower": growth(n), "upper": upper, "upper_kim": 2 * upper}
        for n in (10, 100, 1000)
    ]


def changes(
    experts: float, deeper: float, ours: float, dropout: float
) -> dict[tuple[str, str], tuple[float, float]]:
    return {
        (LABELS["transject"], "experts"): (experts, 0.1),
        (LABELS["transject"], "layers"): (ours, 0.1),
        (LABELS["post_ln"], "layers"): (deeper, 0.1),
        (LABELS["post_ln"], "dropout"): (dropout, 0.1),
    }


def by_stack(value: float, spread: Sequence[float] = NEAR) -> dict[str, list[float]]:
    return {"encoder": seeds(0.0 if value < 1 else value), "encoder-decoder": seeds(value, spread)}


def opposite(measured: float) -> list[dict[str, Any]]:
    return [
        {
            "keys": "two opposite",
            "adversarial": measured,
            "tight": 1.0,
            "measured_over_tight": measured,
        }
    ]


STEEP = {"upper": 1.0, "lower": 0.9}


def errors_at_the_end(
    tied: Sequence[float] = (1e-6, 1.0),
    dot: Sequence[float] = (9.0, 9.0),
    contractive: Sequence[float] = (1e-6,),
) -> list[dict[str, Any]]:
    found = {"tied L2": tied, "dot product": dot, "contractive L2, sharp bound": contractive}
    return [
        {"attention": kind, "max_error": error}
        for kind, errors in found.items()
        for error in errors
    ]


TRAINS, STALLS = (
    {"valid_loss": 1.0, "unigram_loss": 2.0},
    {"valid_loss": math.inf, "unigram_loss": 2.0},
)

CASES: list[tuple[Callable[..., bool | None], bool | None, tuple[Any, ...]]] = [
    (bounds.judge_figure_2, True, (two_bounds(0.9), STEEP)),
    (bounds.judge_figure_2, False, (two_bounds(0.7), STEEP)),
    (bounds.judge_figure_2, False, (two_bounds(1.1), STEEP)),
    (bounds.judge_figure_2, False, (two_bounds(0.9, checked=0.5), STEEP)),
    (bounds.judge_figure_2, False, (two_bounds(0.9), {**STEEP, "lower": 0.5})),
    (bounds.judge_figure_7, True, (lower_bounds(math.log),)),
    (bounds.judge_figure_7, False, (lower_bounds(math.sqrt),)),
    (bounds.judge_figure_7, False, (lower_bounds(math.log, upper=1.0),)),
    (inverse.judge_inverses, True, (errors_at_the_end(),)),
    (inverse.judge_inverses, True, (errors_at_the_end(contractive=()),)),
    (inverse.judge_inverses, False, (errors_at_the_end(dot=(1e-6, 9.0)),)),
    (inverse.judge_inverses, False, (errors_at_the_end(tied=(1.0, 1.0)),)),
    (inverse.judge_inverses, False, (errors_at_the_end(contractive=(1.0,)),)),
    (inverse.judge_figure_10, True, ({"dot_product": 5.0, "l2_tied": 1.0},)),
    (inverse.judge_figure_10, False, ({"dot_product": 1.5, "l2_tied": 1.0},)),
    (bound_ratio.judge_ratio, True, ([1.0, 1250.0],)),
    (bound_ratio.judge_ratio, False, ([0.9, 1250.0],)),
    (table_1_speed.judge_table_1, True, ([{"over_dot_product": 1.0}, {"over_dot_product": 1.4}],)),
    (table_1_speed.judge_table_1, False, ([{"over_dot_product": 1.0}, {"over_dot_product": 1.6}],)),
    (signal.judge_signal, True, ([1.0, 1.1], [3.0, 1e6])),
    (signal.judge_signal, False, ([1.0, 1.3], [3.0, 1e6])),
    (signal.judge_signal, False, ([1.0, 1.1], [3.0, 3.0])),
    (updates.judge_updates, True, (by_stack(0.0), by_stack(3.0))),
    (updates.judge_updates, False, (by_stack(0.3), by_stack(3.0))),
    (updates.judge_updates, False, (by_stack(0.0), by_stack(0.5))),
    (updates.judge_updates, None, (by_stack(0.0, APART), by_stack(3.0))),
    (theorem_3_1.judge_theorem_3_1, True, ([seeds(-1.0), seeds(-1.01)], [seeds(-0.5)])),
    (theorem_3_1.judge_theorem_3_1, False, ([seeds(-1.0), seeds(-0.8)], [seeds(-0.5)])),
    (theorem_3_1.judge_theorem_3_1, False, ([seeds(-1.0), seeds(-1.0)], [seeds(-1.0)])),
    (theorem_3_1.judge_theorem_3_1, None, ([seeds(-1.0, APART)], [seeds(-0.5)])),
    (huang.judge_table_1, True, ([TRAINS, TRAINS],)),
    (huang.judge_table_1, False, ([TRAINS, STALLS],)),
    (theorem_2_1.judge_theorem, True, (opposite(0.999),)),
    (theorem_2_1.judge_theorem, False, (opposite(1.1),)),
    (theorem_2_1.judge_theorem, False, (opposite(0.9),)),
    (figures_1_4.judge_figure_1, True, (seeds(2.0), seeds(1.0))),
    (figures_1_4.judge_figure_1, False, (seeds(0.6), seeds(1.0))),
    (figures_1_4.judge_figure_1, False, (seeds(2.0), seeds(3.0))),
    (figures_1_4.judge_figure_1, None, (seeds(2.0, APART), seeds(1.0))),
    (figures_1_4.judge_figure_4, True, (seeds(0.9), seeds(0.5))),
    (figures_1_4.judge_figure_4, False, (seeds(0.5), seeds(0.9))),
    (figures_1_4.judge_figure_4, None, (seeds(0.9, APART), seeds(0.5))),
    (figure_3a.judge_figure_3a, True, (seeds(1.0), seeds(4.0))),
    (figure_3a.judge_figure_3a, False, (seeds(1.0), seeds(1.2))),
    (figure_3a.judge_figure_3a, False, (seeds(1.5), seeds(4.0))),
    (figure_3a.judge_figure_3a, None, (seeds(1.0), seeds(1.5))),
    (figure_3b.judge_figure_3b, True, (seeds(-2.2), seeds(0.7))),
    (figure_3b.judge_figure_3b, False, (seeds(0.7), seeds(-2.2))),
    (figure_3b.judge_figure_3b, None, (seeds(0.0, APART), seeds(0.1))),
    (figure_5.judge_figure_5, True, ([0.1, -0.3],)),
    (figure_5.judge_figure_5, False, ([0.1, -0.4],)),
    (figure_6.judge_figure_6, True, (changes(1.0, 2.0, -0.5, -1.0),)),
    (figure_6.judge_figure_6, False, (changes(-1.0, 2.0, 0.5, -1.0),)),
    (figure_6.judge_figure_6, False, (changes(1.0, 1.0, -2.0, -1.0),)),
    (figure_6.judge_figure_6, False, (changes(1.0, 2.0, 0.5, 1.0),)),
    (figure_6.judge_figure_6, None, (changes(0.1, 2.0, 0.5, -1.0),)),
    (figure_6.judge_figure_6, None, (changes(math.nan, 2.0, 0.5, -1.0),)),
    (figure_7.judge_figure_7, True, ([0.2, 0.3], 0.25)),
    (figure_7.judge_figure_7, False, ([0.1, 0.4], 0.25)),
    (table_4_speed.judge_table_4, True, ([5.0, 10.0, 13.0, 26.0],)),
    (table_4_speed.judge_table_4, False, ([5.0, 10.0, 8.0, 26.0],)),
    (table_4_speed.judge_table_4, False, ([2.0, 4.0, 6.0, 8.0],)),
    (table_5_parameters.judge_table_5, True, ([1.0, 1.001],)),
    (table_5_parameters.judge_table_5, False, ([10.0, 1.0],)),
    (table_5_parameters.judge_table_5, None, ([],)),
]  # fmt: skip


@pytest.mark.parametrize(("judge", "verdict", "result"), CASES)
def test_a_verdict_follows_from_the_result(
    judge: Callable[..., bool | None], verdict: bool | None, result: tuple[Any, ...]
) -> None:
    assert judge(*result) is verdict


def test_every_verdict_function_is_fed_both_sides() -> None:
    modules = {inspect.getmodule(judge) for judge, _, _ in CASES}
    found = {
        (module.__name__, name)
        for module in modules
        if module is not None
        for name in vars(module)
        if name.startswith("judge_") and name != "judge_figure_8"
    }
    for verdict in (True, False):
        assert {
            (judge.__module__, judge.__name__) for judge, said, _ in CASES if said is verdict
        } == found


@pytest.mark.parametrize(
    ("alone", "helped", "tied", "holds"),
    [
        ((1.0, 2.0), (1.0, 2.0, 4.0), 1.0, True),
        ((2.0, 1.0), (1.0, 2.0, 4.0), 1.0, False),
        ((1.0, 2.0), (1.0, 2.0, 2.1), 1.0, False),
        ((1.0, 2.0), (1.0, 2.0, 4.0), 9.0, False),
    ],
)
def test_figure_8_wants_growth_of_dot_product_and_a_bound_of_l2(
    alone: tuple[float, ...], helped: tuple[float, ...], tied: float, holds: bool
) -> None:
    assert bounds.judge_figure_8(alone, helped, largest_tied=tied, bound=5.0) is holds


def test_a_verdict_without_its_test_is_refused() -> None:
    assert Reproduction([], [], "nothing", holds=None).criterion is None
    with pytest.raises(ConfigError, match="name the test in words"):
        Reproduction([], [], "nothing", holds=True)
