"""A learning rate for each variant, chosen on *valid* with the first seed from rates that are tried."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from wellposed.errors import ConfigError, shortened
from wellposed.options import Positive, fits
from wellposed_lab.compare.runs import PlannedRun
from wellposed_lab.compare.variants import apply_variant, variant_folder
from wellposed_lab.report.runs import TUNED
from wellposed_lab.training.config import RunConfig, TrainOptions
from wellposed_lab.training.loop.processes import is_one_of_several

if TYPE_CHECKING:
    from wellposed_lab.training.folder.result import RunResult

Rates = Sequence[float] | Literal["auto"]
"""Base rates to try; ``"auto"``: `FACTORS` times that of the base, on a third of the steps."""
FACTORS = (1 / 3, 1.0, 3.0)
"""Multiples of the usual rate that are tried first."""
SHORTER = 3
FEWEST_STEPS = 30
"""Steps of a run below which a third of them ranks no rates."""
MOST_RATES = 5
"""Rates of a variant whose best one is at an end."""


@dataclass(frozen=True)
class Search:
    """Which rates every variant tries."""

    rates: tuple[float, ...]
    """Rates of the base, which variants multiply."""
    shorter: int = 1
    """A trial has this part of a run's steps, warm-up and decay."""
    most: int = 0
    """Rates that a variant may try while its best one is at an end."""


Tried = Mapping[str, Mapping[float, "RunResult"]]
"""How the trials of each variant ended, by base rate."""


def search_of(base: RunConfig, rates: Rates) -> tuple[Search | None, str]:
    """Return the rates to try, or None and why an automatic search is left out; the reason is empty
    if none was asked for.

    Raises:
        ConfigError: a bad grid of rates, or a schedule that does not use them.

    >>> search_of(RunConfig("listops"), "auto")[0].rates
    (0.0003, 0.001, 0.003)
    """
    train = base.train
    if isinstance(rates, str):
        if rates != "auto":
            raise ConfigError(f"learning_rates = {rates!r:.80}, expected 'auto' or numbers")
        if train.schedule == "kim2021":
            return None, "the schedule kim2021 reads gamma, not the learning rate"
        if train.epochs is None and train.steps < FEWEST_STEPS:
            return None, f"a third of {train.steps} steps ranks no rates"
        return Search(rates_about(train.learning_rate), SHORTER, MOST_RATES), ""
    if len(rates):
        _check_grid(base, rates)
    return (Search(tuple(sorted(rates))) if len(rates) else None), ""


def _check_grid(base: RunConfig, rates: Sequence[float]) -> None:
    if len(set(rates)) < max(2, len(rates)) or not all(fits(rate, Positive) for rate in rates):
        raise ConfigError(
            f"learning_rates: received {shortened(list(map(str, rates)))}, expected two or more different finite"
            " numbers > 0, as in 1e-3,3e-3,1e-2; one rate for all variants is --learning-rate"
        )
    if base.train.schedule == "kim2021":
        raise ConfigError(
            "learning_rates: the schedule kim2021 reads gamma, not the learning rate; give another"
            " --schedule"
        )


def rates_about(usual: float, factors: Sequence[float] = FACTORS) -> tuple[float, ...]:
    """Return rates in steps of a half decade, to one digit.

    >>> rates_about(0.02)
    (0.007, 0.02, 0.06)
    """
    return tuple(float(f"{usual * factor:.1g}") for factor in factors)


def at_rate(base: RunConfig, rate: float) -> RunConfig:
    """Return a configuration with another learning rate, which variants may multiply."""
    return replace(base, train=replace(base.train, learning_rate=rate))


def shorter_run(config: RunConfig, part: int) -> RunConfig:
    """Return a configuration whose steps, warm-up and decay are divided by ``part``."""
    train = config.train
    return replace(
        config,
        train=replace(
            train,
            steps=math.ceil(train.steps / part),
            epochs=None if train.epochs is None else train.epochs / part,
            warmup_steps=_part_of_warmup(train, part),
            decay_steps=math.ceil(train.decay_steps / part),
        ),
    )


def _part_of_warmup(train: TrainOptions, part: int) -> int:
    # Rounded down, so that warm-up stays below the steps, but never to none.
    return max(1, train.warmup_steps // part) if train.warmup_steps else 0


def rate_runs(
    base: RunConfig, wanted: Sequence[tuple[str, float]], search: Search, out: Path
) -> list[PlannedRun]:
    """Return the trials of ``(variant, rate)``, with the first seed."""
    runs = []
    for number, (name, rate) in enumerate(wanted, start=1):
        config = shorter_run(apply_variant(name, at_rate(base, rate)), search.shorter)
        used = config.train.learning_rate
        label = f"[rate {number}/{len(wanted)}] {base.task} {name} at {used:g}"
        runs.append(PlannedRun(_folder(out, name, rate), label, config))
    return runs


def rates_beyond(tried: Tried, search: Search) -> list[tuple[str, float]]:
    """Return a further rate for each variant whose best one is at an end of those tried."""
    wanted = []
    for row in chosen_rates(tried):
        name = row["variant"]
        rate = row["rate"]
        rates = tried[name]
        if not row["chosen"] or row["loss"] is None or len(rates) >= search.most:
            continue
        if rate == max(rates):
            wanted += [(name, larger) for larger in rates_about(rate, FACTORS[-1:])]
        elif rate == min(rates):
            wanted += [(name, smaller) for smaller in rates_about(rate, FACTORS[:1])]
    return wanted


def chosen_rates(tried: Tried) -> list[dict[str, Any]]:
    """Return a row for each variant and rate: its result on *valid*, and whether it is the best.
    The headline metric decides, then the loss. If all runs of a variant failed (they have no
    numbers), its smallest rate is chosen and fails again."""
    rows = []
    for name, results in tried.items():
        mine = [
            {"variant": name, "rate": rate, **_on_valid(ended)}
            for rate, ended in sorted(results.items())
        ]
        reached = [row for row in mine if row["loss"] is not None] or mine[:1]
        best = min(reached, key=lambda row: (row["cost"], row["loss"]))
        rows += [{**row, "chosen": row is best} for row in mine]
    return rows


def reuse_first_seed(out: Path, rows: Iterable[dict[str, Any]], seed: int) -> None:
    """Copy the run of each chosen rate to the comparison, as the run of the first seed. Processes
    of a launcher train it again: none of them knows when the copy is complete."""
    for row in rows:
        folder = out / variant_folder(row["variant"]) / f"seed-{seed}"
        if row["chosen"] and not folder.exists() and not is_one_of_several():
            half = folder.with_name(f".{folder.name}")
            shutil.rmtree(half, ignore_errors=True)
            shutil.copytree(_folder(out, row["variant"], row["rate"]), half)
            os.replace(half, folder)


def _folder(out: Path, name: str, rate: float) -> Path:
    return out / TUNED / variant_folder(name) / str(float(rate))


def _on_valid(ended: RunResult) -> dict[str, Any]:
    """Return loss, headline and ``cost`` of a run on *valid*: the headline, lower is better."""
    result = ended.result
    steps = result["config"]["train"].get("steps")
    if ended.status != "success":
        numbers = ("learning_rate", "metric", "value", "loss", "cost")
        return {**dict.fromkeys(numbers), "steps": steps}

    metrics = result["results"][result["task"]]
    headline = result["headline"]
    value = metrics.get(f"{headline},valid")
    loss = metrics.get("loss,valid")
    value = loss if value is None else value
    rises = result["higher_is_better"].get(headline, True) and f"{headline},valid" in metrics
    used = result["config"]["train"]["learning_rate"]
    return {
        "learning_rate": used,
        "metric": headline,
        "value": value,
        "loss": loss,
        "cost": -value if rises else value,
        "steps": steps,
    }
