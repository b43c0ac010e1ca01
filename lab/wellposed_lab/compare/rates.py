"""A learning rate for each variant, chosen on *valid* from a grid of rates with the first seed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellposed.errors import ConfigError, shortened
from wellposed.options import Positive, fits
from wellposed_lab.compare.runs import PlannedRun
from wellposed_lab.compare.variants import apply_variant, variant_folder
from wellposed_lab.report.runs import TUNED
from wellposed_lab.training.config import RunConfig
from wellposed_lab.training.loop.processes import is_one_of_several

if TYPE_CHECKING:
    from wellposed_lab.training.folder.result import RunResult


def check_rates(base: RunConfig, rates: Sequence[float]) -> None:
    """Refuse a bad grid of learning rates, or a schedule that does not use them."""
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


def at_rate(base: RunConfig, rate: float) -> RunConfig:
    """Return a configuration with another learning rate, which variants may multiply."""
    return replace(base, train=replace(base.train, learning_rate=rate))


def rate_runs(
    base: RunConfig, variants: Sequence[str], rates: Sequence[float], out: Path
) -> list[PlannedRun]:
    """Return the runs that choose rates: every variant with every rate and the first seed."""
    grid = [(name, rate) for name in variants for rate in sorted(rates)]
    return [
        PlannedRun(
            _folder(out, name, rate),
            f"[rate {number}/{len(grid)}] {base.task} {name} at {rate:g}",
            apply_variant(name, at_rate(base, rate)),
        )
        for number, (name, rate) in enumerate(grid, start=1)
    ]


def chosen_rates(
    variants: Sequence[str], rates: Sequence[float], results: Iterable[RunResult]
) -> list[dict[str, Any]]:
    """Return a row for each variant and rate: its result on *valid*, and whether it is the best.
    The headline metric decides, then the loss. If all runs of a variant failed (they have no
    numbers), its smallest rate is chosen and fails again."""
    rows = []
    ended = iter(results)
    for name in variants:
        mine = [{"variant": name, "rate": at, **_on_valid(next(ended))} for at in sorted(rates)]
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
    if ended.status != "success":
        return {"learning_rate": None, "metric": None, "value": None, "loss": None, "cost": None}
    metrics = result["results"][result["task"]]
    headline = result["headline"]
    value = metrics.get(f"{headline},valid")
    loss = metrics.get("loss,valid")
    value = loss if value is None else value
    rises = result["higher_is_better"].get(headline, True) and f"{headline},valid" in metrics
    used = result["config"]["train"]["learning_rate"]
    cost = -value if rises else value
    return {"learning_rate": used, "metric": headline, "value": value, "loss": loss, "cost": cost}
