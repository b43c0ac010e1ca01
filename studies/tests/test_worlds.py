"""Every judge in four made-up worlds: the effect of its claim is absent, as printed, reversed, or 2.5
times as large. It answers differently wherever the claim does."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from studies.tests.test_frontier_accuracy import evidence
from studies.tests.test_judges import (
    BY_THOUGHT,
    UNDECIDABLE,
    VERDICTS,
    against_baseline,
    by_stack,
    changes,
    drift,
    errors_at_the_end,
    factors,
    images,
    lower_bounds,
    opposite,
    seeds,
    slopes,
    tight,
    translated,
    two_bounds,
)
from studies.tests.test_verdicts import PAPERS

from wellposed_lab.statistics import paired_comparison
from wellposed_studies.frontier import characters
from wellposed_studies.frontier import rates as loss_by_rate
from wellposed_studies.kim2021 import costs
from wellposed_studies.mcgrath2024 import scores as mcgrath
from wellposed_studies.recipe import RECIPES
from wellposed_studies.sengupta2023 import tables
from wellposed_studies.sengupta2023.trained import LABELS, VARIANTS

SMALLER = "smaller"
MUCH = 2.5


class Worlds(NamedTuple):
    """Arguments of a judge in each world, and its answers; the answer as printed is True."""

    absent: Sequence[Any]
    printed: Sequence[Any]
    reversed: Sequence[Any]
    larger: Sequence[Any]
    answers: Sequence[Any] = (False, False, True)
    """If the effect is absent, reversed and larger. A claim with a size is False if larger."""


SIZED = (False, False, False)
"""Answers of a claim with a size of its own: other sizes are against it."""
NONE_OF_IT = (SMALLER, False, True)
"""Answers of a claim of a gain, if seeds are sure that there is none."""


def of_effect(made, size=1.0, answers=(False, False, True)):
    """Return the worlds of an effect that is a number, the printed one being ``size``."""
    worlds = [made(share * size) for share in (0.0, 1.0, -1.0, MUCH)]
    return Worlds(*worlds, answers=answers)


def near(value):
    """Three seeds that differ by a millionth."""
    return [value + off for off in (0.0, 1e-6, -1e-6)]


def language_models(tying=0.052, columns=0.0, l2=0.002, contraction=0.5, ends=0.011, spread=0.9):
    """NLL of 1 and 14 layers: L2 beside dot product, tying, what columns give back, contraction."""
    plain = 0.9
    tied = plain + l2 + tying
    at_best = {"lstm": plain + 0.06, "dot_product": plain, "l2": plain + l2, "l2_tied": tied}
    at_best["l2_tied_wide"] = tied - columns
    losses = {kind: {1: near(value), 14: near(value)} for kind, value in at_best.items()}
    losses["l2_tied"] = {depth: values[::-1] for depth, values in losses["l2_tied"].items()}
    losses[PAPERS] = {1: near(tied + contraction), 14: near(tied + ends)}
    return losses, 2.5


def similar(difference):
    losses, pairs = language_models(l2=0.0, tying=difference, ends=0.0)
    return losses, pairs


def depths(plain, tied):
    """Share of seeds that train at 8 and 18 layers, of dot product and of tied L2."""
    return ({"dot_product": dict(zip((8, 18), plain, strict=True)), "l2_tied": {18: tied}},)


def against(gain):
    """Return the test of a gain; seeds of either side differ by a millionth."""
    return paired_comparison(
        [0.5 + gain, 0.500001 + gain, 0.499999 + gain], [0.5, 0.500002, 0.499997]
    )


def of_places(gain):
    signs = {"key": 1, "query": 1, "key+query": -mcgrath.LEAST_LOSS / mcgrath.LEAST}
    return ({one_column: against(sign * gain) for one_column, sign in signs.items()},)


def scored(gain, column="imdb"):
    """Scores of TransJect above (or perplexities below) those of three alike Transformers."""
    printed = tables.printed_scores(column)
    rises = printed["transject"] > printed["post_ln"]
    test = {variant: [70.0, 70.1, 70.3] for variant in VARIANTS}
    test["transject"] = [value + (gain if rises else -gain) for value in (70.0, 70.101, 70.299)]
    return test, "transject", printed


def by_rate(gain):
    sensitivity = against(-gain)
    return ([(sensitivity, against(0.0))] * 2,)


def capped(gain):
    plain = {"sensitivity": [0.5, 0.51, 0.49], "best": [2.5, 2.51, 2.49]}
    ours = {
        "sensitivity": [value - gain for value in (0.5, 0.5101, 0.4899)],
        "best": [2.5001, 2.51, 2.49],
    }
    return ([loss_by_rate.paired(ours, plain)] * 2,)


def beside_the_baseline(gain):
    return ([against_baseline(-gain), against_baseline(-gain / 2)],)


def rivals(gain):
    return ([[characters.Rivalry(near(gain), [near(gain)] * 5)]],)


def experts(gain):
    return changes(gain, 2 * gain, -gain / 2, -gain), LABELS["post_ln"]


COSTS = of_effect(lambda tying: language_models(tying=tying), 0.052, (SMALLER, False, False))
TRAINS = Worlds(
    depths((1, 1), 1), depths((1, 0), 1), depths((1, 1), 0), depths((0, 0), 1), (False, False, None)
)
INVERSES = Worlds(
    (errors_at_the_end(dot=(1e-6, 9.0)),),
    (errors_at_the_end(),),
    (errors_at_the_end(tied=(9.0,), dot=(1e-6,)),),
    (errors_at_the_end(dot=(22.0, 22.0)),),
)
BLEU = of_effect(translated, 1.0, (SMALLER, False, True))
ORDERED = of_effect(lambda order: ([seeds(2 * order)], [0.5]), 1.0, SIZED)
SCORES = of_effect(scored, 6.8, NONE_OF_IT)
WORLDS = {
    "huang2020/depth": Worlds(
        ([True, True], [True, True]), ([True, True], [False, False]),
        ([False, False], [True, True]), ([True, True], [False, False]),
    ),
    "huang2020/signal": Worlds(
        ([1.0, 1.1], [1.0, 1.1]), ([1.0, 1.1], [3.0, 1e6]), ([3.0, 1e6], [1.0, 1.1]), ([1.0, 1.1], [3.0, 1e15])
    ),
    "huang2020/updates": Worlds(
        (by_stack(0.0), by_stack(0.0)), (by_stack(0.0), by_stack(3.0)),
        (by_stack(3.0), by_stack(0.0)), (by_stack(0.0), by_stack(3.0 * MUCH)),
    ),
    "huang2020/theorem-3.1": of_effect(lambda power: ([seeds(-power)], [seeds(-power / 2)]), 1.0, SIZED),
    "huang2020/gradients": Worlds(
        ([seeds(1.0)],), ([seeds(0.0)],), ([seeds(3.0)],), ([seeds(MUCH)],), SIZED
    ),
    "kim2021/lemma-f.2": Worlds(
        ([0.1], [0.1]), ([0.999, 1.0], [1.0]), ([1.1], [1.0]), ([MUCH], [1.0]), (None, False, False)
    ),
    "kim2021/figure-2": Worlds(
        (two_bounds(0.9), {"upper": 1.0, "lower": 0.0}), (two_bounds(0.9), {"upper": 1.0, "lower": 0.97}),
        (two_bounds(1.1), {"upper": 1.0, "lower": 1.1}), (two_bounds(0.9), {"upper": 1.0, "lower": MUCH}), SIZED,
    ),
    "kim2021/bound-ratio": Worlds(([0.9],), ([1.0, 1250.0],), ([0.001],), ([1.0, 3125.0],)),
    "kim2021/theorem-3.1": ORDERED,
    "kim2021/lemma-f.1": ORDERED,
    "kim2021/theorem-3.2": Worlds(([1.01],), ([0.2, 0.9],), ([1.1],), ([0.9 * MUCH],), SIZED),
    "kim2021/masking": ORDERED,
    "kim2021/figure-3": INVERSES,
    "kim2021/figure-5": INVERSES,
    "kim2021/figure-6": INVERSES,
    "kim2021/contraction": Worlds(
        language_models(contraction=0.0, ends=0.0), language_models(),
        language_models(contraction=-0.2, ends=-0.1), language_models(contraction=0.5 * MUCH),
    ),
    "kim2021/figure-4": COSTS,
    "kim2021/table-2": COSTS,
    "kim2021/figure-7": Worlds(
        (lower_bounds(lambda n: math.sqrt(n)),), (lower_bounds(math.log),),
        (lower_bounds(lambda n: -math.sqrt(n)),), (lower_bounds(lambda n: n**MUCH),), SIZED,
    ),
    "kim2021/figure-8": Worlds(
        ([1.0], [5.0], [9.0]), ([1.0], [5.0], [math.inf]), ([6.0], [5.0], [math.inf]),
        ([1.0], [5.0], [math.inf]), (False, False, None),
    ),
    "kim2021/figure-9": Worlds(
        language_models(tying=0.0), language_models(), language_models(columns=0.052),
        language_models(tying=0.052 * MUCH), (SMALLER, False, True),
    ),
    "kim2021/figure-10": Worlds(
        ([[1.0, 1.0]] * 2, [[1.0, 1.0]] * 2), ([[0.9, 1.1]] * 2, [[3.0, 3.0]] * 2),
        ([[3.0, 3.0]] * 2, [[0.9, 1.1]] * 2), ([[MUCH, MUCH]] * 2, [[7.5, 7.5]] * 2), SIZED,
    ),
    "kim2021/figure-11": TRAINS,
    "kim2021/table-1": Worlds(
        ([{"over_dot_product": 1.6}],), ([{"over_dot_product": 1.15}, {"over_dot_product": 0.98}],),
        ([{"over_dot_product": 0.4}],), ([{"over_dot_product": MUCH}],), SIZED,
    ),
    "kim2021/table-3": Worlds(
        similar(0.5), similar(0.01), similar(-0.5), similar(0.05 * MUCH), SIZED
    ),
    "mcgrath2024/figure-1": of_effect(lambda gain: ([against(gain)] * 2,), mcgrath.LEAST, NONE_OF_IT),
    "mcgrath2024/table-1": of_effect(of_places, mcgrath.LEAST, NONE_OF_IT),
    "mcgrath2024/figure-3": Worlds(
        (drift(1.0),), (drift(0.9),), (drift(1.1),), (drift(0.75),), (None, False, True)
    ),
    "mcgrath2024/pretrained": Worlds(
        ([None, SMALLER, False],), ([True, True, True],), ([False] * 3,), ([True, True, True],),
        (None, False, True),
    ),
    "mcgrath2024/qr": Worlds(
        ([[tight(1.0)]],), ([[tight(0.3)]],), ([[tight(1.5)]],), ([[tight(0.0)]],)
    ),
    "mcgrath2024/equation-3": Worlds(
        ([[0.5], [1.0]],), ([[1.0], [1.0]],), ([[1.0], [0.0]],), ([[1.0], [1.0]],), (None, False, True)
    ),
    "sengupta2023/figure-1": Worlds(
        (tight(1.0), tight(1.0)), (tight(2.0), tight(1.0)), (tight(0.5), tight(1.0)), (tight(5.0), tight(1.0))
    ),
    "sengupta2023/theorem-1": Worlds(([1e-3],), ([1e-15],), ([2.0],), ([MUCH * 1e-3],), SIZED),
    "sengupta2023/distances": Worlds(
        ([0.7], [1.0]), ([0.95], [1.05]), ([0.2, 0.4], [1.0, 1.0]), ([0.95 / MUCH], [1.05 * MUCH]),
        (None, False, False),
    ),
    "sengupta2023/lemma-1": Worlds(
        (factors(-0.01),), (factors(0.2),), (factors(-0.1),), (factors(0.5),)
    ),
    "sengupta2023/corollary-1": Worlds(
        (images(0.001, 0.0),), (images(0.8, 0.0),), (images(0.001, 1.0),), (images(2.0, 0.0),),
        (None, False, True),
    ),
    "sengupta2023/theorem-2": Worlds(
        (slopes(55.0, 90.0),), (slopes(2.0, 50.0),), (slopes(410.0, 900.0),), (slopes(1000.0, 2000.0),),
        (None, False, False),
    ),
    "sengupta2023/table-1": SCORES,
    "sengupta2023/table-2": SCORES,
    "sengupta2023/table-3": of_effect(lambda gain: scored(gain, "ptb-words"), 20.2, NONE_OF_IT),
    "sengupta2023/table-4": Worlds(
        ([1.0] * 4,), ([5.0, 9.6, 12.8, 26.3],), ([0.2, 0.1, 0.08, 0.04],), ([12.5, 24.0, 32.0, 65.7],)
    ),
    "sengupta2023/table-5": Worlds(([10.0],), ([1.0, 1.001],), ([0.1],), ([MUCH],), SIZED),
    "sengupta2023/figure-3a": Worlds(
        (tight(1.0), tight(1.0)), (tight(1.0), tight(4.0)), (tight(4.0), tight(1.0)), (tight(MUCH), tight(10.0)),
        SIZED,
    ),
    "sengupta2023/figure-4": Worlds(
        (tight(0.5)[::-1], tight(0.5), tight(0.5), tight(0.4)), (tight(0.9), tight(0.5), tight(0.7), tight(0.4)),
        (tight(0.5), tight(0.9), tight(0.7), tight(0.4)), (tight(0.99), tight(0.1), tight(0.2), tight(0.4)),
        (None, False, True),
    ),
    "sengupta2023/figure-5": Worlds(
        ([0.0],), ([0.1, -0.3],), ([0.1, -0.4],), ([0.3 * MUCH],), (None, False, False)
    ),
    "sengupta2023/figure-6": of_effect(experts, 1.0, (None, False, True)),
    "sengupta2023/figure-7": Worlds(
        ([0.25, 0.25], 0.25, [0.0]), ([0.2, 0.3], 0.25, [0.2]), ([0.1, 0.4], 0.25, [0.2]),
        ([0.05, 0.25 * MUCH], 0.25, [0.2]), (None, False, False),
    ),
    "zhang2021/affinity": Worlds(
        ([[0.001, 0.2]],), ([[0.001], [0.002]],), ([[0.2, 0.3]],), ([[MUCH]],), (None, False, False)
    ),
    "zhang2021/theorem-2.1": Worlds((opposite(0.1),), (opposite(0.999),), (opposite(1.1),), (opposite(MUCH),), SIZED),
    "zhang2021/table-1": BLEU,
    "zhang2021/table-2": BLEU,
    "zhang2021/table-3": BLEU,
    "zhang2021/table-4": BLEU,
    "frontier/accuracy": Worlds(
        ([evidence("imdb"), evidence(accuracy=[0.77, 0.781, 0.774])],), ([evidence("imdb"), evidence()],),
        ([evidence("imdb"), evidence(fallen=1)],), ([evidence("imdb"), evidence(certified=(0.95, 0.95, 0.951))],),
    ),
    "frontier/depth": Worlds(
        ([2], (2, 8), 0.9), ([2, 8], (2, 8), 0.9), ([], (2, 8), 0.9), ([2, 8], (2, 8), 0.9 * MUCH), SIZED
    ),
    "frontier/characters": of_effect(rivals, 0.1, (None, False, True)),
    "frontier/order": of_effect(lambda gain: ([[near(gain)]] * 2,), 0.2),
    "frontier/words": of_effect(lambda gain: ({0: [gain, gain + 1e-4, gain - 2e-4], 1: []},), 0.1, (None, False, True)),
    "frontier/rates": of_effect(capped, 0.3, NONE_OF_IT),
    "frontier/methods": of_effect(beside_the_baseline, 0.1, NONE_OF_IT),
    "frontier/classifiers": of_effect(beside_the_baseline, 0.1, NONE_OF_IT),
    "frontier/translation": Worlds((near(-2.0),), (near(0.0),), (near(-5.0),), (near(2.0),)),
}  # fmt: skip


@pytest.mark.parametrize("name", WORLDS)
def test_a_judge_answers_differently_where_its_claim_does(name):
    judge, _, _, read, options = VERDICTS[name]
    worlds = WORLDS[name]
    absent, printed, reversed_, larger = (read(judge(*world, **options)) for world in worlds[:4])
    assert printed is (None if name in BY_THOUGHT else True)
    assert (absent, reversed_, larger) == tuple(worlds.answers)
    assert reversed_ is False
    assert absent is not True


def test_every_judge_has_its_worlds():
    assert set(WORLDS) == set(VERDICTS)
    assert set(RECIPES) - set(WORLDS) == {UNDECIDABLE}


@pytest.mark.parametrize(
    ("tying", "verdict"),
    [(0.0, SMALLER), (-0.04, False), (0.052, True), (0.13, False), (0.026, None), (0.104, None)],
)
def test_tying_that_is_free_helps_or_costs_too_much_is_not_a_small_loss(tying, verdict):
    losses, pairs = language_models(tying=tying)
    assert costs.judge_costs(losses, pairs) == verdict
    assert costs.judge_costs({**losses, "l2": {1: near(1.0)}}, pairs) is False, "L2 costs 0.1"


@pytest.mark.parametrize(("lstm", "verdict"), [(1.0, True), (0.8, False), (0.9, None)])
def test_the_lstm_is_a_part_of_figure_4(lstm, verdict):
    losses, _ = language_models()
    assert costs.judge_lstm({**losses, "lstm": {1: near(lstm)[::-1]}}) is verdict
