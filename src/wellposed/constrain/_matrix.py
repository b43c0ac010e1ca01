"""Machinery of all sets: a matrix that a handle keeps in its set, what a step needs remembered of it, and
batches of one shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wellposed.constrain._moments import LIE_MARK, NOTE, are_lie, have_stepped, restart
from wellposed.constrain._select import Candidate
from wellposed.linalg import (
    Retraction,
    Workspace,
    compute_dtype,
    is_sharded,
    nearest_orthogonal,
    read,
    tall,
    write_,
)
from wellposed.registry import Registry
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
# Reachable max |W^T W / g^2 - I| as stored. Rounding each entry by a part of at most u moves an
# entry of W^T W by at most 2 u + u^2 (Cauchy and Schwarz, columns of length 1), and it comes that
# far: see the test. With u = 2^-8 that is 7.83e-3 for bfloat16, with 2^-11 9.8e-4 for float16; the
# float32 copy that is rounded adds its own 1e-5.
TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# Part of the tolerance by which rounding may take the error beyond its bound.
_ROUNDING = 0.1


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


@dataclass(frozen=True)
class MatrixSet:
    """A set of matrices: four verbs, and the few facts by which `ConstrainedMatrix` prepares a step.

    Matrices of one shape whose sets are equal are worked on together. To add a set, subclass this and
    register it in `SETS`; `error` and `nearest` are enough.
    """

    size: float
    """The common singular value, the bound or the length."""
    tolerance: float = 0.0
    """The error up to which a matrix counts as one of the set already."""
    is_steered: bool = False
    """Whether `state` changes the gradient, and of a square matrix what the moments mean."""
    decays: ClassVar[bool] = False
    """Whether weight decay keeps a matrix in the set; if not, it is left out of the step."""
    keeps_master: ClassVar[bool] = False
    """Whether half weights are kept in float32, or every step smaller than their spacing is lost."""
    stacked: ClassVar[int] = 2**14
    """Entries up to which a CPU saves more by fewer calls than it loses by stacking."""

    @classmethod
    def of(cls, size: float, place: Candidate) -> Self:
        """Return the set of this size for one weight."""
        assert place.parameter is not None
        return cls(size, TOLERANCES[place.parameter.dtype])

    def error(self, matrix: Tensor) -> float:
        """Measure how far a matrix is from the set."""
        raise NotImplementedError

    def nearest(self, matrix: Tensor) -> Tensor:
        """Return the nearest matrix of the set, in float64 or in the dtype it is to be stored in; of a
        stack, that of each. What is not finite has none: a `ConvergenceError` keeps it unwritten."""
        raise NotImplementedError

    def state(self, matrices: Sequence[Any], work: Workspace) -> None:
        """Before a step: put the gradients into the coordinates that the optimizer is to step in."""

    def retract(self, matrices: Sequence[Any], work: Workspace) -> Retraction:
        """After a step: put matrices of one `ConstrainedMatrix.batch_key`, or one alone, back into the
        set, by `nearest` if a set has no better way. Nothing is written if a step is not finite."""
        del work
        values = [each.value for each in matrices]
        for each in matrices:
            if each.is_displaced and each.before is not None:
                each.value.add_(each.before)
                each.is_displaced = False
        whole = read(values[0]) if len(values) == 1 else torch.stack(values)
        write_matrices_(values, self.nearest(whole))
        return Retraction("nearest")


SETS = Registry[type[MatrixSet]]("set", entry_points="wellposed.sets")
"""Sets by the name that ``constrain_(to=)`` gives."""


class ConstrainedMatrix:
    """A matrix that is put back into its set after each step, and what a step needs remembered."""

    def __init__(
        self,
        place: Candidate,
        optimizer: Optimizer,
        matrix_set: MatrixSet,
        refit: Callable[[Tensor], MatrixSet] | None = None,
    ) -> None:
        assert place.parameter is not None  # a place without one was refused before
        self.place, self.path = place, place.label
        self.slices: Sequence[Candidate] = [place]
        self.parameter: nn.Parameter = place.parameter
        self.optimizer = optimizer
        self.set = matrix_set
        self._refit = refit
        rows, columns = self.value.shape
        self.entries = rows * columns
        # The moments of a fused weight belong to all its slices, so none of them can be in
        # coordinates of its own.
        self.is_square = matrix_set.is_steered and rows == columns and not place.part
        self.stored_dtype = self.dtype = self.parameter.dtype
        if matrix_set.keeps_master:
            self.dtype = compute_dtype(self.parameter)
        self.master: Tensor | None = None
        self._exposed: Tensor | None = None
        self._master_key = "_".join([f"{NOTE}float32", *map(str, place.part)])
        self.notes = (self._master_key,)
        """Names of the entries that the set keeps beside the moments, which `release` takes away."""
        self.before: Tensor | None = None
        """The matrix from before the step."""
        self.is_displaced = False
        """Whether the parameter was zeroed, so that it holds the bare step."""
        self.drift = math.inf
        """Bound on the error of the matrix as the last step left it."""
        self.proved = 0.0
        """The norm that was proved before the last step, from which the next proof begins."""
        # Whether `before` holds the matrix as the last step left it.
        self._kept = False
        # What the optimizer kept for the parameter after the last step; loading puts another there.
        self._state: dict[str, object] | None = None
        self._is_fresh = True

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
    def is_half(self) -> bool:
        """Whether the parameter is the rounded copy of a master."""
        return self.dtype != self.stored_dtype

    @property
    def point(self) -> Tensor | None:
        """The matrix from before the step, as exact as it is known."""
        return self.before if self.master is None else self.master

    @property
    def batch_key(self) -> tuple[object, ...] | None:
        """Key of matrices that are handled in one batched product; None for a matrix handled alone."""
        gradient, dtype = self.parameter.grad, self.parameter.dtype
        if self.is_half or is_sharded(self.parameter):
            return None
        if self.set.keeps_master and (gradient is None or gradient.dtype != dtype):
            return None
        shape, device = tuple(self.value.shape), self.parameter.device
        return self.set, shape, dtype, device, self.is_square, self.is_displaced

    def error(self) -> float:
        """Measure how far the matrix, as stored, is from the set."""
        return self.set.error(read(self.value))

    def start(self, *, dry_run: bool) -> ConstrainedWeight:
        """Move the matrix into the set, unless it is there, and tell how far."""
        whole = read(self.value)
        before = self.set.error(whole)
        is_moved = not before <= self.set.tolerance
        inside = self.set.nearest(whole) if is_moved else whole
        fro, two = (_moved(whole, inside, order) if is_moved else 0.0 for order in ("fro", 2))
        after = self.set.error(inside.to(whole.dtype))
        if is_moved and not dry_run:
            write_(self.value, inside)
        if self.is_half and not dry_run:
            self._adopt_master(inside.to(self.dtype) if is_moved else self._saved_master())
        shape, also = (whole.shape[0], whole.shape[1]), self.place.also
        return ConstrainedWeight(self.path, shape, self.set.size, fro, two, before, after, also)

    def watch(self) -> list[Any]:
        """Register the hooks by which the set watches the model; return their removable handles."""
        return []

    def forget(self) -> None:
        """Measure the error and the moments at the next step: free steps may have come between."""
        self.is_displaced = self._kept = False
        self._state, self.drift = None, math.inf
        if self.is_half and self.master is None:
            self._adopt_master(None)

    def claim(self) -> bool:
        """Follow edits and loaded states before a step; return whether moments had to be restarted,
        because they are in other coordinates.

        The moments of a square steered matrix are marked as Lie coordinates.
        """
        if self._refit and self._is_fresh and self.error() > self.set.tolerance:
            self.set = self._refit(read(self.value))  # of a checkpoint, fitted to other weights
        if self.master is not None:
            self._refresh_master(self.master)
        else:
            # torch's version of a tensor does not count what goes through ``.data``, so the entries
            # are compared; by `dist`, which on a CPU takes half the time of `equal`.
            before, value = self.before, self.value
            if self._kept and before is not None:
                self._kept = _alike(before, value) and float(torch.dist(before, value)) == 0.0
            self.drift = self.drift if self._kept else math.inf
        state = self.optimizer.state.get(self.parameter)
        is_known, self._state = state is self._state, state
        if not state or (is_known and self.is_square):
            return False
        if self.is_square and are_lie(state):
            # The drift that was saved with these weights, if it is these: the run goes on bit for bit.
            saved, point = state[LIE_MARK], self.value if self.master is None else self.master
            rounding = _ROUNDING * TOLERANCES[self.dtype]
            if saved is not None and self.set.error(read(point)) <= saved + rounding:
                self.drift = saved
            return False
        if not self.is_square and state.pop(LIE_MARK, None) is None:
            return False
        stale = bool(state) and have_stepped(state)
        if stale:
            restart(self.optimizer, self.parameter)
        state = self.optimizer.state.get(self.parameter)
        if self.is_square and state:
            state[LIE_MARK] = None
        return stale

    def remember(self, *, decayed: bool) -> None:
        """Keep what the retraction needs. The parameter is zeroed, so that it will hold the bare step,
        if it decays or is rounded."""
        is_rounded = self.is_half and not reads_weight_size(self.optimizer)
        self.is_displaced = not self.set.decays and (decayed or is_rounded)
        if self.master is None and (self.is_square or self.is_displaced) and not self._kept:
            self._copy_before()
        if self.is_displaced:
            self.value.zero_()

    def restore(self) -> None:
        """Undo `remember` when the step it prepared never came to its end."""
        if self.is_displaced and self.point is not None:
            self.value.copy_(self.point)
        self.is_displaced = False

    def accept_free_step(self) -> None:
        """Prepare the retraction of a step before which `remember` was not called, and which
        therefore is none of this set."""
        if self.set.keeps_master:
            self.start(dry_run=False)
            if self.master is None and self.is_square:
                self._copy_before()
        self.forget()

    def settle(self, drift: float) -> None:
        """Note what a resumed run needs beside the moments of this step: the drift, which marks Lie
        coordinates, and the bytes of the float32 copy."""
        self.drift, self._is_fresh = drift, False
        # A sharded weight would have to be gathered to be compared: it is measured at every step
        # instead.
        self._kept = self.is_square and not self.is_half and not is_sharded(self.parameter)
        if self._kept:
            self._copy_before()
        elif not self.is_square:
            self.before = None
        self._state = state = self.optimizer.state.get(self.parameter)
        # SGD without momentum keeps nothing there, and does not mind.
        if not state and type(self.optimizer) is not torch.optim.SGD:
            return
        if self.is_square:
            self._state = state = self.optimizer.state[self.parameter]
            state[LIE_MARK] = drift
        if self.master is not None and not is_sharded(self.parameter):
            self._exposed = self.master.view(torch.uint8)
            self.optimizer.state[self.parameter][self._master_key] = self._exposed

    def release(self) -> None:
        """Restart moments that are in Lie coordinates, and take away what was noted beside them."""
        self.master = self._exposed = None
        state = self.optimizer.state.get(self.parameter)
        if state is None:
            return
        for name in self.notes:
            state.pop(name, None)
        if LIE_MARK in state:
            del state[LIE_MARK]
            if state:
                restart(self.optimizer, self.parameter)
        if not state:
            self.optimizer.state.pop(self.parameter, None)

    def store(self, values: Sequence[Tensor], result: Tensor) -> None:
        """Write a result to the values of a batch, and to the master of a matrix alone."""
        write_matrices_(values, result)
        if self.master is not None:
            write_matrices_([self.master], result)

    def _copy_before(self) -> None:
        if self.before is not None and _alike(self.before, self.value):
            self.before.copy_(self.value)
        else:
            self.before = self.value.clone()

    def _saved_master(self) -> Tensor | None:
        """Return the float32 copy that a checkpoint brought beside the moments, if it is that of
        the stored weight."""
        saved = self.optimizer.state.get(self.parameter, {}).get(self._master_key)
        if saved is None or is_sharded(self.parameter):
            return None
        # Optimizers cast what they load to the dtype of the parameter; every float type holds the
        # numbers of a byte.
        value = saved.to(torch.uint8).view(self.dtype)
        is_own = value.shape == self.value.shape and _same(value.to(self.value.dtype), self.value)
        return value if is_own else None

    def _adopt_master(self, value: Tensor | None) -> None:
        """Set the float32 copy; to the matrix nearest to what is stored if ``value`` is None."""
        if value is None:
            value = nearest_orthogonal(read(self.value).to(self.dtype), gain=self.set.size).weight
        self.master = self.value.to(self.dtype).clone(memory_format=torch.contiguous_format)
        write_(self.master, value)

    def _refresh_master(self, master: Tensor) -> None:
        """Follow a state that was loaded into the optimizer, or an edit, since the last step."""
        saved = self.optimizer.state.get(self.parameter, {}).get(self._master_key)
        is_reloaded = saved is not None and saved is not self._exposed
        if is_reloaded or not _same(master.to(self.parameter.dtype), self.value):
            self._adopt_master(self._saved_master())
            self.drift = math.inf


def batches(
    matrices: Iterable[ConstrainedMatrix], *, batched: bool | None
) -> list[list[ConstrainedMatrix]]:
    """Group matrices that one batched product can serve; ``None`` does so where it is faster than a
    loop."""
    groups: dict[object, list[ConstrainedMatrix]] = {}
    for each in matrices:
        on_cpu = each.parameter.device.type == "cpu"
        wanted = (not on_cpu or each.entries <= each.set.stacked) if batched is None else batched
        key = each.batch_key if wanted else None
        groups.setdefault(id(each) if key is None else key, []).append(each)
    chunks: list[list[ConstrainedMatrix]] = []
    for group in groups.values():
        room = _CPU_ENTRIES if group[0].parameter.device.type == "cpu" else _ENTRIES
        size = max(1, room // group[0].entries)
        chunks.extend(group[start : start + size] for start in range(0, len(group), size))
    return chunks


def joined(tensors: Sequence[Tensor], dtype: torch.dtype, name: str, work: Workspace) -> Tensor:
    """Return the one matrix, its own memory where that can be worked on, or a stack of several, tall."""
    if len(tensors) == 1:
        return tall(read(tensors[0]).to(dtype))
    matrices = [tall(tensor.detach()) for tensor in tensors]
    return torch.stack(matrices, out=work(name, (len(matrices), *matrices[0].shape), matrices[0]))


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


def _alike(first: Tensor, second: Tensor) -> bool:
    return (first.shape, first.device) == (second.shape, second.device)


def _same(first: Tensor, second: Tensor) -> bool:
    if is_sharded(first):
        return bool((read(first) == read(second)).all())
    return torch.equal(first, second)
