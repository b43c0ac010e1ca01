"""Every recipe of the studies: a made-up result on either side of its claim changes its verdict."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
from studies.tests.support.finished_runs import finished
from studies.tests.test_frontier_accuracy import evidence
from studies.tests.test_verdicts import GOOD, PAPERS

from wellposed.errors import ConfigError
from wellposed_lab.statistics import paired_comparison
from wellposed_studies.frontier import accuracy, characters, order
from wellposed_studies.frontier import depth as deep_frontier
from wellposed_studies.frontier import methods as training_methods
from wellposed_studies.frontier import rates as loss_by_rate
from wellposed_studies.frontier import translation as small_translation
from wellposed_studies.frontier import words as word_frontier
from wellposed_studies.huang2020 import attention_block, updates
from wellposed_studies.huang2020 import depth as deep
from wellposed_studies.kim2021 import costs, inverses, jacobians, theorems
from wellposed_studies.mcgrath2024 import equations
from wellposed_studies.mcgrath2024 import scores as mcgrath
from wellposed_studies.recipe import RECIPES, Reproduction
from wellposed_studies.sengupta2023 import costs as sizes
from wellposed_studies.sengupta2023 import layers, tables, tokens
from wellposed_studies.sengupta2023 import theorems as layer_theorems
from wellposed_studies.sengupta2023.trained import LABELS, VARIANTS
from wellposed_studies.zhang2021 import affinity_rows
from wellposed_studies.zhang2021 import tables as bleu

Judge = Callable[..., Any]


class Fed(NamedTuple):
    """A verdict function, and arguments for which the claim holds, and for which it does not."""

    judge: Judge
    holds: Sequence[Any]
    against: Sequence[Any]
    read: Callable[[Any], bool | None] = lambda verdict: verdict
    options: Mapping[str, Any] = {}


NEAR = (0.0, 0.01, -0.01)
"""Three seeds that agree."""
APART = (1.0, -1.0, 0.1)
"""Three that do not."""


BY_THOUGHT = {"kim2021/figure-8", "sengupta2023/figure-5"}
"""Recipes whose claim a run can only contradict: nothing that they measure could confirm it."""
UNDECIDABLE = "sengupta2023/figure-3b"
"""Recipe without a judge: the paper prints no scale, and entropy moves with it."""


def seeds(value, spread=NEAR):
    return [value + offset for offset in spread]


def two_bounds(ratio):
    row = dict.fromkeys(("lower", "lower_over_upper", "checked_by_autograd"), ratio)
    return [{**row, "upper": 1.0}] * 2


def lower_bounds(growth, upper=1000.0):
    return [
        {"N": n, "lower": growth(n), "upper": upper, "upper_kim": 2 * upper}
        for n in (10, 100, 1000)
    ]


def changes(experts, deeper, ours, dropout):
    return {
        (LABELS["transject"], "experts"): seeds(experts),
        (LABELS["transject"], "layers"): seeds(ours),
        (LABELS["post_ln"], "layers"): seeds(deeper),
        (LABELS["post_ln"], "dropout"): seeds(dropout),
    }


def images(smallest, one_image):
    return [{"least": smallest, "proof": 0.01, "one_image": one_image}]


def by_stack(value, spread=NEAR):
    return {"encoder": seeds(0.0 if value < 1 else value), "encoder-decoder": seeds(value, spread)}


def opposite(measured):
    numbers = dict.fromkeys(("adversarial", "measured_over_tight"), measured)
    return [{"keys": "two opposite", "tight": 1.0, **numbers}]


STEEP = {"upper": 1.0, "lower": 0.9}


def errors_at_the_end(tied=(1e-06, 1.0), dot=(9.0, 9.0), contractive=(1e-06,)):
    by_attention = {"tied L2": tied, "dot product": dot, "contractive L2, sharp bound": contractive}
    return [
        {"attention": kind, "max_error": error, "spread": 10.0}
        for kind, errors in by_attention.items()
        for error in errors
    ]


def by_kind(**nll):
    """NLL of one and three layers; only the contractive one gains by depth."""
    losses = {kind: {1: tight(value), 3: tight(value)} for kind, value in (GOOD | nll).items()}
    losses[PAPERS][3] = tight(1.06)
    return losses


def tight(value):
    return [value + offset / 10 for offset in NEAR]


def against_plain(gain):
    return paired_comparison(seeds(0.5 + gain), [0.5, 0.505, 0.495])


def by_place(*gains):
    return dict(zip(mcgrath.PLACES, map(against_plain, gains), strict=True))


def drift(key):
    ends = {"key.0": tight(key), "affinity.0": tight(1.5)}
    return [
        {"seed": seed, "step": 9, "weight": weight, "error_over_initial": ratio}
        for weight, ratios in ends.items()
        for seed, ratio in enumerate(ratios)
    ]


def translated(gain):
    """A corpus, its measure and runs: BLEU of the Transformer and of VAR-III, which gains."""
    variants = {bleu.TRANSFORMER: 20.0, f"{bleu.OC3}:1e-06": 20.0 + gain}
    runs = [
        finished("translation", variant, {"bleu,test": value, "perplexity,valid": 9.0}, seed=seed)
        for variant, mean in variants.items()
        for seed, value in enumerate([mean, 1.01 * mean, 0.98 * mean])
    ]
    chosen = {
        name: [run for run in runs if run.variant.startswith(name)] for name in ("post_ln", "oc3")
    }
    return ["corpus", ["bleu"], chosen]


def against_rates(sensitivity, loss):
    """Tests of a capped model whose sensitivity and best loss change by so much."""
    plain = {"sensitivity": tight(0.5), "best": tight(2.5)}
    changes = {"sensitivity": sensitivity, "best": loss}
    shifted = {
        name: [numbers + changes[name] for numbers in values] for name, values in plain.items()
    }
    shifted["best"][0] += 1e-4
    shifted["sensitivity"][0] += 1e-4
    return loss_by_rate.paired(shifted, plain)


def against_baseline(change):
    """The paired test of losses that are so much above those of a baseline."""
    plain = [1.80, 1.81, 1.82]
    losses = [loss + change + small for loss, small in zip(plain, (0.0, 1e-4, -1e-4), strict=True)]
    return paired_comparison(losses, plain, higher_is_better=False)


def factors(smallest):
    return [{"L": 2, "proof": -0.5, "least": 0.0}, {"L": 3, "proof": 0.01, "least": smallest}]


def slopes(attained, proved):
    return [{"attained": attained, "printed": 60.0, "proved": proved}]


def scores(transject, column="imdb"):
    test = {
        variant: seeds(transject if variant == "transject" else 70.0, (0.0, 0.1, 0.3))
        for variant in VARIANTS
    }
    test["transject"][1] += 0.05
    return [test, "transject", tables.printed_scores(column)]


def rival(gain):
    return [[[characters.Rivalry(tight(gain), [tight(gain)] * 5)]]]


COSTS = Fed(costs.judge_costs, (by_kind(), 2.5), (by_kind(l2=2.0), 2.5))
DEPTHS = Fed(
    costs.judge_depths,
    ({"dot_product": {2: 1.0, 12: 0.0}, "l2_tied": {2: 1.0, 12: 1.0}},),
    ({"dot_product": {2: 1.0, 12: 1.0}, "l2_tied": {2: 1.0, 12: 1.0}},),
)
INVERSES = Fed(
    inverses.judge_inverses, (errors_at_the_end(),), (errors_at_the_end(dot=(1e-6, 9.0)),)
)
GROWN = ([seeds(2.0)], [0.5])
BOUNDED = ([seeds(1.0)], [0.5])
BLEU = Fed(bleu.compare_variants, translated(2.0), translated(-2.0), lambda result: result[1])
SCORES = Fed(tables.judge, scores(80.0), scores(60.0))
VERDICTS = {
    "huang2020/depth": Fed(
        deep.judge_depth, ([True, True], [False, False]), ([True, False], [False, False])
    ),
    "huang2020/signal": Fed(
        updates.judge_signal, ([1.0, 1.1], [3.0, 1e6]), ([1.0, 1.3], [3.0, 1e6])
    ),
    "huang2020/updates": Fed(
        updates.judge_updates, (by_stack(0.0), by_stack(3.0)), (by_stack(0.3), by_stack(3.0))
    ),
    "huang2020/theorem-3.1": Fed(
        attention_block.judge_theorem_3_1,
        ([seeds(-1.0), seeds(-1.01)], [seeds(-0.5)]),
        ([seeds(-1.0), seeds(-0.8)], [seeds(-0.5)]),
    ),
    "huang2020/gradients": Fed(
        attention_block.judge_gradients, ([seeds(0.0)] * 3,), ([seeds(0.0), seeds(3.0)],)
    ),
    "kim2021/lemma-f.2": Fed(
        jacobians.judge_lemma_f_2, ([0.999, 1.0], [1.0]), ([0.999, 1.1], [1.0])
    ),
    "kim2021/figure-2": Fed(
        jacobians.judge_figure_2, (two_bounds(0.9), STEEP), (two_bounds(0.7), STEEP)
    ),
    "kim2021/bound-ratio": Fed(theorems.judge_ratio, ([1.0, 1250.0],), ([0.9, 1250.0],)),
    "kim2021/theorem-3.1": Fed(theorems.judge_growth, GROWN, BOUNDED, options={"order": 2}),
    "kim2021/lemma-f.1": Fed(
        theorems.judge_growth, GROWN, ([seeds(2.0)], [1.1]), options={"order": 2}
    ),
    "kim2021/theorem-3.2": Fed(theorems.judge_bounds, ([0.2, 0.9],), ([0.2, 1.1],)),
    "kim2021/masking": Fed(theorems.judge_growth, GROWN, BOUNDED, options={"order": 2}),
    "kim2021/figure-3": INVERSES,
    "kim2021/contraction": Fed(
        costs.judge_contraction,
        (by_kind(), 2.5),
        (by_kind(**{PAPERS: 0.5}), 2.5),
    ),
    "kim2021/figure-4": COSTS,
    "kim2021/table-1": Fed(
        costs.judge_table_1, ([{"over_dot_product": 1.4}],), ([{"over_dot_product": 1.6}],)
    ),
    "kim2021/table-2": COSTS,
    "kim2021/figure-5": INVERSES,
    "kim2021/figure-6": INVERSES,
    "kim2021/figure-7": Fed(
        jacobians.judge_figure_7, (lower_bounds(math.log),), (lower_bounds(math.sqrt),)
    ),
    "kim2021/figure-8": Fed(
        jacobians.judge_figure_8,
        ([1.0], [5.0], [math.inf]),
        ([6.0], [5.0], [math.inf]),
    ),
    "kim2021/figure-9": Fed(
        costs.judge_columns, (by_kind(), 2.5), (by_kind(l2_tied_wide=0.5), 2.5)
    ),
    "kim2021/figure-10": Fed(
        inverses.judge_figure_10,
        ([[0.9, 0.8]] * 2, [[1.6, 1.7]] * 2),
        ([[0.9, 0.8]] * 2, [[0.9, 0.8]] * 2),
    ),
    "kim2021/figure-11": DEPTHS,
    "kim2021/table-3": Fed(
        costs.judge_printed, (by_kind(l2_tied=1.0, **{PAPERS: 1.0}), 2.5), (by_kind(), 2.5)
    ),
    "mcgrath2024/figure-1": Fed(
        mcgrath.judge_alone, ([against_plain(0.2)],), ([against_plain(-0.2)],)
    ),
    "mcgrath2024/table-1": Fed(
        mcgrath.judge_table_1, (by_place(0.2, 0.2, -0.2),), (by_place(0.2, 0.2, 0.2),)
    ),
    "mcgrath2024/figure-3": Fed(mcgrath.judge_drift, (drift(0.9),), (drift(1.1),)),
    "mcgrath2024/pretrained": Fed(mcgrath.judge_parts, ([True] * 3,), ([False] * 3,)),
    "mcgrath2024/qr": Fed(
        mcgrath.judge_shares, ([[tight(0.3)]] * 2,), ([[tight(0.3), tight(0.9)]] * 2,)
    ),
    "sengupta2023/figure-1": Fed(
        tokens.judge_figure_1, (seeds(2.0), seeds(1.0)), (seeds(0.6), seeds(1.0))
    ),
    "sengupta2023/theorem-1": Fed(layer_theorems.judge_identity, ([1e-15],), ([1e-3],)),
    "sengupta2023/distances": Fed(
        layer_theorems.judge_distances, ([0.95], [1.05]), ([0.2, 0.4], [1.0, 1.0])
    ),
    "sengupta2023/lemma-1": Fed(layer_theorems.judge_lemma_1, (factors(0.2),), (factors(-0.1),)),
    "sengupta2023/corollary-1": Fed(
        layer_theorems.judge_corollary_1, (images(0.8, 0.0),), (images(0.001, 1.0),)
    ),
    "sengupta2023/theorem-2": Fed(
        layer_theorems.judge_theorem_2, (slopes(2.0, 5.0),), (slopes(410.0, 900.0),)
    ),
    "sengupta2023/table-1": SCORES,
    "sengupta2023/table-2": SCORES,
    "sengupta2023/table-3": Fed(tables.judge, scores(60.0, "ptb-words"), scores(80.0, "ptb-words")),
    "sengupta2023/table-4": Fed(
        sizes.judge_table_4, ([5.0, 10.0, 13.0, 26.0],), ([5.0, 10.0, 8.0, 26.0],)
    ),
    "sengupta2023/table-5": Fed(sizes.judge_table_5, ([1.0, 1.001],), ([10.0, 1.0],)),
    "sengupta2023/figure-3a": Fed(
        layers.judge_figure_3a, (seeds(1.0), seeds(4.0)), (seeds(1.0), seeds(1.2))
    ),
    "sengupta2023/figure-4": Fed(
        tokens.judge_figure_4,
        (seeds(0.9), seeds(0.5), seeds(0.7), seeds(0.4)),
        (seeds(0.5), seeds(0.9), seeds(0.7), seeds(0.4)),
    ),
    "sengupta2023/figure-5": Fed(layers.judge_figure_5, ([0.1, -0.3],), ([0.1, -0.4],)),
    "sengupta2023/figure-6": Fed(
        layers.judge_figure_6,
        (changes(1.0, 2.0, -0.5, -1.0), LABELS["post_ln"]),
        (changes(-1.0, 2.0, 0.5, -1.0), LABELS["post_ln"]),
    ),
    "sengupta2023/figure-7": Fed(
        layers.judge_figure_7, ([0.2, 0.3], 0.25, [0.2]), ([0.1, 0.4], 0.25, [0.2])
    ),
    "zhang2021/affinity": Fed(
        affinity_rows.judge_affinity, ([[0.001], [0.002]],), ([[0.001], [0.2, 0.3]],)
    ),
    "mcgrath2024/equation-3": Fed(equations.judge_equation_3, ([[1.0], [1.0]],), ([[1.0], [0.0]],)),
    "zhang2021/theorem-2.1": Fed(affinity_rows.judge_theorem, (opposite(0.999),), (opposite(1.1),)),
    "zhang2021/table-1": BLEU,
    "zhang2021/table-2": BLEU,
    "zhang2021/table-3": BLEU,
    "zhang2021/table-4": BLEU,
    "frontier/accuracy": Fed(
        accuracy.judge_accuracy,
        ([evidence("imdb"), evidence()],),
        ([evidence("imdb"), evidence(fallen=1)],),
    ),
    "frontier/depth": Fed(
        deep_frontier.judge_depth, ([2, 8], (2, 8), 0.9), ([2, 8], (2, 8), math.inf)
    ),
    "frontier/characters": Fed(characters.judge, rival(0.2), rival(-0.2)),
    "frontier/order": Fed(order.judge, ([[tight(0.5)]] * 2,), ([[tight(0.0)]] * 2,)),
    "frontier/words": Fed(
        word_frontier.better, ({0: tight(0.1), 1: []},), ({0: tight(-0.1)},), lambda pair: pair[0]
    ),
    "frontier/rates": Fed(
        loss_by_rate.judge_rates,
        ([against_rates(-0.3, 0.0)] * 2,),
        ([against_rates(-0.3, 0.0), against_rates(0.1, 0.1)],),
    ),
    "frontier/methods": Fed(
        training_methods.judge,
        ([against_baseline(-0.1), against_baseline(0.0)],),
        ([against_baseline(0.1), against_baseline(0.2)],),
    ),
    "frontier/classifiers": Fed(
        training_methods.judge,
        ([against_baseline(-0.1), against_baseline(0.0)],),
        ([against_baseline(0.1), against_baseline(0.2)],),
    ),
    "frontier/translation": Fed(small_translation.judge, (tight(0.0),), (tight(-2.0),)),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_a_made_up_result_on_either_side_changes_the_verdict(name):
    judge, holds, against, read, options = VERDICTS[name]
    sides = [judge(*holds, **options), judge(*against, **options)]
    assert [read(side) for side in sides] == [None if name in BY_THOUGHT else True, False]
    source = "".join(inspect.findsource(RECIPES.get(name).function)[0])
    assert judge.__name__ in source.replace(f"def {judge.__name__}(", ""), "the recipe asks it"


@pytest.mark.parametrize(
    ("judge", "result"),
    [
        (updates.judge_updates, (by_stack(0.0, APART), by_stack(3.0))),
        (attention_block.judge_theorem_3_1, ([seeds(-1.0, APART)], [seeds(-0.5)])),
        (tokens.judge_figure_4, (seeds(0.9, APART), seeds(0.5), seeds(0.5), seeds(0.4))),
        (tokens.judge_figure_4, (seeds(1.0), seeds(0.5), seeds(0.7), seeds(0.01))),
        (layers.judge_figure_7, ([0.25, 0.25], 0.25, [0.007])),
        (layers.judge_figure_3a, (seeds(1.0), seeds(1.5))),
        (layers.judge_figure_6, (changes(math.nan, 2.0, 0.5, -1.0), LABELS["post_ln"])),
        (layers.judge_transformer, (changes(0.5, 0.0, 2.0, math.nan), LABELS["post_ln"])),
        (layers.judge_figure_5, ([0.1],)),
        (mcgrath.judge_parts, ([True, None, False],)),
        (costs.judge_depths, ({"dot_product": {2: 1.0, 12: 0.3}, "l2_tied": {12: 1.0}},)),
        (costs.judge_depths, ({"dot_product": {2: 0.0, 12: 0.0}, "l2_tied": {12: 1.0}},)),
        (costs.judge_depths, ({"dot_product": {2: 1.0}, "l2_tied": {2: 1.0}},)),
        (order.judge, ([[tight(0.5)], [[0.1, 0.3, 0.05]]],)),
        (small_translation.judge, ([2.0, -3.0, 0.5],)),
        (characters.judge, ([[characters.Rivalry(APART, [tight(-0.1)] * 5)]],)),
        (attention_block.judge_gradients, ([seeds(0.2)],)),
        (jacobians.judge_lemma_f_2, ([0.9], [0.9])),
        (layer_theorems.judge_corollary_1, (images(0.001, 0.0),)),
        (affinity_rows.judge_affinity, ([[0.001, 0.2]],)),
        (equations.judge_equation_3, ([[0.5], [1.0]],)),
        (inverses.judge_figure_10, ([[0.9, 1.2]], [[1.6, 1.4]])),
        (mcgrath.judge_shares, ([[tight(0.3)], [tight(0.9)]],)),
        (sizes.judge_table_5, ([],)),
    ],
)
def test_seeds_that_differ_or_numbers_that_lack_cannot_say(judge, result):
    assert judge(*result) is None


MIDDLING = ([20.0, 20.2, 19.8, 20.1, 19.9], [20.05, 20.15, 19.85, 20.1, 19.88])
WIDE = ([20.0, 21.0, 19.0, 20.5, 19.5], [22.0, 19.0, 21.0, 18.5, 21.5])


@pytest.mark.parametrize(
    ("judge", "arguments"),
    [
        (mcgrath.judge_alone, lambda plain, ours: [[paired_comparison(ours, plain)] * 2]),
        (
            mcgrath.judge_table_1,
            lambda plain, ours: [dict.fromkeys(mcgrath.PLACES, paired_comparison(ours, plain))],
        ),
        (
            tables.judge,
            lambda plain, ours: [
                {numbers: ours if numbers == "transject" else plain for numbers in VARIANTS},
                "transject",
                tables.printed_scores("imdb"),
            ],
        ),
        (
            lambda *numbers: bleu.compare_variants(*numbers)[1],
            lambda plain, ours: [
                "corpus",
                ["bleu"],
                {
                    name: [
                        finished("translation", name, {"bleu,test": value}, seed=seed)
                        for seed, value in enumerate(values)
                    ]
                    for name, values in {"post_ln": plain, f"{bleu.OC3}:1e-06": ours}.items()
                },
            ],
        ),
    ],
)
def test_a_gain_that_would_have_been_seen_is_none_of_that_size_and_a_wide_one_undecided(
    judge, arguments, monkeypatch
):
    monkeypatch.setattr(mcgrath, "LEAST", 0.2)
    monkeypatch.setattr(mcgrath, "LEAST_LOSS", 0.2)
    monkeypatch.setitem(bleu.LABELS, f"{bleu.OC3}:1e-06", "VAR-III")
    assert judge(*arguments(*MIDDLING)) == "smaller"
    assert judge(*arguments(*WIDE)) is None


def test_what_speaks_against_a_claim_wins_over_what_speaks_for_it():
    assert layer_theorems.judge_corollary_1(images(0.8, 1.0)) is False


def test_every_recipe_is_judged_here_and_has_its_claim_and_minutes():
    assert set(RECIPES) == {*VERDICTS, UNDECIDABLE}
    assert len(RECIPES.names()) == 63
    for name in RECIPES:
        recipe = RECIPES.get(name)
        assert recipe.claim
        assert recipe.minutes["mini"] > 0


def test_a_verdict_without_its_test_is_refused():
    assert Reproduction([], [], "nothing", holds=None).criterion is None
    with pytest.raises(ConfigError, match="name the test in words"):
        Reproduction([], [], "nothing", holds=True)
