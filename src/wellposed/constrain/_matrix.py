"""Sets of matrices (orthogonal, below a spectral norm, with columns of one length); a matrix that a handle
keeps in its set, what a step needs remembered of it, and batches of one shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wellposed.constrain._moments import (
    LIE_MARK,
    NOTE,
    are_lie,
    have_stepped,
    restart,
)
from wellposed.constrain._select import Candidate
from wellposed.errors import ConvergenceError
from wellposed.linalg import (
    Retraction,
    Workspace,
    cap_spectral_norms_,
    certified_spectral_norm,
    compute_dtype,
    is_sharded,
    isometry_error,
    nearest_orthogonal,
    read,
    retract_,
    rotate,
    singular_values,
    skew_gradient_,
    tall,
    tangent_gradient_,
    write_,
)
from wellposed.registry import Registry

# Optimizers whose step depends on where the weight is (parts of the names of their classes): the
# weight may not be zero under them.
_READS_WEIGHT = (
    *("adafactor", "lamb", "lars", "adamp", "sgdp", "fromage", "nero", "hyperball"),
    *("prodigy", "madgrad", "lookahead", "schedulefree"),
)
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
    error_before: float
    """How far the weight was from its set before attaching, as `Constraint.error` measures it."""
    error_after: float
    """The same after it, measured in float64 on the weight as stored."""
    also: tuple[str, ...] = ()
    """Other names of the same tied parameter; it is constrained once."""


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
    def _of(cls, size: float, place: Candidate) -> Self:
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
        moved = _moved(whole, inside) if is_moved else 0.0
        after = self.set.error(inside.to(whole.dtype))
        if is_moved and not dry_run:
            write_(self.value, inside)
        if self.is_half and not dry_run:
            self._adopt_master(inside.to(self.dtype) if is_moved else self._saved_master())
        shape, also = (whole.shape[0], whole.shape[1]), self.place.also
        return ConstrainedWeight(self.path, shape, self.set.size, moved, before, after, also)

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
            value = nearest_orthogonal(read(self.value).to(self.dtype), gain=self.set.size)
        self.master = self.value.to(self.dtype).clone(memory_format=torch.contiguous_format)
        write_(self.master, value)

    def _refresh_master(self, master: Tensor) -> None:
        """Follow a state that was loaded into the optimizer, or an edit, since the last step."""
        saved = self.optimizer.state.get(self.parameter, {}).get(self._master_key)
        is_reloaded = saved is not None and saved is not self._exposed
        if is_reloaded or not _same(master.to(self.parameter.dtype), self.value):
            self._adopt_master(self._saved_master())
            self.drift = math.inf


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


def _moved(first: Tensor, second: Tensor) -> float:
    wide = torch.float32 if first.device.type == "mps" else torch.float64
    part = torch.linalg.matrix_norm(second.to(wide) - first.to(wide))
    return float(part / torch.linalg.matrix_norm(first.to(wide)).clamp_min(torch.finfo(wide).tiny))


def _alike(first: Tensor, second: Tensor) -> bool:
    return (first.shape, first.device) == (second.shape, second.device)


def _same(first: Tensor, second: Tensor) -> bool:
    if is_sharded(first):
        return bool((read(first) == read(second)).all())
    return torch.equal(first, second)


@dataclass(frozen=True)
class Orthogonal(MatrixSet):
    """``W^T W = size^2 I``: the gradient is projected before the step, the matrix retracted after it.

    A table of embeddings is not steered, and the retraction alone takes out the normal part: a
    projected gradient is not zero for a token outside the batch, and Adam would make it as long a
    step as any.
    """

    keeps_master = True

    @classmethod
    def _of(cls, size: float, place: Candidate) -> Self:
        """A chosen size is that of a steered matrix; see `fitted`."""
        return replace(super()._of(size, place), is_steered=True)

    def error(self, matrix: Tensor) -> float:
        """Measure ``max |W^T W / size^2 - I|``, in float64."""
        return float(isometry_error(matrix, gain=self.size))

    def nearest(self, matrix: Tensor) -> Tensor:
        """Scale the polar factor; a zero vector of padding of an embedding stays zero."""
        wide = matrix.to(torch.float32 if matrix.device.type == "mps" else torch.float64)
        inside = nearest_orthogonal(wide, gain=self.size)
        if not self.is_steered and matrix.shape[0] > matrix.shape[1]:
            inside = inside.where(matrix.ne(0).any(dim=1, keepdim=True), 0.0)
        return inside

    def state(self, matrices: Sequence[ConstrainedMatrix], work: Workspace) -> None:
        """Put the gradients into the tangent spaces, those of square matrices into Lie coordinates."""
        if not self.is_steered:
            return
        first = matrices[0]
        gradients = [each.gradient for each in matrices if each.gradient is not None]
        points = [each.value if each.master is None else each.master for each in matrices]
        point = joined(points, first.dtype, "points", work)
        whole = joined(gradients, first.dtype, "gradients", work)
        project = skew_gradient_ if first.is_square else tangent_gradient_
        project(point, whole, gain=self.size, workspace=work)
        write_matrices_(gradients, whole)

    def retract(self, matrices: Sequence[ConstrainedMatrix], work: Workspace) -> Retraction:
        """Turn the steps the optimizer took into steps along the manifold."""
        first, values = matrices[0], [each.value for each in matrices]
        moved = joined(values, first.dtype, "gradients", work)
        points = [each.point for each in matrices if each.point is not None]
        point = None
        if len(points) == len(matrices) and (
            first.is_square or first.is_half or first.is_displaced
        ):
            point = joined(points, first.dtype, "points", work)
        options = {"gain": self.size, "tolerance": TOLERANCES[first.dtype], "workspace": work}
        step = moved
        if point is not None and not first.is_displaced:
            # The step is read by columns too, which padding makes faster.
            step = work("step", moved.shape, moved, padded=True) if first.is_square else moved
            torch.sub(moved, point.to(first.stored_dtype), out=step)
        if first.is_square and point is not None:
            drift = max(each.drift for each in matrices)
            try:
                taken = rotate(point, step, out=moved, drift=drift, **options)
            except ConvergenceError:
                if len(matrices) == 1:  # it has the point; of several each is tried alone
                    first.store(values, moved)
                raise
        else:
            taken = retract_(moved if point is None else moved.add_(point), **options)
        first.store(values, moved)
        return taken


def fitted(matrix: Tensor, tolerance: float, *, is_steered: bool) -> Orthogonal:
    """Return the orthogonal set of the mean singular value, to three digits so that a matrix fitted
    before is not moved again."""
    size = float(f"{float(singular_values(matrix).mean()):.3g}")
    if size == 0.0:
        raise ConvergenceError("the matrix is zero, so gain='fit' has nothing to fit")
    return Orthogonal(size, tolerance, is_steered)


@dataclass(frozen=True)
class Spectral(MatrixSet):
    """``|W|_2 <= size``, proved after each step."""

    decays = True
    stacked = 2**16

    @classmethod
    def _of(cls, size: float, place: Candidate) -> Self:
        """What is proved needs no tolerance."""
        del place
        return cls(size)

    def error(self, matrix: Tensor) -> float:
        """Measure ``max(0, |W|_2 / size - 1)`` with the certified norm."""
        return max(0.0, float(certified_spectral_norm(matrix)) / self.size - 1.0)

    def nearest(self, matrix: Tensor) -> Tensor:
        """Cap the singular values."""
        inside = matrix.clone()
        cap_spectral_norms_([inside], bound=self.size, nearest=True)
        return inside

    def retract(self, matrices: Sequence[ConstrainedMatrix], work: Workspace) -> Retraction:
        """Cap the singular values of all; the largest is reported."""
        del work
        values = [each.value for each in matrices]
        whole = [read(value) for value in values]
        proved = [each.proved for each in matrices]
        capped = cap_spectral_norms_(whole, bound=self.size, before=proved)
        for each, cap in zip(matrices, capped, strict=True):
            each.proved = cap.before
        if is_sharded(values[0]):
            write_(values[0], whole[0])
        return Retraction(*max(capped, key=lambda cap: cap.before))


@dataclass(frozen=True)
class Columns(MatrixSet):
    """Columns of length ``size``: the images of the basis vectors, and of an embedding the vectors
    of its tokens."""

    padding: int | None = None
    """The column that is a vector of padding, which may be zero."""

    @classmethod
    def _of(cls, size: float, place: Candidate) -> Self:
        """Tolerate the rounding of the entries, and of the sum of squares that measures them."""
        assert place.parameter is not None
        value = place.seen(place.parameter.detach())
        double = torch.finfo(torch.float64).eps
        units = 2.0 * torch.finfo(value.dtype).eps + value.shape[0] * double
        return cls(size, units, padding=place.padding)

    def error(self, matrix: Tensor) -> float:
        """Measure ``max_j | |W e_j| / size - 1 |``; a vector of padding may be zero."""
        return float((self._lengths(matrix) / self.size - 1.0).abs().max())

    def nearest(self, matrix: Tensor) -> Tensor:
        """Divide each column by its length; of a stack, those of each matrix."""
        lengths = self._lengths(matrix)
        has_none = ~(torch.isfinite(lengths) & (lengths > 0.0))
        if bool(has_none.any()):
            columns = torch.nonzero(has_none)[..., -1].tolist()
            count = f"{len(columns)} of {lengths.numel()} columns are zero or not finite"
            raise ConvergenceError(f"{count} and have no direction: {columns[:5]}")
        return (matrix.double() * (self.size / lengths).unsqueeze(-2)).to(matrix.dtype)

    def _lengths(self, matrices: Tensor) -> Tensor:
        """Return the lengths of the columns; that of a zero vector of padding as the one it should
        have."""
        lengths = torch.linalg.vector_norm(matrices, dim=-2, dtype=torch.float64)
        if self.padding is not None:
            length = lengths[..., self.padding]
            lengths[..., self.padding] = length.where(length != 0.0, self.size)
        return lengths


for _name, _kind in {"orthogonal": Orthogonal, "spectral": Spectral, "columns": Columns}.items():
    SETS.register(_name)(_kind)
