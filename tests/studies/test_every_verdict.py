"""Every recipe of the catalogue: a made-up result on either side of its claim changes its
verdict."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tests.studies.test_judges import CASES, NEAR, changes, seeds

from wellposed.recipes.reproduce import RECIPES
from wellposed.statistics import PairedComparison, paired_comparison
from wellposed.training.config import RunConfig, TrainOptions
from wellposed_studies.frontier import accuracy_verdict, characters, order
from wellposed_studies.frontier import depth as deep_frontier
from wellposed_studies.frontier import translation as small_translation
from wellposed_studies.huang2020 import depth as deep
from wellposed_studies.huang2020 import signal, theorem_3_1, updates
from wellposed_studies.huang2020 import table_1 as huang
from wellposed_studies.kim2021 import bound_ratio, table_1_speed
from wellposed_studies.kim2021 import figures_2_7_8_bounds as bounds
from wellposed_studies.kim2021 import figures_3_5_6_10_inverse as inverse
from wellposed_studies.kim2021 import figures_4_9_11_tables_2_3 as language
from wellposed_studies.mcgrath2024 import judges, results
from wellposed_studies.runs import FinishedRun
from wellposed_studies.sengupta2023 import (
    figure_3a,
    figure_3b,
    figure_5,
    figure_6,
    figure_7,
    figures_1_4,
    table_4_speed,
    table_5_parameters,
    tables_1_2_3,
)
from wellposed_studies.sengupta2023.trained import VARIANTS
from wellposed_studies.verdicts import every
from wellposed_studies.zhang2021 import tables_1_2_3_4 as translation
from wellposed_studies.zhang2021 import theorem_2_1

Judge = Callable[..., Any]


class Fed(NamedTuple):
    """A verdict function, and arguments for which the claim holds, and for which it does not."""

    judge: Judge
    holds: Sequence[Any]
    against: Sequence[Any]
    read: Callable[[Any], bool | None] = lambda verdict: verdict
    further: Mapping[str, Any] = {}


def known(judge: Judge) -> Fed:
    """The first case on either side of a function that `test_judges` feeds."""
    sides = {verdict: args for fed, verdict, args in reversed(CASES) if fed is judge}
    return Fed(judge, sides[True], sides[False])


def by_kind(**nll: float) -> dict[str, dict[int, list[float]]]:
    """NLL of one and three layers; only the contractive one gains by depth."""
    good = {
        "dot_product": 1.0,
        "l2": 1.01,
        "l2_tied": 1.05,
        "l2_contractive_kim2021": 1.1,
        "l2_tied_wide": 1.04,
    }
    found = {kind: {1: tight(value), 3: tight(value)} for kind, value in (good | nll).items()}
    found["l2_contractive_kim2021"][3] = tight(1.06)
    return found


def tight(value: float) -> list[float]:
    return [value + offset / 10 for offset in NEAR]


def against_plain(gain: float) -> PairedComparison:
    return paired_comparison(seeds(0.5 + gain), [0.5, 0.505, 0.495])


def drift(key: float) -> list[dict[str, Any]]:
    ends = {"encoder.0.key": tight(key), "affinity.0": tight(1.5)}
    return [
        {"seed": seed, "step": 9, "weight": weight, "error_over_initial": ratio}
        for weight, ratios in ends.items()
        for seed, ratio in enumerate(ratios)
    ]


def translated(gain: float) -> list[Any]:
    """A study and its runs: BLEU of the Transformer and of VAR-III, which gains."""
    variants = {translation.TRANSFORMER: 20.0, f"{translation.OC3}:1e-06": 20.0 + gain}
    runs = [
        FinishedRun(
            RunConfig("translation", variant=variant, train=TrainOptions(seed=seed)),
            Path("nowhere"),
            {"bleu,test": value, "perplexity,valid": 9.0},
        )
        for variant, mean in variants.items()
        for seed, value in enumerate([mean, 1.01 * mean, 0.98 * mean])
    ]
    return [translation.Study("corpus", RunConfig(task="translation"), {}), runs, [translation.OC3]]


def scores(transject: float) -> list[Any]:
    test = {
        variant: seeds(transject if variant == "transject" else 70.0, (0.0, 0.1, 0.3))
        for variant in VARIANTS
    }
    test["transject"][1] += 0.05
    return [tables_1_2_3.Scores(test, level=True), "transject"]


def evidence(fallen: int) -> list[Any]:
    plain = {"post_ln": [0.79, 0.80, 0.795], "rezero": [0.75, 0.76, 0.75]}
    known = accuracy_verdict.Evidence(
        "imdb",
        (0.80, 0.81, 0.805),
        plain,
        (0.7, 0.71, 0.7),
        4000,
        attacked=50,
        fallen=fallen,
        settled=True,
    )
    return [[known, dataclasses.replace(known, corpus="ag_news")]]


def rival(gain: float) -> list[Any]:
    return [[[characters.Rivalry(tight(gain), [tight(gain)] * 5)]]]


COSTS = Fed(language.judge_costs, (by_kind(), 2.5), (by_kind(l2=2.0), 2.5))
DEPTHS = Fed(
    language._only_dot_product_fails,
    ({"dot_product": [2], "l2_tied": [2, 12]}, 12),
    ({"dot_product": [2, 12], "l2_tied": [2, 12]}, 12),
)
INVERSES = known(inverse.judge_inverses)
BLEU = Fed(translation.compare_variants, translated(2.0), translated(-2.0), lambda found: found[1])
SCORES = Fed(tables_1_2_3.judge, scores(80.0), scores(60.0))
VERDICTS: Mapping[str, Fed] = {
    "huang2020/table-1": known(huang.judge_table_1),
    "huang2020/depth": Fed(
        deep.judge_depth, ([True, True], [False, False]), ([True, False], [False, False])
    ),
    "huang2020/signal": known(signal.judge_signal),
    "huang2020/updates": known(updates.judge_updates),
    "huang2020/theorem-3.1": known(theorem_3_1.judge_theorem_3_1),
    "kim2021/figure-2": known(bounds.judge_figure_2),
    "kim2021/bound-ratio": known(bound_ratio.judge_ratio),
    "kim2021/figure-3": INVERSES,
    "kim2021/figure-4": COSTS,
    "kim2021/table-1": known(table_1_speed.judge_table_1),
    "kim2021/table-2": COSTS,
    "kim2021/figure-5": INVERSES,
    "kim2021/figure-6": INVERSES,
    "kim2021/figure-7": known(bounds.judge_figure_7),
    "kim2021/figure-8": Fed(
        bounds.judge_figure_8,
        ((1.0, 2.0), (1.0, 2.0, 4.0)),
        ((2.0, 1.0), (1.0, 2.0, 4.0)),
        further={"largest_tied": 1.0, "bound": 5.0},
    ),
    "kim2021/figure-9": Fed(
        language.judge_columns, (by_kind(), 2.5), (by_kind(l2_tied_wide=0.5), 2.5)
    ),
    "kim2021/figure-10": known(inverse.judge_figure_10),
    "kim2021/figure-11": DEPTHS,
    "kim2021/table-3": DEPTHS,
    "mcgrath2024/figure-1": Fed(
        judges.judge_alone, ([against_plain(0.2)],), ([against_plain(-0.2)],)
    ),
    "mcgrath2024/table-1": Fed(
        judges.judge_table_1,
        (
            {
                "key": against_plain(0.2),
                "query": against_plain(0.2),
                "key+query": against_plain(-0.2),
            },
        ),
        (
            {
                "key": against_plain(0.2),
                "query": against_plain(0.2),
                "key+query": against_plain(0.2),
            },
        ),
    ),
    "mcgrath2024/figure-3": Fed(results.judge_drift, (drift(0.9),), (drift(1.1),)),
    "mcgrath2024/pretrained": Fed(every, ([True, True, True],), ([True, None, False],)),
    "mcgrath2024/qr": Fed(judges.judge_shares, ([tight(0.3)],), ([tight(0.3), tight(0.9)],)),
    "sengupta2023/figure-1": known(figures_1_4.judge_figure_1),
    "sengupta2023/table-1": SCORES,
    "sengupta2023/table-2": SCORES,
    "sengupta2023/table-3": Fed(
        tables_1_2_3.judge, scores(60.0), scores(80.0), further={"higher_is_better": False}
    ),
    "sengupta2023/table-4": known(table_4_speed.judge_table_4),
    "sengupta2023/table-5": known(table_5_parameters.judge_table_5),
    "sengupta2023/figure-3a": known(figure_3a.judge_figure_3a),
    "sengupta2023/figure-3b": known(figure_3b.judge_figure_3b),
    "sengupta2023/figure-4": known(figures_1_4.judge_figure_4),
    "sengupta2023/figure-5": known(figure_5.judge_figure_5),
    "sengupta2023/figure-6": Fed(
        figure_6.judge_figure_6, (changes(1.0, 2.0, -0.5, -1.0),), (changes(-1.0, 2.0, 0.5, -1.0),)
    ),
    "sengupta2023/figure-7": known(figure_7.judge_figure_7),
    "zhang2021/theorem-2.1": known(theorem_2_1.judge_theorem),
    "zhang2021/table-1": BLEU,
    "zhang2021/table-2": BLEU,
    "zhang2021/table-3": BLEU,
    "zhang2021/table-4": BLEU,
    "frontier/accuracy": Fed(accuracy_verdict.judge_accuracy, evidence(0), evidence(1)),
    "frontier/depth": Fed(
        deep_frontier.judge_depth, ([2, 8], (2, 8), 0.9), ([2, 8], (2, 8), math.inf)
    ),
    "frontier/characters": Fed(characters.judge, rival(0.2), rival(-0.2)),
    "frontier/order": Fed(order.judge, ([[tight(0.5)]] * 2,), ([[tight(0.0)]] * 2,)),
    "frontier/translation": Fed(small_translation.judge, (tight(0.0),), (tight(-2.0),)),
}


@pytest.mark.parametrize("name", list(RECIPES))
def test_a_made_up_result_on_either_side_changes_the_verdict(name: str) -> None:
    judge, holds, against, read, further = VERDICTS[name]
    sides = [judge(*holds, **further), judge(*against, **further)]
    assert [read(side) for side in sides] == [True, False]


@pytest.mark.parametrize("name", list(RECIPES))
def test_the_recipe_asks_that_function(name: str) -> None:
    judge = VERDICTS[name].judge
    module = importlib.import_module(f"{str(RECIPES.get(name).function).partition(':')[0]}")
    asked = judge.__name__
    source = inspect.getsource(module).replace(f"def {asked}(", "")
    assert f"{asked}(" in source
