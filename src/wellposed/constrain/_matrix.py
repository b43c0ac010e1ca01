"""`ConstrainedMatrix`: a matrix with what its steps need remembered."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from wellposed.constrain._constrained import Constrained
from wellposed.constrain._copies import are_alike, are_same, copy_before
from wellposed.constrain._moments import (
    LIE_MARK,
    NOTE,
    are_lie,
    leave_lie_coordinates,
    restart,
    restart_stepped,
)
from wellposed.constrain._set import TOLERANCES, MatrixSet
from wellposed.constrain._start import start_weights
from wellposed.constrain._trial import reads_weight_size
from wellposed.constrain._weight_slice import WeightSlice
from wellposed.constrain._wholes import Wholes
from wellposed.linalg import (
    ErrorNorm,
    compute_dtype,
    is_sharded,
    layout_of,
    nearest_orthogonal,
    read,
    write_,
    write_matrices_,
)

# Fraction of the tolerance by which rounding may raise the error above its bound.
_ROUNDING = 0.1


class ConstrainedMatrix(Constrained):
    """A matrix that is put back into its set after each step, and the state that this needs."""

    def __init__(self, part: WeightSlice, optimizer: Optimizer, matrix_set: MatrixSet) -> None:
        assert part.parameter is not None  # refused before otherwise
        super().__init__(part.label, [part], part.parameter, optimizer)
        self.slice = part
        self.set = matrix_set
        self.memory: Any = matrix_set.memory()
        """State that the set keeps of this matrix from one step to the next, until `forget`."""
        self._is_fitted = math.isnan(matrix_set.size)
        self.layout = layout_of(
            self.parameter,
            entry=part.expert,
            rows=part.rows,
            axis=-1 if part.transposed else -2,
        )
        """How a matrix in shards lies on the ranks, if one of them can work on it."""
        self.is_sharded: bool = is_sharded(self.parameter)
        """Whether the parameter is a DTensor."""
        self.shape = part.shape
        """(rows, columns) of the whole matrix."""
        self.entries = math.prod(self.shape)
        # All slices of a fused weight share its moments, so none can be in Lie coordinates.
        self.is_square = matrix_set.is_steered and self.shape[0] == self.shape[1] and not part.part
        self.stored_dtype = self.dtype = self.parameter.dtype
        if matrix_set.keeps_master:
            self.dtype = compute_dtype(self.parameter)

        # Asked here, as the copy of a sharded matrix that its owner works on has no optimizer.
        self._reads_weight = self.is_half and reads_weight_size(optimizer)
        self.master: Tensor | None = None
        self._exposed: Tensor | None = None
        self._master_key = "_".join([f"{NOTE}float32", *map(str, part.part)])
        self.notes = (self._master_key,)
        """Names of the entries beside the moments, which `release` removes."""
        self.before: Tensor | None = None
        """The matrix from before the step."""
        self.owner: int | None = None
        """The rank that works on the matrix; None if every rank does."""
        self.gathered: ConstrainedMatrix | None = None
        """The matrix as its owner works on it."""
        self.is_displaced = False
        """Whether the parameter was zeroed, so that it holds the bare step."""
        self.drift = math.inf
        """Bound on the error of the matrix as the last step left it."""
        self.proved = 0.0
        """The norm that was proved at the last step: the start of the next proof."""
        self.is_kept = False
        """Whether `before` holds the matrix as the last step left it."""
        self.gradient_is: Literal["plain", "changing", "steered"] = "plain"
        """Whether `MatrixSet.state` has changed the gradient."""
        # The optimizer's state of the parameter after the last step; loading replaces it.
        self._state: dict[str, object] | None = None
        self._is_fresh = True
        self._is_settled = False

    @property
    def value(self) -> Tensor:
        """The matrix, detached, or the part of it in this process's shard: a view."""
        if self.layout is None:
            return self.slice.matrix_in(self.parameter.detach())
        parameter: Any = self.parameter.detach()
        part = self.layout.part(parameter.to_local())
        return part.mT if self.slice.transposed else part

    @property
    def gradient(self) -> Tensor | None:
        """The matrix's part of the gradient: a view."""
        gradient = self.parameter.grad
        return None if gradient is None else self.slice.matrix_in(gradient)

    @property
    def entries_in_float32(self) -> int:
        """All entries, if the set keeps a float32 copy of half weights."""
        return self.entries if self.set.keeps_master else 0

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
        return self.is_square and not self.is_half and not self.is_sharded

    @property
    def batch_key(self) -> tuple[object, ...] | None:
        """Key of matrices for one batched product; None for a matrix on its own."""
        gradient = self.parameter.grad
        dtype = self.parameter.dtype
        if self.is_half or self.is_sharded:
            return None
        if self.set.keeps_master and (gradient is None or gradient.dtype != dtype):
            return None
        shape = self.shape
        device = self.parameter.device
        if not self.set.is_oriented:
            shape = tuple(sorted(shape))
        return self.set, shape, dtype, device, self.is_square, self.is_displaced

    def stepped(self) -> list[Tensor]:
        """Return this process's part of the tensor that a step and its result change: views."""
        value = self.value
        return [value.to_local() if is_sharded(value) else value]

    def error(self, wholes: Wholes | None = None, *, norm: ErrorNorm = "max") -> float:
        """Measure how far the matrix, as stored, is from the set."""
        matrix = (wholes or Wholes()).matrix(self.parameter, self.slice)
        return self.set.error(matrix) if norm == "max" else self.set.spectral_error(matrix)

    def write_whole(self, result: Tensor) -> None:
        """Write the whole matrix; each process writes the part in its shard."""
        if self.layout is None:
            write_(self.value, result)
            return
        stored = result.mT if self.slice.transposed else result
        part = self.layout.split(stored)[self.layout.cut.rank]
        self.value.copy_(part.mT if self.slice.transposed else part)

    def forget(self) -> None:
        """Measure error and moments at the next step: free steps may have come between."""
        super().forget()
        self.is_displaced = self.is_kept = False
        self.gradient_is = "plain"
        self.memory = self.set.memory()
        self._state = None
        self.drift = math.inf
        self.gathered = None
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
            self.is_kept &= (
                is_known and self.before is not None and are_alike(self.before, self.value)
            )
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
            saved = state[LIE_MARK]
            point = self.value if self.master is None else self.master
            rounding = _ROUNDING * TOLERANCES[self.dtype]
            if saved is not None and self.set.error(read(point)) <= saved + rounding:
                self.drift = saved
            return False
        if not self.is_square:
            return leave_lie_coordinates(self.optimizer, self.parameter)

        stale = restart_stepped(self.optimizer, self.parameter)
        state = self.optimizer.state.get(self.parameter)
        if state:
            state[LIE_MARK] = None
        return stale

    def remember(self, *, decayed: bool) -> None:
        """Keep what the retraction and an undo need; zero a parameter that decays or is rounded."""
        is_rounded = self.is_half and not self._reads_weight
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
        """Undo `remember`, and the optimizer's step after it."""
        if self.is_saved and not self.spare and self.point is not None:
            self.value.copy_(self.point)
        self.is_kept = self.is_displaced = False
        super().restore()

    def abandon(self) -> None:
        """Leave a step that did not end; a matrix that holds the bare step goes back."""
        if self.is_displaced and self.is_in_step:
            self.restore()
        super().abandon()

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
        self.spare = []
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
        if self.master is not None and not self.is_sharded:
            self._exposed = self.master.view(torch.uint8)
            self.optimizer.state[self.parameter][self._master_key] = self._exposed

    def release(self) -> None:
        """Restart moments that are in Lie coordinates, and remove all notes beside them."""
        self.master = self._exposed = self.gathered = None
        self.memory = self.set.memory()
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
        if saved is None or self.is_sharded:
            return None
        # Optimizers cast loaded state to the parameter's dtype; all float types represent bytes.
        value = saved.to(torch.uint8).view(self.dtype)
        is_own = value.shape == self.value.shape and are_same(
            value.to(self.value.dtype), self.value
        )
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
        if is_reloaded or not are_same(master.to(self.parameter.dtype), self.value):
            self.adopt_master(self.saved_master())
            self.drift = math.inf
