"""Report of an initialisation: a row for every matrix of the model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from wellposed.moves import say_moves
from wellposed.text_table import aligned, format_number

logger = logging.getLogger("wellposed.initialize")


@dataclass(frozen=True)
class InitializedWeight:
    """One weight: its role, its factor, and its size before and after."""

    name: str
    """Full dotted name of the parameter."""
    role: str
    """Role as in `find_roles`, or ``embedding``, ``output_embedding`` or ``other``."""
    stack: str | None
    """encoder, decoder, or None outside the layers."""
    layer: int | None
    shape: tuple[int, int]
    factor: float
    """Factor on the drawn weight; 1 if it was left alone or only drawn."""
    drawn: bool
    """Whether new numbers were drawn; a weight that ``leave`` names is left alone, bit for bit."""
    std_found: float
    """Standard deviation in the model as it came."""
    std_before: float
    """Standard deviation of the draw, before the factor."""
    std_after: float
    """Standard deviation now."""
    moved: float | None = None
    """`|W' - W|_F / |W|_F` of a weight that was loaded from a checkpoint; None of all others."""


@dataclass(frozen=True)
class InitializationReport:
    """Every matrix of the model; ``print`` it for a table."""

    title: str
    rows: tuple[InitializedWeight, ...]
    norms_removed: tuple[str, ...] = ()
    """Dotted paths of the norms that were taken out."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """Factor by what it scales: encoder, decoder, embeddings, ..."""
    mu: float | None = None
    """Of `dt_fixup_`: the largest token norm that entered the new layers; the factor's mu."""
    tokens: int = 0
    """Of `dt_fixup_`: tokens measured."""

    def table(self) -> str:
        """Return the report as aligned text, one weight to a line."""
        stds = ("std found", "std before", "std after")
        head = ("weight", "role", "shape", "factor", *stds)
        body = []
        for row in self.rows:
            factor = f"{row.factor:.6g}" if row.drawn else "kept"
            sizes = row.std_found, row.std_before, row.std_after
            shape = "x".join(map(str, row.shape))
            body.append((row.name, row.role, shape, factor, *map(format_number, sizes)))
        return "\n".join([*self._lines(), aligned([head, *body], "llr")])

    def _lines(self) -> list[str]:
        lines = [self.title]
        if self.factors:
            named = (f"{name} {value:.6g}" for name, value in self.factors.items())
            lines.append(f"factors: {', '.join(named)}")
        undrawn = [row.role for row in self.rows if not row.drawn]
        which = f" ({', '.join(dict.fromkeys(undrawn))})" if undrawn else ""
        drawn = len(self.rows) - len(undrawn)
        lines.append(f"drawn: {drawn} weights; left as they were: {len(undrawn)}{which}")
        lines.append(f"norms removed: {len(self.norms_removed)}")
        if self.mu is not None:
            lines.append(f"largest norm of {self.tokens} tokens: mu = {self.mu:.4g}")
        return lines

    def __str__(self) -> str:
        return self.table()

    @property
    def moved(self) -> dict[str, float]:
        """How far each weight that was loaded from a checkpoint moved."""
        return {row.name: row.moved for row in self.rows if row.moved is not None}

    def line(self) -> str:
        """Return a summary in one line."""
        drawn = sum(row.drawn for row in self.rows)
        did = f"{drawn} of {len(self.rows)} weights drawn, {len(self.norms_removed)} norms removed"
        return f"{self.title}: {did}"


def reported(report: InitializationReport) -> InitializationReport:
    """Log a report and return it; weights with ``moved`` came from a checkpoint."""
    if report.moved:
        say_moves(logger, report.line(), report.moved)
    else:
        logger.info("%s", report.line())
    return report
