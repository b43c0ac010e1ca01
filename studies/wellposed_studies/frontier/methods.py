"""One table of ways to train with constrained weights, each at its own best rate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from statistics import fmean
from time import monotonic
from typing import Any

from wellposed.errors import ConvergenceError
from wellposed_lab.charts import Panel, Row, Series
from wellposed_lab.statistics import PairedComparison, holm_correction, paired_comparison
from wellposed_studies.frontier.method_costs import cpu_ratio
from wellposed_studies.frontier.method_data import (
    KINDS,
    NANOGPT,
    OUR_MODELS,
    Data,
    Training,
    read_text,
)
from wellposed_studies.frontier.method_launches import StepCost, cost_over_plain, plain_cost
from wellposed_studies.frontier.method_runs import train
from wellposed_studies.frontier.method_store import Result, Store
from wellposed_studies.frontier.training_methods import BASELINES, METHODS
from wellposed_studies.recipe import Criterion, Reproduction, Request, Verdict, recipe
from wellposed_studies.run_sizes import NO_DECODING
from wellposed_studies.study import Sizes, mean_se, sizes_at
from wellposed_studies.verdicts import Power, gain, some

LEAST = 0.02
"""Smallest gain over the better baseline, in nats, that counts."""
DIFFERENCE = "loss on valid, in nats"
RIVALS = [name for name in METHODS if name not in BASELINES]
GATE = (
    "nothing is judged before AdamW and Muon need their blocks, and are better than the best constant and"
    " than a table of pairs of tokens. Trainings of equal steps are compared, levelled off or not"
)
"""The conditions of `unfit`, in words."""
NEAR = 0.05
"""A rate is good within this many nats of the method's best."""
LEVEL = 1.88
"""nanoGPT's loss on valid in the small setting, at `LEVEL_RATE`; Hugging Face's GPT-2 ends
at 1.890 here."""
LEVEL_RATE = 1e-3
WITHIN = 0.03
"""A difference of nanoGPT's model that is larger stops the study."""
WIDER = 2
"""Rates that are tried beyond an end, at most."""

Fetch = Callable[[Training], "Result | None"]
"""Return the result of a training; None if it has not ended yet."""


class Stage(IntEnum):
    """The trainings of a method in the order of the study: each stage needs those before."""

    RATES = 0
    SEEDS = 1
    COLD = 2
    DEEP = 3


@dataclass(frozen=True)
class Tried:
    """The trainings of one method on one model that have ended."""

    kind: str
    method: str
    by_rate: Mapping[float, float]
    """Loss of the first seed at every rate."""
    runs: Sequence[Result]
    """Seeds at the best rate."""
    cold: float | None
    """Loss without warm-up."""
    deep: float | None
    """Loss of the deep model."""
    missing: int
    """Trainings that have not ended, as far as known."""

    @property
    def rate(self) -> float:
        """The best on valid, with the first seed."""
        return min(self.by_rate, key=lambda rate: self.by_rate[rate])

    @property
    def losses(self) -> list[float]:
        return [run["valid"] for run in self.runs]

    @property
    def good_rates(self) -> int:
        """Number of rates within `NEAR` of the best."""
        best = min(self.by_rate.values())
        return sum(loss <= best + NEAR for loss in self.by_rate.values())


def sizes_of(request: Request) -> Sizes:
    return sizes_at(request, "frontier/methods")


@recipe(
    "frontier/methods",
    folders=("text/tinyshakespeare.txt.gz",),
    takes=("data", "minutes"),
    power=Power(
        sizes_of, DIFFERENCE, 0.008, "AdamW and Muon in this study", tests=len(RIVALS), gate=GATE
    ),
    builtin="English prose that ships with Python",
)
def methods(request: Request) -> Reproduction:
    """Ways to train with constrained weights, at equal steps and each at its own best rate.

    Claim: a claim of ours, written before the runs: some method of this table ends at a lower loss than
        AdamW and Muon at their best rates.
    Test: paired t-tests over seeds of each method against the better of AdamW and Muon, on our model,
        Holm-corrected over methods, at 5 %: the loss on valid is lower, by {LEAST:g} nats or more.
    Note: nanoGPT's small setting on a CPU: characters of tinyshakespeare, 4 layers of width 128, 4
        heads, blocks of 64, batches of 12, 2,000 steps, cosine to a tenth with warm-up, clipping at 1,
        decay 0.1, no dropout. The study stops if nanoGPT's model, by Hugging Face, is not within
        {WITHIN:g} nats of its public loss {LEVEL:g} at its rate. The medium scale is its 6 layers of
        width 384, for a GPU.
    Note: rates are tried by half decades with one seed, and up to {WIDER} more at each end while the best
        is there. Decay is 0.1 for every method that reads it. On a CPU without instructions for bfloat16
        the products of Muon run in float32 and are rounded, equal to the order of sums; also for CPU ratios.
    Note: nothing is judged unless both baselines need their blocks, and are better than the best constant
        and a table of pairs of characters. Losses do not level off in so few steps: equal steps are
        compared, not ends of training.
    Note: good rates are those within {NEAR:g} nats of the method's best; cold is without warm-up, deep is
        24 layers in a quarter of the steps, both with one seed at the best rate. Every training is a
        line of frontier-methods-SCALE.jsonl beside the row. With --minutes it stops in time, the row
        counts what is missing, and a later call completes it.
    """
    sizes = sizes_of(request)
    text = read_text(request.data, sizes.limit)
    return table_of_methods(request, "frontier/methods", sizes, text, KINDS, judge)


def table_of_methods(
    request: Request,
    study: str,
    sizes: Sizes,
    data: Data,
    kinds: Sequence[str],
    judged_by: Callable[[Sequence[PairedComparison]], Verdict],
) -> Reproduction:
    """Train what is missing of a study, and return its table so far; the first kind is judged."""
    store = Store(request.out / f"{study.replace('/', '-')}-{request.scale}.jsonl")
    chosen = list(sizes.options.get("methods", METHODS))
    _train_all(request, sizes, data, store, chosen, kinds)

    by_method = [
        _tried(sizes, kind, name, store.find)
        for kind in kinds
        for name in methods_for(kind, chosen)
    ]
    tried = [item for item in by_method if item.by_rate]
    judged = [item for item in tried if item.kind == kinds[0]]
    missing = sum(item.missing for item in by_method)
    reasons = unfinished(missing, len(store.results)) or unfit(judged, data)
    holds = None
    if not reasons:
        baseline = min((item for item in judged if item.method in BASELINES), key=_mean)
        rivals = [item for item in judged if item.method not in BASELINES]
        holds = judged_by(compared(rivals, baseline))
    plain = {
        kind: plain_cost(training_of(sizes, kind, BASELINES[0]), data)
        for kind in dict.fromkeys(item.kind for item in tried)
    }
    trained = [training_of(sizes, item.kind, item.method, item.rate) for item in tried]
    rows = [
        _row(item, cost_columns(training, data, plain[item.kind]))
        for item, training in zip(tried, trained, strict=True)
    ]
    return Reproduction(
        rows,
        _panels(tried, kinds),
        "; ".join(_summary(item) for item in judged),
        holds,
        reasons,
        Criterion("", sizes.seeds, "paired t-tests over seeds, Holm-corrected, at 5 %"),
        size_of_study(sizes, data, max((len(item.runs) for item in judged), default=0)),
        missing,
    )


def size_of_study(sizes: Sizes, data: Data, seeds: int) -> dict[str, Any]:
    """Return the size of the row, by `evidence.FIELDS`, with the seeds that have ended."""
    return {
        "read": data.read,
        "width": sizes.width,
        "depth": sizes.layers,
        "steps": sizes.steps,
        "batch": sizes.batch_size,
        "seeds": seeds,
        "decoding": NO_DECODING,
    }


def methods_for(kind: str, names: Iterable[str]) -> list[str]:
    """Return the methods of a model; those with options of our models are for them alone."""
    return [name for name in names if kind in OUR_MODELS or not METHODS[name].model]


def _train_all(
    request: Request,
    sizes: Sizes,
    data: Data,
    store: Store,
    chosen: Sequence[str],
    kinds: Sequence[str],
) -> None:
    """Train what is missing, every method's first stage before any method's second, until the time is
    over."""
    ends = math.inf
    if request.minutes is not None:
        ends = monotonic() + 60 * float(request.minutes)

    def fetch(training: Training) -> Result | None:
        ended = store.find(training)
        if ended is not None or monotonic() > ends:
            return ended

        request.announce(
            f"{training.model}, {training.method}, rate {training.rate:g}, seed {training.seed}"
        )
        return store.find_or(training, partial(train, data=data))

    if request.scale == "mini" and kinds == KINDS:
        level = fetch(training_of(sizes, NANOGPT, BASELINES[0], rate=LEVEL_RATE))
        if level is not None:
            check_level(level["valid"])

    for kind, stage in itertools.product(kinds, Stage):
        for name in methods_for(kind, chosen):
            _tried(sizes, kind, name, fetch, stage)


def training_of(sizes: Sizes, kind: str, name: str, rate: float = 0.0) -> Training:
    """Return the training of a method at a rate, with the first seed."""
    return Training(
        model=kind,
        method=name,
        rate=rate,
        seed=0,
        steps=sizes.steps,
        layers=sizes.layers,
        width=sizes.width,
        heads=sizes.heads,
        block=sizes.seq_len,
        batch=sizes.batch_size,
        warmup=sizes.warmup,
        decay=sizes.options["decay"] if METHODS[name].reads_decay else 0.0,
        dropout=sizes.dropout,
    )


def _tried(sizes: Sizes, kind: str, name: str, fetch: Fetch, last: Stage = Stage.DEEP) -> Tried:
    """Search the rate of a method, then train the seeds, without warm-up, and deep, up to a stage."""
    method = METHODS[name]
    shape = training_of(sizes, kind, name)

    def loss(training: Training) -> float | None:
        result = fetch(training)
        return None if result is None else result["valid"]

    searched_rates = searched(
        [rate * method.rates for rate in sizes.rates], lambda rate: loss(replace(shape, rate=rate))
    )
    by_rate = {rate: value for rate, value in searched_rates.items() if value is not None}
    waiting = len(searched_rates) - len(by_rate)
    later = sizes.seeds - 1 + len((Stage.COLD, Stage.DEEP))
    if waiting or last == Stage.RATES:
        first = (
            [fetch(replace(shape, rate=min(by_rate, key=by_rate.__getitem__)))] if by_rate else []
        )
        runs = [run for run in first if run is not None]
        return Tried(kind, name, by_rate, runs, None, None, waiting + later)

    best = replace(shape, rate=min(by_rate, key=by_rate.__getitem__))
    seeds = [fetch(replace(best, seed=seed)) for seed in range(sizes.seeds)]
    cold = loss(replace(best, warmup=0)) if last >= Stage.COLD else None
    deep = None
    if last >= Stage.DEEP:
        layers, steps = sizes.options["deep"]
        deep = loss(replace(best, layers=layers, steps=steps))
    missing = [*seeds, cold, deep].count(None)
    runs = [run for run in seeds if run is not None]
    return Tried(kind, name, by_rate, runs, cold, deep, missing)


def searched(
    rates: Sequence[float], loss: Callable[[float], float | None]
) -> dict[float, float | None]:
    """Return the loss at every rate, and at more while the best is at an end, up to `WIDER` there.

    None is the loss of a training that has not ended; nothing more is tried then.
    """
    losses = {rounded(rate): loss(rounded(rate)) for rate in rates}
    for factor, _ in itertools.product((math.sqrt(10), 1 / math.sqrt(10)), range(WIDER)):
        ended = {rate: value for rate, value in losses.items() if value is not None}
        if len(ended) < len(losses) or len(losses) == 1:
            break
        edge = max(ended) if factor > 1 else min(ended)
        if min(ended, key=ended.__getitem__) == edge:
            further_rate = rounded(edge * factor)
            losses[further_rate] = loss(further_rate)
    return dict(sorted(losses.items()))


def rounded(rate: float) -> float:
    """Return a rate to one digit: half decades are 1 and 3."""
    return float(f"{rate:.1g}")


def check_level(loss: float) -> None:
    """Stop if nanoGPT's architecture does not end at its public loss in the small setting."""
    if not abs(loss - LEVEL) <= WITHIN:
        raise ConvergenceError(
            f"frontier/methods: nanoGPT's model ends at {loss:.3f} nats on valid, expected {LEVEL:g} within"
            f" {WITHIN:g}; give --data tinyshakespeare.txt, or mend the training before it compares"
        )


def unfinished(missing: int, ended: int) -> tuple[str, ...]:
    """Return that the study is still running, if trainings are missing."""
    if not missing:
        return ()
    return (
        f"running: {ended} trainings have ended, {missing} or more are missing; methods with one seed"
        " cannot be compared yet",
    )


def unfit(tried: Sequence[Tried], data: Data) -> tuple[str, ...]:
    """Return why nothing is judged: a baseline that learned too little, or that needs no blocks."""
    baselines = [item for item in tried if item.method in BASELINES]
    reasons = []
    bars = {"a constant predictor": data.constant_loss, "a table of pairs": data.pairs_loss}
    for bar, loss in bars.items():
        blind = [item.method for item in baselines if loss is not None and not _mean(item) < loss]
        if blind:
            reasons.append(f"not judged: {', '.join(blind)} not better than {bar} ({loss:.3f})")

    needs = {
        item.method: [
            run["needs_blocks"] for run in item.runs if run.get("needs_blocks") is not None
        ]
        for item in baselines
    }
    idle = [name for name, needed in needs.items() if not all(needed)]
    if idle:
        reasons.append(
            f"not judged: {', '.join(idle)} as good on train with blocks that return their inputs"
        )
    unmeasured = [name for name, needed in needs.items() if not needed]
    if unmeasured:
        reasons.append(
            f"not judged: no seed of {', '.join(unmeasured)} says whether it needs its blocks"
        )
    return tuple(reasons)


def compared(rivals: Sequence[Tried], baseline: Tried) -> list[PairedComparison]:
    """Return the paired tests of losses on valid, Holm-corrected; a diverged method has none."""
    finite = [item for item in rivals if all(map(math.isfinite, item.losses))]
    against = partial(paired_comparison, higher_is_better=False)
    return holm_correction([against(item.losses, baseline.losses) for item in finite])


def judge(tests: Sequence[PairedComparison]) -> Verdict:
    return some(gain(test, LEAST, parts=len(tests)) for test in tests)


def _mean(item: Tried) -> float:
    return fmean(item.losses)


def cost_columns(training: Training, data: Data, plain: StepCost) -> Row:
    """Return the cost of a step over that of AdamW: CPU time, launches, memory."""
    cost = cost_over_plain(training, data, plain)
    return {
        "cpu_ratio": cpu_ratio(training, data),
        "launches": cost.launches,
        "peak_bytes": cost.peak_bytes,
        "kept_bytes": cost.kept_bytes,
    }


def _row(item: Tried, costs: Row) -> Row:
    # The first trainings of the study recorded no singular value.
    complete = [run for run in item.runs if run.get("sigma_max") is not None]
    end = next(iter([*complete, *item.runs]), {})
    ends = {name: end.get(name) for name in ("sigma_max", "logit_max", "certified", "failed")}
    return {
        "model": item.kind,
        "method": item.method,
        "rate": item.rate,
        "valid": _mean(item),
        "seeds": len(item.runs),
        "by_seed": " ".join(f"{loss:.4f}" for loss in item.losses),
        "good_rates": item.good_rates,
        "rates": " ".join(f"{rate:g}:{loss:.3f}" for rate, loss in item.by_rate.items()),
        "cold": item.cold,
        "deep": item.deep,
        **costs,
        **ends,
        "merges": "yes" if METHODS[item.method].merges else "no",
    }


def _summary(item: Tried) -> str:
    return (
        f"{item.method}: {mean_se(item.losses, 3)} at {item.rate:g}, {item.good_rates} of"
        f" {len(item.by_rate)} rates within {NEAR:g}"
    )


def _panels(tried: Sequence[Tried], kinds: Sequence[str]) -> list[Panel]:
    panels = []
    for kind in kinds:
        curves = [
            Series(item.method, [*item.by_rate], [*item.by_rate.values()], "solid", colour)
            for colour, item in enumerate(item for item in tried if item.kind == kind)
        ]
        panels.append(Panel(kind, "learning rate", "loss on valid (nats)", curves, "log"))
    return panels
