"""Sets of matrices, and `ConstrainedMatrix`: a matrix with what its steps need remembered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wellposed.constrain._moments import LIE_MARK, NOTE, are_lie, have_stepped, restart
from wellposed.constrain._select import WeightSlice
from wellposed.constrain._start import start_weights
from wellposed.errors import ConvergenceError
from wellposed.linalg import (
    Retraction,
    Workspace,
    cap_spectral_norms_,
    certified_spectral_norm,
    compute_dtype,
    gram_of,
    is_sharded,
    isometry_error,
    joined,
    nearest_orthogonal,
    polar_factors,
    read,
    retract_,
    rotate,
    skew_gradient_,
    tall,
    tangent_gradient_,
    wide,
    write_,
    write_matrices_,
)
from wellposed.registry import Registry

# Optimizers whose step depends on the weight (parts of their class names): it may not be zero then.
_READS_WEIGHT = (
    *("adafactor", "lamb", "lars", "adamp", "sgdp", "fromage", "nero", "hyperball"),
    *("prodigy", "madgrad", "lookahead", "schedulefree"),
)
# Reachable max |W^T W / g^2 - I| as stored. Rounding entries by a relative u moves entries of W^T W by
# at most 2 u + u^2 (Cauchy and Schwarz). A test reaches it: 7.83e-3 in bfloat16, u = 2^-8; 9.8e-4 in
# float16, u = 2^-11. The float32 copy adds its own 1e-5.
TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# Fraction of the tolerance by which rounding may raise the error above its bound.
_ROUNDING = 0.1


@dataclass(frozen=True)
class MatrixSet:
    """A set of matrices: how to measure, project, prepare a step and retract after it.

    Matrices of one shape with equal sets are worked on together. To add a set, subclass this and
    register it in `SETS`; `error` and `nearest` are enough.
    """

    size: float
    """The common singular value, the bound or the length."""
    tolerance: float = 0.0
    """The error up to which a matrix is in the set."""
    is_steered: bool = False
    """Whether `state` changes the gradient, and the coordinates of a square one's moments."""
    decays: ClassVar[bool] = False
    """Whether weight decay keeps a matrix in the set; if not, steps leave it out."""
    is_projected: ClassVar[bool] = True
    """Whether `nearest` puts a matrix into the set."""
    keeps_master: ClassVar[bool] = False
    """Whether half weights are kept in float32; else steps below their spacing are lost."""
    stacked: ClassVar[int] = 2**14
    """Entries up to which stacking is faster on a CPU."""

    @classmethod
    def _of(cls, size: float, place: WeightSlice) -> Self:
        """Return the set of this size for one weight."""
        assert place.parameter is not None
        return cls(size, TOLERANCES[place.parameter.dtype])

    is_oriented: ClassVar[bool] = True
    """Whether a matrix and its transpose are in different sets, so not in one batch."""

    def error(self, matrix: Tensor) -> float:
        """Measure how far a matrix is from the set."""
        raise NotImplementedError

    def nearest(self, matrix: Tensor) -> Tensor:
        """Return the nearest matrix, in float64 or the stored dtype; of a stack, each one's.

        Raise `ConvergenceError` if it is not finite.
        """
        raise NotImplementedError

    def _nearest_of(self, stack: Tensor) -> tuple[list[float], list[float], Tensor, list[float]]:
        """Return sizes, errors, nearest matrices (as `nearest`), and their errors as stored."""
        before = [self.error(matrix) for matrix in stack]
        inside = wide(stack).clone()
        for place, error in enumerate(before):
            if not error <= self.tolerance:
                inside[place] = self.nearest(stack[place])
        after = [self.error(matrix) for matrix in inside.to(stack.dtype)]
        return [self.size] * len(stack), before, inside, after

    def state(self, matrices: Sequence[Any], work: Workspace) -> None:
        """Before a step: put the gradients into the coordinates of the step."""

    def retract(self, matrices: Sequence[Any], work: Workspace) -> Retraction:
        """After a step: put matrices of one `batch_key` back into the set, by default by `nearest`.

        Nothing is written if a step is not finite.
        """
        values = [matrix.value for matrix in matrices]
        for matrix in matrices:
            if matrix.is_displaced and matrix.before is not None:
                matrix.value.add_(matrix.before)
                matrix.is_displaced = False
        stack = read(values[0]) if len(values) == 1 else torch.stack(values)
        inside = self._nearest_late(stack, work)
        work.write(lambda: write_matrices_(values, inside))
        return Retraction("nearest")

    def _nearest_late(self, matrix: Tensor, work: Workspace) -> Tensor:
        """Do as `nearest`, but checks may wait for the end of the step."""
        del work
        return self.nearest(matrix)


SETS = Registry[type[MatrixSet]]("set", entry_points="wellposed.sets")
"""Sets by the name that ``constrain_(to=)`` gives."""


class ConstrainedMatrix:
    """A matrix that is put back into its set after each step, and the state that this needs."""

    def __init__(self, place: WeightSlice, optimizer: Optimizer, matrix_set: MatrixSet) -> None:
        assert place.parameter is not None  # refused before otherwise
        self.place, self.path = place, place.label
        self.slices: Sequence[WeightSlice] = [place]
        self.parameter: nn.Parameter = place.parameter
        self.optimizer = optimizer
        self.set = matrix_set
        self._is_fitted = math.isnan(matrix_set.size)
        rows, columns = self.value.shape
        self.entries = rows * columns
        # All slices of a fused weight share its moments, so none can be in Lie coordinates.
        self.is_square = matrix_set.is_steered and rows == columns and not place.part
        self.stored_dtype = self.dtype = self.parameter.dtype
        if matrix_set.keeps_master:
            self.dtype = compute_dtype(self.parameter)
        self.master: Tensor | None = None
        self._exposed: Tensor | None = None
        self._master_key = "_".join([f"{NOTE}float32", *map(str, place.part)])
        self.notes = (self._master_key,)
        """Names of the entries beside the moments, which `release` removes."""
        self.before: Tensor | None = None
        """The matrix from before the step."""
        self.owner: int | None = None
        """The rank that works on the matrix; None if every rank does."""
        self.whole: ConstrainedMatrix | None = None
        """The matrix as its owner works on it."""
        self.is_displaced = False
        """Whether the parameter was zeroed, so that it holds the bare step."""
        self.drift = math.inf
        """Bound on the error of the matrix as the last step left it."""
        self.proved = 0.0
        """The norm that was proved at the last step: the start of the next proof."""
        self.is_kept = False
        """Whether `before` holds the matrix as the last step left it."""
        self.is_in_step = False
        """Whether a step began that has not written its result."""
        self.is_saved = False
        """Whether `point` holds the matrix from before the step that began."""
        self.gradient_is: Literal["plain", "changing", "steered"] = "plain"
        """Whether `MatrixSet.state` has changed the gradient."""
        # The optimizer's state of the parameter after the last step; loading replaces it.
        self._state: dict[str, object] | None = None
        self._is_fresh = True
        self._is_settled = False

    @property
    def value(self) -> Tensor:
        """The matrix, detached: a view of the parameter."""
        return self.place.seen(self.parameter.detach())

    @property
    def gradient(self) -> Tensor | None:
        """The matrix's part of the gradient: a view."""
        gradient = self.parameter.grad
        return None if gradient is None else self.place.seen(gradient)

    @property
    def is_half(self) -> bool:
        """Whether the parameter is the rounded copy of a master."""
        return self.dtype != self.stored_dtype

    @property
    def point(self) -> Tensor | None:
        """The matrix before the step, as exactly as it is known."""
        return self.before if self.master is None else self.master

    @property
    def keeps_copy(self) -> bool:
        """Whether `before` keeps the result of a step, to notice edits before the next one.

        Comparing a sharded weight needs a gather, so it is measured at every step instead.
        """
        return self.is_square and not self.is_half and not is_sharded(self.parameter)

    @property
    def batch_key(self) -> tuple[object, ...] | None:
        """Key of matrices for one batched product; None for a matrix on its own."""
        gradient, dtype = self.parameter.grad, self.parameter.dtype
        if self.is_half or is_sharded(self.parameter):
            return None
        if self.set.keeps_master and (gradient is None or gradient.dtype != dtype):
            return None
        shape, device = tuple(self.value.shape), self.parameter.device
        if not self.set.is_oriented:
            shape = tuple(sorted(shape))
        return self.set, shape, dtype, device, self.is_square, self.is_displaced

    def error(self) -> float:
        """Measure how far the matrix, as stored, is from the set."""
        return self.set.error(read(self.value))

    def watch(self) -> list[Any]:
        """Register the hooks by which the set watches the model; return their removable handles."""
        return []

    def forget(self) -> None:
        """Measure error and moments at the next step: free steps may have come between."""
        self.is_displaced = self.is_kept = self.is_in_step = self.is_saved = False
        self.gradient_is = "plain"
        self._state, self.drift, self.whole = None, math.inf, None
        if self.is_half and self.master is None:
            self.adopt_master(None)

    def claim(self) -> bool:
        """Follow edits and loaded states; return whether moments of other steps restarted."""
        if self._is_fitted and self._is_fresh and self.error() > self.set.tolerance:
            self.set = replace(self.set, size=math.nan)  # a checkpoint was fitted to other weights
            start_weights([self], dry_run=False)
        if not self._is_settled:
            self.drift = math.inf

        is_known = self.optimizer.state.get(self.parameter) is self._state
        if self.master is not None:
            self._refresh_master(self.master)
        else:
            self.is_kept &= is_known and self.before is not None and _alike(self.before, self.value)
            self.drift = self.drift if self.is_kept else math.inf

        stale = self._claim_moments(is_known=is_known)
        # Last, so that moments whose restart was cut off restart again.
        self._state = self.optimizer.state.get(self.parameter)
        return stale

    def _claim_moments(self, *, is_known: bool) -> bool:
        """Restart moments in other coordinates than those of the next step; return if there were."""
        state = self.optimizer.state.get(self.parameter)
        if not state or (is_known and self.is_square):
            return False
        if self.is_square and are_lie(state):
            # The drift saved with these very weights continues the run bit for bit.
            saved, point = state[LIE_MARK], self.value if self.master is None else self.master
            rounding = _ROUNDING * TOLERANCES[self.dtype]
            if saved is not None and self.set.error(read(point)) <= saved + rounding:
                self.drift = saved
            return False
        if not self.is_square and LIE_MARK not in state:
            return False

        stale = have_stepped(state)
        if stale:
            restart(self.optimizer, self.parameter)
        state = self.optimizer.state.get(self.parameter)
        if self.is_square and state:
            state[LIE_MARK] = None
        elif state:
            state.pop(LIE_MARK, None)
        return stale

    def remember(self, *, decayed: bool) -> None:
        """Keep what the retraction and an undo need; zero a parameter that decays or is rounded."""
        is_rounded = self.is_half and not reads_weight_size(self.optimizer)
        is_displaced = not self.set.decays and (decayed or is_rounded)
        is_kept_here = is_displaced or (self.is_square and self.owner is None)
        if self.master is None and is_kept_here and not self.is_kept:
            copy_before([self])

        # From here on an exception leads back to the copy, which is complete.
        self.is_saved = self.master is not None or (is_kept_here and self.before is not None)
        self.is_in_step = True
        self.is_kept = self._is_settled = False
        self.is_displaced = is_displaced
        if is_displaced:
            self.value.zero_()

    def restore(self) -> None:
        """Undo `remember`, and the optimizer's step after it, if the matrix was copied."""
        if self.is_saved and self.point is not None:
            self.value.copy_(self.point)
        self.is_kept = False
        self.is_displaced = self.is_in_step = self.is_saved = False

    def restore_gradient(self) -> None:
        """Undo `MatrixSet.state`: a second step then takes the same way. A part is dropped."""
        if self.gradient_is == "steered" and self.is_square and self.owner is None:
            gradient = self.gradient
            if gradient is not None:
                # Its Lie coordinates are skew(W^T W S / size) / size = S again.
                point = self.value.to(self.dtype)
                ambient = (point @ gradient.to(self.dtype)).div_(self.set.size)
                self.gradient_is = "changing"
                gradient.copy_(ambient)
        elif self.gradient_is != "plain" and (
            self.gradient_is == "changing" or self.owner is not None
        ):
            self.parameter.grad = None
        self.gradient_is = "plain"

    def accept_free_step(self) -> None:
        """Prepare the retraction of a step without `remember`, which was not of this set."""
        if self.set.keeps_master:
            start_weights([self], dry_run=False)
            if self.master is None and self.is_square:
                copy_before([self])
        self.forget()

    def settle(self, drift: float) -> None:
        """Save what a resumed run needs beside the moments: drift, and the float32 copy's bytes."""
        self.drift = drift
        self.is_in_step = self.is_saved = self._is_fresh = False
        self.gradient_is = "plain"
        if not self.is_square:
            self.before = None
        self._save_notes()
        # Last, as both promise that all is as a whole step leaves it.
        self.is_kept = self.keeps_copy
        self._is_settled = True

    def _save_notes(self) -> None:
        self._state = state = self.optimizer.state.get(self.parameter)
        # SGD without momentum has no state, and ignores entries of others.
        if not state and type(self.optimizer) is not torch.optim.SGD:
            return
        if self.is_square:
            self._state = state = self.optimizer.state[self.parameter]
            state[LIE_MARK] = self.drift
        if self.master is not None and not is_sharded(self.parameter):
            self._exposed = self.master.view(torch.uint8)
            self.optimizer.state[self.parameter][self._master_key] = self._exposed

    def release(self) -> None:
        """Restart moments that are in Lie coordinates, and remove all notes beside them."""
        self.master = self._exposed = self.whole = None
        state = self.optimizer.state.get(self.parameter)
        if state is None:
            return
        for name in self.notes:
            state.pop(name, None)
        if LIE_MARK in state:
            # The mark goes last: it says that a restart is due.
            if state.keys() != {LIE_MARK}:
                restart(self.optimizer, self.parameter)
            state.pop(LIE_MARK, None)
        if not state:
            self.optimizer.state.pop(self.parameter, None)

    def store(self, values: Sequence[Tensor], result: Tensor) -> None:
        """Write a result to the values of a batch, and to the master of a single matrix."""
        write_matrices_(values, result)
        if self.master is not None:
            write_matrices_([self.master], result)

    def saved_master(self) -> Tensor | None:
        """Return the float32 copy of a checkpoint, if it is that of the stored weight."""
        saved = self.optimizer.state.get(self.parameter, {}).get(self._master_key)
        if saved is None or is_sharded(self.parameter):
            return None
        # Optimizers cast loaded state to the parameter's dtype; all float types represent bytes.
        value = saved.to(torch.uint8).view(self.dtype)
        is_own = value.shape == self.value.shape and _same(value.to(self.value.dtype), self.value)
        return value if is_own else None

    def adopt_master(self, value: Tensor | None) -> None:
        """Set the float32 copy; if ``value`` is None, to the nearest matrix."""
        if self.owner is not None:
            return  # the owner keeps it
        if value is None:
            value = nearest_orthogonal(read(self.value).to(self.dtype), gain=self.set.size)
        self.master = self.value.to(self.dtype).clone(memory_format=torch.contiguous_format)
        write_(self.master, value)

    def _refresh_master(self, master: Tensor) -> None:
        """Follow a loaded optimizer state, or an edit, since the last step."""
        saved = self.optimizer.state.get(self.parameter, {}).get(self._master_key)
        is_reloaded = saved is not None and saved is not self._exposed
        if is_reloaded or not _same(master.to(self.parameter.dtype), self.value):
            self.adopt_master(self.saved_master())
            self.drift = math.inf


def copy_before(matrices: Sequence[ConstrainedMatrix]) -> None:
    """Copy matrices of one shape to their `before`."""
    for matrix in matrices:
        if matrix.before is None or not _alike(matrix.before, matrix.value):
            matrix.before = torch.empty_like(matrix.value)
    pairs = [(matrix.before, matrix.value) for matrix in matrices if matrix.before is not None]
    if len(pairs) == 1:  # a sharded one is alone
        pairs[0][0].copy_(pairs[0][1])
    elif pairs:
        before, values = zip(*pairs, strict=True)
        torch._foreach_copy_(before, values)


def reads_weight_size(optimizer: Optimizer) -> bool:
    """Whether the optimizer's step depends on the weight itself, by its class names."""
    names = [kind.__name__.lower() for kind in type(optimizer).__mro__]
    return any(part in name for name in names for part in _READS_WEIGHT)


def _alike(first: Tensor, second: Tensor) -> bool:
    return (first.shape, first.device) == (second.shape, second.device)


def _same(first: Tensor, second: Tensor) -> bool:
    if is_sharded(first):
        return bool((read(first) == read(second)).all())
    return torch.equal(first, second)


@dataclass(frozen=True)
class Orthogonal(MatrixSet):
    """``W^T W = size^2 I``: project the gradient before the step, retract the matrix after it.

    A table of embeddings is only retracted. A projected gradient is not zero for tokens outside the
    batch, and Adam would make it as long a step as any.
    """

    keeps_master = True
    is_oriented = False

    @classmethod
    def _of(cls, size: float, place: WeightSlice) -> Self:
        """Return a set with steered steps."""
        return replace(super()._of(size, place), is_steered=True)

    def error(self, matrix: Tensor) -> float:
        """Measure ``max |W^T W / size^2 - I|``, in float64."""
        return float(isometry_error(matrix, gain=self.size))

    def nearest(self, matrix: Tensor) -> Tensor:
        """Scale the polar factor; a zero padding vector of an embedding stays zero."""
        return self._nearest_of(matrix[None])[2][0]

    def _nearest_of(self, stack: Tensor) -> tuple[list[float], list[float], Tensor, list[float]]:
        """Do as the base class in one product; a size of NaN becomes the mean singular value."""
        point = tall(wide(stack.clone()))
        gram, factors = gram_of(point), None
        sizes = [self.size] * len(stack)
        if math.isnan(self.size):
            factors = polar_factors(tall(stack), gram)
            traces = (factors * point).sum(dim=(-2, -1)) / point.shape[-1]
            # Three digits, so that a fitted matrix is not moved again.
            sizes = [float(f"{mean:.3g}") for mean in traces.tolist()]
            if 0.0 in sizes:
                raise ConvergenceError("the matrix is zero, so gain='fit' has nothing to fit")
        gains = gram.new_tensor(sizes)[:, None, None]
        away = gram / gains.square()
        away.diagonal(dim1=-2, dim2=-1).sub_(1.0)
        before = away.abs_().amax((-2, -1)).tolist()
        if outside := [place for place, error in enumerate(before) if not error <= self.tolerance]:
            some = outside if len(outside) < len(stack) else slice(None)  # views of all
            fitted = None if factors is None else factors[some]
            nearest = polar_factors(tall(stack[some]), gram[some]) if fitted is None else fitted
            point[some] = nearest.mul_(gains[some])
        inside = point if stack.shape[-2] >= stack.shape[-1] else point.mT
        if not self.is_steered and stack.shape[-2] > stack.shape[-1]:
            inside.mul_(stack.ne(0).any(dim=-1, keepdim=True))
        after = isometry_error(inside.to(stack.dtype), gain=gains)
        return sizes, before, inside, after.tolist()

    def state(self, matrices: Sequence[ConstrainedMatrix], work: Workspace) -> None:
        """Put gradients into tangent spaces, and those of square matrices into Lie coordinates."""
        if not self.is_steered:
            return
        first = matrices[0]
        gradients = [matrix.gradient for matrix in matrices if matrix.gradient is not None]
        points = [matrix.value if matrix.master is None else matrix.master for matrix in matrices]
        point = joined(points, first.dtype, "points", work)
        self._notice_edits(matrices, point, work)
        gradient = joined(gradients, first.dtype, "gradients", work)
        project = skew_gradient_ if first.is_square else tangent_gradient_
        project(point, gradient, gain=self.size, workspace=work)
        write_matrices_(gradients, gradient)

    def _notice_edits(
        self, matrices: Sequence[ConstrainedMatrix], point: Tensor, work: Workspace
    ) -> None:
        """Compare with the last step's result: version counters miss edits through ``.data``."""
        unchanged = [matrix for matrix in matrices if matrix.is_kept]
        is_same = len(unchanged) == len(matrices)
        if is_same:
            before = [matrix.before for matrix in unchanged if matrix.before is not None]
            # On a CPU `dist` needs half the time of `equal`.
            change = torch.dist(point, joined(before, matrices[0].dtype, "before", work))
            is_same = work.bounds("edited", change, guess=(0.0,))[0] == 0.0
        if not is_same:
            for matrix in unchanged:
                matrix.is_kept, matrix.drift = False, math.inf
        elif work.is_ahead:
            copy_before(matrices)  # the guess may be wrong

    def retract(self, matrices: Sequence[ConstrainedMatrix], work: Workspace) -> Retraction:
        """Replace the optimizer's steps by steps along the manifold."""
        first, values = matrices[0], [matrix.value for matrix in matrices]
        moved = joined(values, first.dtype, "gradients", work, fresh=work.is_ahead)
        points = [matrix.point for matrix in matrices if matrix.point is not None]
        point = None
        if len(points) == len(matrices) and (
            first.is_square or first.is_half or first.is_displaced
        ):
            point = joined(points, first.dtype, "points", work)
        options = {"gain": self.size, "tolerance": TOLERANCES[first.dtype], "workspace": work}
        step = moved
        if point is not None and not first.is_displaced:
            # Padding makes reads by columns faster.
            step = work("step", moved.shape, moved, padded=True) if first.is_square else moved
            torch.sub(moved, point.to(first.stored_dtype), out=step)
        if first.is_square and point is not None:
            drift = max(matrix.drift for matrix in matrices)
            try:
                taken = rotate(point, step, out=moved, drift=drift, **options)
            except ConvergenceError:
                if len(matrices) == 1 and not work.is_ahead:
                    first.store(values, moved)  # the point; several are retried one by one
                raise
        else:
            taken = retract_(moved if point is None else moved.add_(point), **options)
        work.write(lambda: first.store(values, moved))
        return taken


@dataclass(frozen=True)
class Spectral(MatrixSet):
    """``|W|_2 <= size``, proved after each step."""

    decays = True
    is_oriented = False
    stacked = 2**16

    @classmethod
    def _of(cls, size: float, place: WeightSlice) -> Self:
        """Return a set without tolerance: its bound is proved."""
        del place
        return cls(size)

    def error(self, matrix: Tensor) -> float:
        """Measure ``max(0, |W|_2 / size - 1)`` with the certified norm."""
        return max(0.0, float(certified_spectral_norm(matrix)) / self.size - 1.0)

    def nearest(self, matrix: Tensor) -> Tensor:
        """Cap the singular values."""
        return self._nearest_of(matrix[None])[2][0]

    def _nearest_of(self, stack: Tensor) -> tuple[list[float], list[float], Tensor, list[float]]:
        """Do as the base class; the proof as stored leaves no error."""
        inside = stack.clone()
        caps = cap_spectral_norms_(list(inside.unbind()), bound=self.size, nearest=True)
        before = [max(0.0, cap.before / self.size - 1.0) for cap in caps]
        return [self.size] * len(stack), before, inside, [0.0] * len(stack)

    def retract(self, matrices: Sequence[ConstrainedMatrix], work: Workspace) -> Retraction:
        """Cap the singular values of all; report the largest."""
        values = [matrix.value for matrix in matrices]
        gathered = [read(value) for value in values]
        proved = [matrix.proved for matrix in matrices]
        capped = cap_spectral_norms_(gathered, bound=self.size, before=proved, workspace=work)
        for matrix, cap in zip(matrices, capped, strict=True):
            matrix.proved = cap.before
        if is_sharded(values[0]):
            work.write(lambda: write_(values[0], gathered[0]))
        return Retraction(*max(capped, key=lambda cap: cap.before))


@dataclass(frozen=True)
class Columns(MatrixSet):
    """Columns of length ``size``; of an embedding, the vectors of its tokens."""

    padding: int | None = None
    """The column of a padding vector, which may be zero."""

    @classmethod
    def _of(cls, size: float, place: WeightSlice) -> Self:
        """Tolerate the rounding of entries, and of the sum of squares that measures them."""
        assert place.parameter is not None
        value = place.seen(place.parameter.detach())
        double = torch.finfo(torch.float64).eps
        units = 2.0 * torch.finfo(value.dtype).eps + value.shape[0] * double
        return cls(size, units, padding=place.padding)

    def error(self, matrix: Tensor) -> float:
        """Measure ``max_j | |W e_j| / size - 1 |``; a padding vector may be zero."""
        return float((self._lengths(matrix) / self.size - 1.0).abs().max())

    def nearest(self, matrix: Tensor) -> Tensor:
        """Divide each column of each matrix by its length."""
        return self._nearest_late(matrix, Workspace())

    def _nearest_late(self, matrix: Tensor, work: Workspace) -> Tensor:
        lengths = self._lengths(matrix)
        has_none = ~(torch.isfinite(lengths) & (lengths > 0.0))
        if work.bounds("none", has_none.sum(), guess=(0.0,))[0] > 0.0:
            columns = torch.nonzero(has_none)[..., -1].tolist()
            count = f"{len(columns)} of {lengths.numel()} columns are zero or not finite"
            raise ConvergenceError(f"{count} and have no direction: {columns[:5]}")
        return (matrix.double() * (self.size / lengths).unsqueeze(-2)).to(matrix.dtype)

    def _lengths(self, matrices: Tensor) -> Tensor:
        """Return the column lengths; a zero padding vector counts as ``size``."""
        lengths = torch.linalg.vector_norm(matrices, dim=-2, dtype=torch.float64)
        if self.padding is not None:
            length = lengths[..., self.padding]
            lengths[..., self.padding] = length.where(length != 0.0, self.size)
        return lengths


for _name, _kind in {"orthogonal": Orthogonal, "spectral": Spectral, "columns": Columns}.items():
    SETS.register(_name)(_kind)
