"""What an initialisation did to each weight."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from wellposed.text_table import aligned, format_number


@dataclass(frozen=True)
class InitializedWeight:
    """One weight: what it is, the factor on it, and its size on the way."""

    name: str
    """Full dotted name of the parameter."""
    role: str
    """Role as in `find_roles`; ``embedding``, ``output_embedding`` and ``other`` for what has
    none."""
    stack: str | None
    """encoder, decoder, or None outside the layers."""
    layer: int | None
    shape: tuple[int, int]
    factor: float
    """What the drawn weight was multiplied by; 1 where it was left alone or only drawn."""
    drawn: bool
    """Whether new numbers were drawn; a weight that ``leave`` names is left alone, bit for bit."""
    std_found: float
    """Standard deviation in the model as it came."""
    std_before: float
    """Standard deviation of the draw, before the factor."""
    std_after: float
    """Standard deviation now."""
    input_norm: float | None = None
    """Mean Euclidean norm of the tokens that enter the weight (embeddings: that leave it), where a
    batch was given."""
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
    largest_bias: float = 0.0
    """Largest magnitude of the biases of output and feed-forward layers; 0 in the paper's code."""
    entering: Mapping[str, float] = field(default_factory=dict)
    """Mean token norm that enters the first layer of each stack, where a batch was given."""
    assumed: Mapping[str, float] = field(default_factory=dict)
    """The same norm in the derivation; see the note on sqrt(d) in `t_fixup_`."""
    layers: int = 0
    """Of the deepest stack, where T-Fixup's rule was followed; else 0."""
    dry_run: bool = False

    @property
    def adam_rate_factor(self) -> float:
        """What to multiply the learning rate of Adam by that suits 6 layers; 1 for up to 6.

        Empirical: `(6 / N)^(3/4)`. The rule is derived for steps of SGD; a step of Adam does not
        shrink with the weights, and its first one moves the output as `N^.72` (6 to 1,000 layers).
        After 30 steps the best rate falls as `N^-.6` and the largest that never overshoots as
        `N^-.9` (6 to 300 layers of width 32, `benchmarks/t_fixup_rates.csv`).

        >>> round(InitializationReport("T-Fixup", (), layers=96).adam_rate_factor, 3)
        0.125
        """
        return (6 / max(6, self.layers)) ** 0.75

    def table(self) -> str:
        """Return the report as aligned text, one weight to a line.

        >>> row = InitializedWeight("v.weight", "value", "encoder", 0, (4, 4), 0.5, True, 0.02, 0.5, 0.25)
        >>> InitializationReport("T-Fixup", (row,)).table().splitlines()[-1].split()
        ['v.weight', 'value', '4x4', '0.5', '0.02', '0.5', '0.25', '-']
        """
        stds = ("std found", "std before", "std after")
        head = ("weight", "role", "shape", "factor", *stds, "input norm")
        body = [
            (
                row.name,
                row.role,
                "x".join(map(str, row.shape)),
                f"{row.factor:.6g}" if row.drawn else "kept",
                *map(format_number, (row.std_found, row.std_before, row.std_after, row.input_norm)),
            )
            for row in self.rows
        ]
        return "\n".join([*self._lines(), aligned([head, *body], "llr")])

    def _lines(self) -> list[str]:
        lines = [self.title + (" (dry run: the model is as it was)" if self.dry_run else "")]
        if self.factors:
            named = (f"{name} {value:.6g}" for name, value in self.factors.items())
            lines.append(f"factors: {', '.join(named)}")
        kept = [row.role for row in self.rows if not row.drawn]
        which = f" ({', '.join(dict.fromkeys(kept))})" if kept else ""
        drawn = len(self.rows) - len(kept)
        lines.append(f"drawn: {drawn} weights; left as they were: {len(kept)}{which}")
        lines.append(f"norms removed: {len(self.norms_removed)}")
        if self.adam_rate_factor < 1:
            told = f"{self.adam_rate_factor:.2g} times the rate that suits 6 layers"
            lines.append(f"Adam at {self.layers} layers: about {told}, as measured")
        if self.largest_bias:
            biases = "largest bias of output and feed-forward layers"
            lines.append(f"{biases}: {self.largest_bias:.4g} (zero_biases: 0)")
        for stack, norm in self.entering.items():
            line = f"token norm that enters the {stack}: {norm:.4g}"
            if stack in self.assumed:
                line += f", in the derivation {self.assumed[stack]:.4g}"
            lines.append(line)
        return lines

    def __str__(self) -> str:
        return self.table()

    @property
    def moved(self) -> dict[str, float]:
        """How far each weight that was loaded from a checkpoint moved."""
        return {row.name: row.moved for row in self.rows if row.moved is not None}

    def line(self) -> str:
        """Return what was done in one line."""
        drawn = sum(row.drawn for row in self.rows)
        return (
            f"{self.title}: {drawn} of {len(self.rows)} weights drawn,"
            f" {len(self.norms_removed)} norms removed"
        )


@dataclass(frozen=True)
class DTFixupReport(InitializationReport):
    """The report of `dt_fixup_`: also the token norms that were measured."""

    mu: float = math.nan
    """Largest token norm that entered the new layers, or its quantile where that was asked for; the
    factor's mu."""
    largest: float = math.nan
    """Largest token norm."""
    quantile: float = math.nan
    """The ``level`` quantile of the token norms."""
    level: float = math.nan
    tokens: int = 0
    """Tokens measured."""

    def _lines(self) -> list[str]:
        measured = (
            f"token norms of {self.tokens} tokens: largest {self.largest:.4g}, {self.level:g}"
            " quantile "
        )
        return [*super()._lines(), f"{measured}{self.quantile:.4g}; mu = {self.mu:.4g}"]
