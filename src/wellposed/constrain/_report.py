"""What attaching did to each weight, and how far from its set each one is now."""

from __future__ import annotations

from dataclasses import dataclass

from wellposed.text_table import aligned


@dataclass(frozen=True)
class ConstrainedWeight:
    """One constrained weight: where it is, what it became, how far it moved."""

    path: str
    """Full dotted name of the parameter."""
    shape: tuple[int, int]
    gain: float
    """The size of the set: the common singular value ``g`` of ``W^T W = g^2 I``, or the bound of
    the other sets."""
    moved_frobenius: float
    """``|W' - W|_F / |W|_F``: 0 when the weight was in its set already."""
    moved_spectral: float
    """``|W' - W|_2 / |W|_2``."""
    error_before: float
    """How far the weight was from its set before attaching, as `Constraint.error` measures it."""
    error_after: float
    """The same after it, measured in float64 on the weight as stored."""
    also: tuple[str, ...] = ()
    """Other names of the same tied parameter; it is constrained once."""


@dataclass(frozen=True)
class ConstraintReport:
    """Every weight that was constrained (or, after a dry run, would be)."""

    rows: tuple[ConstrainedWeight, ...]
    dry_run: bool = False

    @property
    def moved(self) -> dict[str, float]:
        """``|W' - W|_F / |W|_F`` of each weight by its name."""
        return {row.path: row.moved_frobenius for row in self.rows}

    def summary(self, to: str = "orthogonal") -> str:
        """Return what was held in which set as one line.

        >>> row = ConstrainedWeight("layer.weight", (4, 4), 1.25, 0.5, 0.25, 0.9, 1e-7)
        >>> ConstraintReport((row,)).summary()
        'constrain_: 1 weights in the set orthogonal of size 1.25'
        """
        sizes = sorted({row.gain for row in self.rows})
        size = f"{sizes[0]:.3g}" if len(sizes) == 1 else f"{sizes[0]:.3g} to {sizes[-1]:.3g}"
        return f"constrain_: {len(self.rows)} weights in the set {to} of size {size}"

    def table(self) -> str:
        """Return the report as aligned text, one weight to a line.

        >>> row = ConstrainedWeight("layer.weight", (4, 4), 1.0, 0.5, 0.25, 0.9, 1e-7)
        >>> ConstraintReport((row,)).table().splitlines()[1].split()
        ['layer.weight', '4x4', '1', '0.5', '0.25', '0.9', '1e-07']
        """
        head = ("weight", "shape", "gain", "moved F", "moved 2", "error before", "error after")
        body = []
        for row in self.rows:
            name = " = ".join((row.path, *row.also))
            moved = (row.moved_frobenius, row.moved_spectral, row.error_before, row.error_after)
            numbers = [f"{row.gain:.3g}", *(f"{value:.2g}" for value in moved)]
            body.append((name, f"{row.shape[0]}x{row.shape[1]}", *numbers))
        return aligned([head, *body])

    def __str__(self) -> str:
        return self.table()


@dataclass(frozen=True)
class OrthogonalityErrors:
    """How far each constrained weight is from its set, measured in float64 on the weight as stored.

    See `Constraint.error` for what is measured in each set.
    """

    by_path: dict[str, float]

    @property
    def worst(self) -> float:
        """The largest error of all weights."""
        return max(self.by_path.values())

    def table(self) -> str:
        """Return the errors as aligned text, largest first.

        >>> print(OrthogonalityErrors({"a.weight": 1e-7, "b.weight": 2e-6}).table())
        weight    error
        b.weight  2e-06
        a.weight  1e-07
        """
        ordered = sorted(self.by_path.items(), key=lambda item: -item[1])
        return aligned([("weight", "error"), *((path, f"{error:.2g}") for path, error in ordered)])
