"""The matrices that a handle holds: their common interface, two of the sets, batches of one shape,
and what attaching did to each."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wellposed.constrain._moments import LIE_MARK, have_stepped, restart
from wellposed.constrain._select import Candidate
from wellposed.errors import ConvergenceError
from wellposed.linalg import Retraction, Workspace, cap_spectral_norms_, certified_spectral_norm
from wellposed.linalg.sharded import is_sharded, read, write_
from wellposed.text_table import aligned

# Optimizers whose step depends on where the weight is (parts of the names of their classes): the
# weight may not be zero under them.
_READS_WEIGHT = (
    *("adafactor", "lamb", "lars", "adamp", "sgdp", "fromage", "nero", "hyperball"),
    *("prodigy", "madgrad", "lookahead", "schedulefree"),
)
# Entries of one stacked operand. A handful of copies of it stays in the cache of a CPU, and below
# about 400 MB in float32 on an accelerator.
_CPU_ENTRIES, _ENTRIES = 2**18, 2**24


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
        lines: list[tuple[str, ...]] = [head]
        for row in self.rows:
            name = " = ".join((row.path, *row.also))
            shape = "x".join(map(str, row.shape))
            moved = (row.moved_frobenius, row.moved_spectral, row.error_before, row.error_after)
            lines.append((name, shape, f"{row.gain:.3g}", *(f"{value:.2g}" for value in moved)))
        return aligned(lines)

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


class Weight:
    """A matrix that is put back into a set after each step; a set is a subclass.

    The methods that are empty here are those that a set which is projected to has no need of.
    """

    decays = False
    """Whether weight decay keeps the matrix in the set."""
    stored_dtype: torch.dtype | None = None
    """The dtype that copies were made for; None where any dtype will do."""
    is_steered = False
    """Whether the gradient is put into coordinates of the set before the optimizer steps."""
    stacked = 2**14
    """Entries up to which a CPU saves more by fewer calls than it loses by stacking."""
    tolerance = 0.0
    """The error up to which a matrix counts as one of the set already."""

    def __init__(self, place: Candidate, optimizer: Optimizer, size: float) -> None:
        assert place.parameter is not None  # what cannot be held was refused before
        self.place = place
        self.path = place.label
        self.parameter: nn.Parameter = place.parameter
        self.held: Sequence[Candidate] = [place]
        self.optimizer = optimizer
        self.gain = size

    @property
    def value(self) -> Tensor:
        """The matrix, without its graph: a view of the parameter."""
        return self.place.seen(self.parameter.detach())

    @property
    def gradient(self) -> Tensor | None:
        """The part of the gradient that belongs to the matrix, a view of it."""
        gradient = self.parameter.grad
        return None if gradient is None else self.place.seen(gradient)

    @property
    def batch_key(self) -> tuple[object, ...] | None:
        """Key of matrices that are handled in one batched product; None for a matrix handled alone."""
        if is_sharded(self.parameter):
            return None
        return tuple(self.value.shape), self.parameter.dtype, self.parameter.device, self.gain

    @property
    def entries(self) -> int:
        """Number of entries that the matrix adds to a batch."""
        return self.value.numel()

    def error_of(self, matrix: Tensor) -> float:
        """Measure how far a matrix is from the set."""
        raise NotImplementedError

    def error(self) -> float:
        """Measure how far the matrix, as stored, is from the set."""
        return self.error_of(read(self.value))

    def nearest(self, whole: Tensor) -> Tensor:
        """Return the matrix of the set nearest to ``whole``, in float64 or as it is to be stored."""
        raise NotImplementedError

    def start(self, *, dry_run: bool) -> ConstrainedWeight:
        """Move the matrix into the set, unless it is there, and tell how far."""
        whole = read(self.value)
        before = self.error_of(whole)
        is_moved = not before <= self.tolerance
        inside = self.nearest(whole) if is_moved else whole
        fro, two = (_moved(whole, inside, order) if is_moved else 0.0 for order in ("fro", 2))
        after = self.error_of(inside.to(whole.dtype))
        if not dry_run:
            self.begin_(inside, is_moved=is_moved)
        shape, also = (whole.shape[0], whole.shape[1]), self.place.also
        return ConstrainedWeight(self.path, shape, self.gain, fro, two, before, after, also)

    def begin_(self, inside: Tensor, *, is_moved: bool) -> None:
        """Store the matrix to start from."""
        if is_moved:
            write_(self.value, inside)

    @classmethod
    def retract_(cls, weights: Sequence[Any], work: Workspace, /) -> Retraction:
        """Put matrices of one `batch_key`, or one alone, back into the set; nothing is written when
        a step is not finite."""
        raise NotImplementedError

    @classmethod
    def project_gradients_(cls, weights: Sequence[Any], work: Workspace, /) -> None:
        """Put the gradients of steered weights of one `batch_key`, or of one alone, into the
        coordinates the optimizer is to step in."""

    def hooks(self) -> list[Any]:
        """Register the hooks by which the set watches the model; return their removable handles."""
        return []

    def remember_(self, *, decayed: bool) -> None:
        """Keep what the retraction needs."""

    def forget_(self) -> None:
        """Rely on nothing that was noted at the last step: free ones may have followed."""

    def accept_free_step_(self) -> None:
        """Prepare the retraction of a step before which `remember_` was not called."""

    def restore_(self) -> None:
        """Undo `remember_` when the step it prepared never came to its end."""

    def claim_state(self) -> bool:
        """Return whether moments in other coordinates had to be restarted."""
        state = self.optimizer.state.get(self.parameter, {})
        stale = state.pop(LIE_MARK, None) is not None and bool(state) and have_stepped(state)
        if stale:
            restart(self.optimizer, self.parameter)
        return stale

    def mark_state(self, drift: float) -> None:
        """Store in the optimizer's state what a resumed run needs."""

    def release_state(self) -> None:
        """Restart moments that only a constrained step understands."""


class SpectralWeight(Weight):
    """``|W|_2 <= gain``, proved after each step; it steps by its own gradient. With ``rms``, ``size`` is
    in units of sqrt(fan_out / fan_in)."""

    decays = True

    def __init__(self, place: Candidate, optimizer: Optimizer, size: float, *, rms: bool) -> None:
        super().__init__(place, optimizer, size)
        rows, columns = self.value.shape
        self.gain *= math.sqrt(rows / columns) if rms else 1.0

    stacked = 2**16
    before = 0.0
    """What was proved of the norm before the last step, where the next proof begins."""

    def error_of(self, matrix: Tensor) -> float:
        """Measure ``max(0, |W|_2 / gain - 1)`` with the certified norm."""
        return max(0.0, float(certified_spectral_norm(matrix)) / self.gain - 1.0)

    def nearest(self, whole: Tensor) -> Tensor:
        """Cap the singular values."""
        inside = whole.clone()
        cap_spectral_norms_([inside], bound=self.gain, nearest=True)
        return inside

    @classmethod
    def retract_(cls, weights: Sequence[Self], _work: Workspace, /) -> Retraction:
        """Cap the singular values of all; the largest is reported."""
        values = [weight.value for weight in weights]
        matrices = [read(value) for value in values]
        before = [weight.before for weight in weights]
        capped = cap_spectral_norms_(matrices, bound=weights[0].gain, before=before)
        for weight, cap in zip(weights, capped, strict=True):
            weight.before = cap.before
        if is_sharded(values[0]):
            write_(values[0], matrices[0])
        return Retraction(*max(capped, key=lambda cap: cap.before))


class ColumnWeight(Weight):
    """Columns of length ``gain``: the images of the basis vectors, and of an embedding the vectors
    of its tokens; it steps by its own gradient."""

    _before: Tensor | None = None
    """The matrix from before the step, while the parameter holds the bare step."""

    @property
    def tolerance(self) -> float:
        """The rounding of the entries, and of the sum of squares that measures them."""
        measured = len(self.value) * torch.finfo(torch.float64).eps
        return 2.0 * torch.finfo(self.parameter.dtype).eps + measured

    @property
    def batch_key(self) -> tuple[object, ...] | None:
        """As of every matrix; one with a vector of padding is worked on by itself."""
        return None if self.place.padding is not None else super().batch_key

    def error_of(self, matrix: Tensor) -> float:
        """Measure ``max_j | |W e_j| / gain - 1 |``; a vector of padding may be zero."""
        return float((self._lengths(matrix) / self.gain - 1.0).abs().max())

    def nearest(self, whole: Tensor) -> Tensor:
        """Divide each column by its length."""
        lengths = self._lengths(whole)
        has_none = ~(torch.isfinite(lengths) & (lengths > 0.0))
        if bool(has_none.any()):
            columns = torch.nonzero(has_none)[..., -1].tolist()
            count = f"{len(columns)} of {lengths.numel()} columns are zero or not finite"
            raise ConvergenceError(f"{count} and have no direction: {columns[:5]}")
        return (whole.double() * (self.gain / lengths).unsqueeze(-2)).to(whole.dtype)

    @classmethod
    def retract_(cls, weights: Sequence[Self], _work: Workspace, /) -> Retraction:
        """Divide each column of each matrix by its length."""
        values = [weight.value for weight in weights]
        for weight in weights:
            if weight._before is not None:
                weight.value.add_(weight._before)
                weight._before = None
        whole = read(values[0]) if len(values) == 1 else torch.stack(values)
        write_matrices_(values, weights[0].nearest(whole))
        return Retraction("columns")

    def remember_(self, *, decayed: bool) -> None:
        """Put zero in the place of a matrix that decays, so that the step leaves the decay out."""
        if decayed:
            self._before = self.value.clone()
            self.value.zero_()

    def restore_(self) -> None:
        """Undo `remember_` when the step it prepared never came to its end."""
        if self._before is not None:
            self.value.copy_(self._before)
            self._before = None

    def _lengths(self, matrices: Tensor) -> Tensor:
        """Return the lengths of the columns; that of a zero vector of padding as the one it should
        have."""
        lengths = torch.linalg.vector_norm(matrices, dim=-2, dtype=torch.float64)
        padding = self.place.padding
        if padding is not None:
            own = lengths[..., padding]
            lengths[..., padding] = own.where(own != 0.0, self.gain)
        return lengths


def batches(weights: Iterable[Weight], *, batched: bool | None) -> list[list[Weight]]:
    """Group weights that one batched product can serve; ``None`` does so where it is faster than a
    loop."""
    groups: dict[object, list[Weight]] = {}
    for weight in weights:
        on_cpu = weight.parameter.device.type == "cpu"
        wanted = (not on_cpu or weight.entries <= weight.stacked) if batched is None else batched
        key = weight.batch_key if wanted else None
        groups.setdefault(id(weight) if key is None else (type(weight), key), []).append(weight)
    chunks: list[list[Weight]] = []
    for group in groups.values():
        room = _CPU_ENTRIES if group[0].parameter.device.type == "cpu" else _ENTRIES
        size = max(1, room // group[0].entries)
        chunks.extend(group[start : start + size] for start in range(0, len(group), size))
    return chunks


def write_matrices_(targets: Sequence[Tensor], values: Tensor) -> None:
    """Give one matrix its values, unless they lie in its own memory, or several those of a stack;
    either may be transposed."""
    whole = values if values.shape[-2:] == targets[0].shape else values.mT
    if len(targets) > 1:
        torch._foreach_copy_(list(targets), list(whole.unbind()))
    elif is_sharded(targets[0]) or targets[0].data_ptr() != whole.data_ptr():
        write_(targets[0], whole)


def reads_weight_size(optimizer: Optimizer) -> bool:
    """Whether the optimizer's step depends on the weight itself, by the names of its classes."""
    names = [kind.__name__.lower() for kind in type(optimizer).__mro__]
    return any(part in name for name in names for part in _READS_WEIGHT)


def _moved(first: Tensor, second: Tensor, order: Literal["fro", 2]) -> float:
    wide = torch.float32 if first.device.type == "mps" else torch.float64
    whole = torch.linalg.matrix_norm(first.to(wide), order)
    part = torch.linalg.matrix_norm(second.to(wide) - first.to(wide), order)
    return float(part / whole.clamp_min(torch.finfo(wide).tiny))
