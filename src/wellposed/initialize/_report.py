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
    dry_run: bool = False

    def table(self) -> str:
        """Return the report as aligned text, one weight to a line.

        >>> row = InitializedWeight("v.weight", "value", "encoder", 0, (4, 4), 0.5, True, 0.02, 0.5, 0.25)
        >>> InitializationReport("T-Fixup", (row,)).table().splitlines()[-1].split()
        ['v.weight', 'value', '4x4', '0.5', '0.02', '0.5', '0.25', '-']
        """
        head = (
            "weight",
            "role",
            "shape",
            "factor",
            "std found",
            "std before",
            "std after",
            "input norm",
        )
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
            lines.append(
                "factors: "
                + ", ".join(f"{name} {value:.6g}" for name, value in self.factors.items())
            )
        kept = [row.role for row in self.rows if not row.drawn]
        which = f" ({', '.join(dict.fromkeys(kept))})" if kept else ""
        lines.append(
            f"drawn: {len(self.rows) - len(kept)} weights; left as they were: {len(kept)}{which}"
        )
        lines.append(f"norms removed: {len(self.norms_removed)}")
        if self.largest_bias:
            lines.append(
                f"largest bias of output and feed-forward layers: {self.largest_bias:.4g}"
                " (zero_biases: 0)"
            )
        for stack, norm in self.entering.items():
            assumed = (
                f", in the derivation {self.assumed[stack]:.4g}" if stack in self.assumed else ""
            )
            lines.append(f"token norm that enters the {stack}: {norm:.4g}{assumed}")
        return lines

    def __str__(self) -> str:
        return self.table()


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
