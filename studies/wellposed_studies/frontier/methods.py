"""One table of ways to train with constrained weights, each at its own best rate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from wellposed.errors import ConvergenceError
from wellposed_lab.charts import Panel, Row, Series
from wellposed_lab.statistics import PairedComparison, holm_correction, paired_comparison
from wellposed_studies.frontier.method_runs import KINDS, Text, Training, read_text, result_of
from wellposed_studies.frontier.training_methods import BASELINES, METHODS
from wellposed_studies.recipe import Criterion, Reproduction, Request, Verdict, recipe
from wellposed_studies.study import Sizes, mean_se, sizes_at
from wellposed_studies.verdicts import gain, some

LEAST = 0.02
"""Smallest gain over the better baseline, in nats, that counts."""
NEAR = 0.05
"""A rate is good within this many nats of the method's best."""
LEVEL = 1.88
"""nanoGPT's loss on valid in the small setting."""
WITHIN = 0.03
"""The plain model has to be this near, or the study stops."""
WIDER = 2
"""Rates that are tried beyond an end, at most."""


@dataclass(frozen=True)
class Tried:
    """The runs of one method on one model."""

    kind: str
    method: str
    rate: float
    """The best on valid, with the first seed."""
    by_rate: Mapping[float, float]
    """Loss of the first seed at every rate."""
    runs: Sequence[Mapping[str, Any]]
    """Every seed at the best rate."""
    cold: float
    """Loss without warm-up."""
    deep: float
    """Loss at the larger depth."""

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
    takes=("data",),
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
        decay 0.1, no dropout. The plain model must be within {WITHIN:g} nats of its {LEVEL:g}, or the
        study stops. The medium scale is its 6 layers of width 384, for a GPU.
    Note: rates are tried by half decades with one seed, and up to {WIDER} more at each end while the best
        is there. Decay is 0.1 for every method that reads it.
    Note: nothing is judged unless both baselines are better than the best constant predictor. Losses do
        not level off in so few steps: equal steps are compared, not ends of training.
    Note: good rates are those within {NEAR:g} nats of the method's best; cold is without warm-up, deep at
        the larger depth, both with one seed at the best rate. Every run is kept in a file of its own,
        so that the study resumes.
    """
    sizes = sizes_of(request)
    text = read_text(request.data, sizes.limit)
    grid = [
        (kind, name)
        for kind, name in itertools.product(KINDS, sizes.options.get("methods", METHODS))
        if kind == "ours" or not METHODS[name].model
    ]
    tried: list[Tried] = []
    for kind, name in grid:
        tried.append(_tried(request, sizes, text, kind, name))
        if len(tried) == 1:
            _check_level(request, tried[0])

    ours = [item for item in tried if item.kind == "ours"]
    baseline = min((item for item in ours if item.method in BASELINES), key=_mean)
    rivals = [item for item in ours if item.method not in BASELINES]
    tests = compared(rivals, baseline)
    rows = [_row(item, tried) for item in tried]
    got = (
        f"{sizes.layers} layers of width {sizes.width}, {sizes.steps} steps, the better baseline is"
        f" {baseline.method}: {'; '.join(_summary(item) for item in ours)}"
    )
    reasons = unfit(ours, text)
    holds = None if request.scale == "toy" or reasons else judge(tests)
    criterion = Criterion("", sizes.seeds, "paired t-tests over seeds, Holm-corrected, at 5 %")
    return Reproduction(rows, _panels(tried), got, holds, notes=reasons, criterion=criterion)


def unfit(tried: Sequence[Tried], text: Text) -> tuple[str, ...]:
    """Return why nothing is judged: a baseline that is not better than the best constant predictor."""
    constant = text.constant_loss
    blind = [
        item.method for item in tried if item.method in BASELINES and not _mean(item) < constant
    ]
    if not blind:
        return ()
    return (
        f"not judged: {', '.join(blind)} not better than a constant predictor ({constant:.3f})",
    )


def _tried(request: Request, sizes: Sizes, text: Text, kind: str, name: str) -> Tried:
    """Search the rate of a method, train all seeds at the best, and the two runs beside them."""
    method = METHODS[name]
    shape = Training(
        kind, name, 0.0, 0, sizes.steps, sizes.layers, sizes.width, sizes.heads, sizes.seq_len,
        sizes.batch_size, sizes.warmup, sizes.options["decay"] if method.reads_decay else 0.0,
        sizes.dropout,
    )  # fmt: skip
    folder = request.runs("frontier-methods")

    def result(training: Training) -> Mapping[str, Any]:
        request.announce(f"{kind}, {name}, rate {training.rate:g}, seed {training.seed}")
        return result_of(training, text, folder)

    def loss(rate: float) -> float:
        return result(replace(shape, rate=rate))["valid"]

    by_rate = searched([rate * method.rates for rate in sizes.rates], loss)
    best = min(by_rate, key=lambda rate: by_rate[rate])
    at_best = replace(shape, rate=best)
    runs = [result(replace(at_best, seed=seed)) for seed in range(sizes.seeds)]
    cold = result(replace(at_best, warmup=0))["valid"]
    deep = result(replace(at_best, layers=sizes.options["deep"]))["valid"]
    return Tried(kind, name, best, by_rate, runs, cold, deep)


def searched(rates: Sequence[float], loss: Any) -> dict[float, float]:
    """Return the loss at every rate, and at more while the best is at an end, up to `WIDER` there."""
    losses = {_rounded(rate): loss(_rounded(rate)) for rate in rates}
    for factor, end in itertools.product((math.sqrt(10), 1 / math.sqrt(10)), range(WIDER)):
        del end
        edge = max(losses) if factor > 1 else min(losses)
        if len(losses) > 1 and min(losses, key=lambda rate: losses[rate]) == edge:
            further_rate = _rounded(edge * factor)
            losses[further_rate] = loss(further_rate)
    return dict(sorted(losses.items()))


def _rounded(rate: float) -> float:
    """Return a rate to one digit: half decades are 1 and 3."""
    return float(f"{rate:.1g}")


def _check_level(request: Request, plain: Tried) -> None:
    """Stop if the plain model is not as good as nanoGPT's in the small setting."""
    loss = _mean(plain)
    if request.scale == "mini" and not abs(loss - LEVEL) <= WITHIN:
        raise ConvergenceError(
            f"frontier/methods: AdamW ends at {loss:.3f} nats on valid, expected {LEVEL:g} within"
            f" {WITHIN:g}; give --data tinyshakespeare.txt, or mend the training before it compares"
        )


def compared(rivals: Sequence[Tried], baseline: Tried) -> list[PairedComparison]:
    """Return the paired tests of losses on valid, Holm-corrected; a diverged method has none."""
    finite = [item for item in rivals if all(map(math.isfinite, item.losses))]
    against = partial(paired_comparison, higher_is_better=False)
    return holm_correction([against(item.losses, baseline.losses) for item in finite])


def judge(tests: Sequence[PairedComparison]) -> Verdict:
    return some(gain(test, LEAST, parts=len(tests)) for test in tests)


def _mean(item: Tried) -> float:
    return fmean(item.losses)


def _row(item: Tried, tried: Sequence[Tried]) -> Row:
    plain = next(
        other for other in tried if (other.kind, other.method) == (item.kind, BASELINES[0])
    )
    first = item.runs[0]
    base = plain.runs[0]
    costs = {
        "cpu_ratio": _ratio(first.get("seconds_per_step"), base.get("seconds_per_step")),
        "state_ratio": _ratio(first.get("state_bytes"), base.get("state_bytes")),
    }
    ends = {name: first.get(name) for name in ("sigma_max", "logit_max", "certified", "failed")}
    return {
        "model": item.kind,
        "method": item.method,
        "rate": item.rate,
        "valid": _mean(item),
        "by_seed": " ".join(f"{loss:.4f}" for loss in item.losses),
        "good_rates": item.good_rates,
        "rates": " ".join(f"{rate:g}:{loss:.3f}" for rate, loss in item.by_rate.items()),
        "cold": item.cold,
        "deep": item.deep,
        **costs,
        **ends,
        "merges": "yes" if METHODS[item.method].merges else "no",
    }


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value and base else None


def _summary(item: Tried) -> str:
    return (
        f"{item.method}: {mean_se(item.losses, 3)} at {item.rate:g}, {item.good_rates} of"
        f" {len(item.by_rate)} rates within {NEAR:g}"
    )


def _panels(tried: Sequence[Tried]) -> list[Panel]:
    panels = []
    for kind in KINDS:
        curves = [
            Series(item.method, [*item.by_rate], [*item.by_rate.values()], "solid", colour)
            for colour, item in enumerate(item for item in tried if item.kind == kind)
        ]
        panels.append(Panel(kind, "learning rate", "loss on valid (nats)", curves, "log"))
    return panels
