"""Certified and attacked accuracy against radius, per variant: mean over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from wellposed.report._aggregate import TaskComparison
from wellposed.report._runs import Run
from wellposed.report._words import SPLITS
from wellposed.training.certified.record import CertifiedRun


@dataclass(frozen=True)
class CertifiedCurve:
    """One variant: means over the seeds that were certified, at the radii all of them share."""

    variant: str
    seeds: int
    shares: tuple[float, ...]
    certified: tuple[float, ...]
    attacked: tuple[float, ...]

    def rows(self) -> list[dict[str, object]]:
        """Return one dictionary per radius, for CSV."""
        names = ("radius", "certified", "attacked")
        points = zip(self.shares, self.certified, self.attacked, strict=True)
        return [
            {"variant": self.variant, "seeds": self.seeds, **dict(zip(names, p, strict=True))}
            for p in points
        ]


def certified_curves(task: TaskComparison, runs: Sequence[Sequence[Run]]) -> list[CertifiedCurve]:
    """Return a curve for each variant with a run that was certified."""
    curves = []
    for result, group in zip(task.variants, runs, strict=True):
        measured = _measured(group)
        if measured:
            shares = sorted(set.intersection(*(set(run.shares) for run in measured)))
            certified, attacked = (
                tuple(
                    math.fsum(column[share] for column in columns) / len(columns)
                    for share in shares
                )
                for columns in (
                    [dict(zip(run.shares, run.certified, strict=True)) for run in measured],
                    [dict(zip(run.shares, run.attacked, strict=True)) for run in measured],
                )
            )
            curves.append(
                CertifiedCurve(result.variant, len(measured), tuple(shares), certified, attacked)
            )
    return curves


def certified_caption(runs: Sequence[Sequence[Run]]) -> str:
    """Return what was measured: the examples, their split, the norm and the attack."""
    measured = [run for group in runs for run in _measured(group)]
    splits, norms, attacks = (
        ", ".join(dict.fromkeys(values))
        for values in zip(
            *((SPLITS.get(run.split, run.split), run.norm, run.attack) for run in measured),
            strict=True,
        )
    )
    low, high = min(run.examples for run in measured), max(run.examples for run in measured)
    examples = f"{low}" if low == high else f"{low} to {high}"
    return (
        f"Accuracy on {examples} {splits} examples when every embedded token moves by up to the"
        f" radius (norm {norms}): what no perturbation can undo (solid) and what the attack left"
        f" right (dashed; {attacks}). Mean over seeds."
    )


def _measured(group: Sequence[Run]) -> list[CertifiedRun]:
    return [run.certified for run in group if run.certified is not None]
