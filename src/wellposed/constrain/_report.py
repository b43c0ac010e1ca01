"""Results of `constrain_`: how far weights moved, and how far they are from their sets."""

from __future__ import annotations

from dataclasses import dataclass

from wellposed.constrain._start import ConstrainedWeight


class ConstraintWarning(UserWarning):
    """A constrained weight needs attention; each handle warns once of each kind."""


@dataclass(frozen=True)
class ConstraintReport:
    """Every weight that was constrained."""

    rows: tuple[ConstrainedWeight, ...]

    @property
    def moved(self) -> dict[str, float]:
        """``|W' - W|_F / |W|_F`` of each weight by its name."""
        return {row.path: row.moved_frobenius for row in self.rows}

    def summary(self, to: str = "orthogonal") -> str:
        """Return how many weights are in which set as one line.

        >>> row = ConstrainedWeight("layer.weight", (4, 4), 1.25, 0.5, 0.9, 1e-7)
        >>> ConstraintReport((row,)).summary()
        'constrain_: 1 weights in the set orthogonal of size 1.25'
        """
        sizes = sorted({row.size for row in self.rows})
        size = f"{sizes[0]:.3g}" if len(sizes) == 1 else f"{sizes[0]:.3g} to {sizes[-1]:.3g}"
        return f"constrain_: {len(self.rows)} weights in the set {to} of size {size}"


@dataclass(frozen=True)
class ConstraintErrors:
    """Distance of each constrained weight from its set, as `Constraint.error` measures it."""

    by_path: dict[str, float]

    @property
    def worst(self) -> float:
        """The largest error of all weights."""
        return max(self.by_path.values())
