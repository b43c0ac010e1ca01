"""The set of orthogonal matrices: gradient to the tangent space before the optimizer step,
retraction after it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from wellposed.constrain._moments import LIE_MARK, NOTE, are_lie, have_stepped, restart
from wellposed.constrain._select import Candidate
from wellposed.constrain._weight import Weight, reads_weight_size, write_matrices_
from wellposed.errors import ConvergenceError
from wellposed.linalg import (
    Retraction,
    Workspace,
    compute_dtype,
    isometry_error,
    nearest_orthogonal,
    retract_,
    rotate,
    skew_gradient_,
    tall,
    tangent_gradient_,
)
from wellposed.linalg.sharded import is_sharded, read, write_

# Reachable max |W^T W / g^2 - I| as stored. Rounding each entry by a part of at most u moves an
# entry of W^T W by at most 2 u + u^2 (Cauchy and Schwarz, columns of length 1), and it comes that
# far: see the test. With u = 2^-8 that is 7.83e-3 for bfloat16, with 2^-11 9.8e-4 for float16; the
# float32 copy that is rounded adds its own 1e-5.
TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
# Part of the tolerance by which rounding may take the error beyond its bound.
_ROUNDING = 0.1
_MASTER = f"{NOTE}float32"


class OrthogonalWeight(Weight):
    """A matrix with ``W^T W = gain^2 I``, and the copies one step needs."""

    def __init__(
        self,
        place: Candidate,
        optimizer: Optimizer,
        gain: float | Literal["fit"],
        *,
        is_frame: bool = False,
    ) -> None:
        super().__init__(place, optimizer, 1.0 if gain == "fit" else gain)
        self._fits = gain == "fit"
        self._fit()
        # An embedding steps by its own gradient, and the retraction alone takes out the normal
        # part: a projected gradient is not zero for a token outside the batch, and Adam would make
        # it as long a step as any.
        self.is_frame = is_frame
        self.is_steered = not is_frame
        # The moments of a fused weight belong to all its slices, so none of them can be in
        # coordinates of its own.
        rows, columns = self.value.shape
        self.square = rows == columns and not is_frame and not place.part
        self.stored_dtype = self.parameter.dtype
        self.dtype = compute_dtype(self.parameter)
        self.is_half = self.dtype != self.parameter.dtype
        # Whether a step can work on the parameter's own memory.
        self.is_direct = not (self.is_half or is_sharded(self.parameter))
        self.tolerance = TOLERANCES[self.stored_dtype]
        # Half weights are kept in float32 here, or every step smaller than their spacing would be
        # lost.
        self.master: Tensor | None = None
        self._exposed: Tensor | None = None
        self.before: Tensor | None = None
        # Bound on the error of the weight as the last step left it; and whether `before` holds it
        # as it was then.
        self.drift = math.inf
        self._kept = False
        # What the optimizer kept for the parameter after the last step; loading puts another there.
        self._state: dict[str, object] | None = None
        self._is_fresh = True
        # Whether the parameter was zeroed, so that it holds the bare step.
        self._displaced = False

    @property
    def batch_key(self) -> tuple[object, ...] | None:
        """As of every matrix, and the kind of step; only steps on the parameter's own memory are batched."""
        gradient, shared = self.gradient, super().batch_key
        if not self.is_direct or gradient is None or gradient.dtype != self.parameter.dtype:
            return None
        return None if shared is None else (*shared, self.square, self._displaced)

    def _fit(self) -> None:
        """Take the mean singular value, to three digits so that a weight fitted before is not moved again."""
        if self._fits:
            self.gain = float(f"{nearest_orthogonal(read(self.value), gain='fit').gain:.3g}")

    def error_of(self, matrix: Tensor) -> float:
        """Measure ``max |W^T W / gain^2 - I|``, in float64."""
        return float(isometry_error(matrix, gain=self.gain))

    def nearest(self, whole: Tensor) -> Tensor:
        """Scale the polar factor; a zero vector of padding of an embedding stays zero."""
        wide = whole.to(torch.float32 if whole.device.type == "mps" else torch.float64)
        inside = nearest_orthogonal(wide, gain=self.gain).weight
        if self.is_frame and whole.shape[0] > whole.shape[1]:
            inside = inside.where(whole.ne(0).any(dim=1, keepdim=True), 0.0)
        return inside

    def begin_(self, inside: Tensor, *, is_moved: bool) -> None:
        """Store the matrix, and the float32 copy of a half weight."""
        super().begin_(inside, is_moved=is_moved)
        self._adopt_master(inside.to(self.dtype) if is_moved else self._saved_master())

    @property
    def _master_key(self) -> str:
        return "_".join([_MASTER, *map(str, self.place.part)])

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
        """Set the float32 copy of a half weight; to the matrix nearest to what is stored if ``value`` is None."""
        if self.is_half:
            if value is None:
                value = nearest_orthogonal(read(self.value).to(self.dtype), gain=self.gain).weight
            self.master = self.value.to(self.dtype).clone(memory_format=torch.contiguous_format)
            write_(self.master, value)

    def _refresh_master(self, master: Tensor) -> None:
        """Follow a state that was loaded into the optimizer, or an edit, since the last step."""
        saved = self.optimizer.state.get(self.parameter, {}).get(self._master_key)
        is_reloaded = saved is not None and saved is not self._exposed
        if is_reloaded or not _same(master.to(self.parameter.dtype), self.value):
            self._adopt_master(self._saved_master())
            self.drift = math.inf

    @classmethod
    def project_gradients_(cls, weights: Sequence[Self], work: Workspace, /) -> None:
        """Put the gradients into the tangent spaces, those of square weights into Lie coordinates."""
        first = weights[0]
        gradients = [weight.gradient for weight in weights if weight.gradient is not None]
        points = [weight.value if weight.master is None else weight.master for weight in weights]
        point = _joined(points, first.dtype, "points", work)
        whole = _joined(gradients, first.dtype, "gradients", work)
        project = skew_gradient_ if first.square else tangent_gradient_
        project(point, whole, gain=first.gain, workspace=work)
        write_matrices_(gradients, whole)

    def remember_(self, *, decayed: bool) -> None:
        """Keep what the retraction needs, or zero the parameter, so that it will hold the bare
        step."""
        self._displaced = decayed or (self.is_half and not reads_weight_size(self.optimizer))
        if self.master is None and (self.square or self._displaced) and not self._kept:
            self._copy_before()
        if self._displaced:
            self.value.zero_()

    def forget_(self) -> None:
        """Measure the error and the moments at the next step."""
        self._displaced, self._kept, self._state = False, False, None
        self.drift = math.inf
        if self.master is None:
            self._adopt_master(None)

    def accept_free_step_(self) -> None:
        """Start again from the nearest matrix: the step that was taken is none of this set."""
        self.start(dry_run=False)
        self.forget_()
        if self.master is None and self.square:
            self._copy_before()

    def _copy_before(self) -> None:
        if not _alike(self.before, self.value):
            self.before = torch.empty_like(self.value)
        assert self.before is not None
        self.before.copy_(self.value)

    def restore_(self) -> None:
        """Undo `remember_` when the step it prepared never came to its end."""
        before = self.before if self.master is None else self.master
        if self._displaced and before is not None:
            self.value.copy_(before)
        self._displaced = False

    @classmethod
    def retract_(cls, weights: Sequence[Self], work: Workspace, /) -> Retraction:
        """Turn the steps the optimizer took into steps along the manifold."""
        first, values = weights[0], [weight.value for weight in weights]
        moved = _joined(values, first.dtype, "gradients", work)
        before = [weight.before if weight.master is None else weight.master for weight in weights]
        points = [each for each in before if each is not None]
        point = None
        if len(points) == len(weights) and (first.square or first.is_half or first._displaced):
            point = _joined(points, first.dtype, "points", work)
        options = {"gain": first.gain, "tolerance": TOLERANCES[first.dtype], "workspace": work}
        step = moved
        if point is not None and not first._displaced:
            # The step is read by columns too, which padding makes faster.
            step = work("step", moved.shape, moved, padded=True) if first.square else moved
            torch.sub(moved, point.to(first.parameter.dtype), out=step)
        if first.square and point is not None:
            drift = max(weight.drift for weight in weights)
            try:
                taken = rotate(point, step, out=moved, drift=drift, **options)
            except ConvergenceError:
                if len(weights) == 1:  # it holds the point; of several each is tried alone
                    first._store(values, moved)
                raise
        else:
            taken = retract_(moved if point is None else moved.add_(point), **options)
        first._store(values, moved)
        return taken

    def _store(self, values: Sequence[Tensor], result: Tensor) -> None:
        write_matrices_(values, result)
        if self.master is not None:
            write_matrices_([self.master], result)

    def claim_state(self) -> bool:
        """Mark the moments of a square weight as Lie coordinates; return whether they were not, and
        so restarted."""
        if self._is_fresh and self._fits and self.error() > self.tolerance:
            self._fit()  # a checkpoint was loaded since, of weights fitted to others
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
        if not self.square or not state:
            return super().claim_state()
        is_known, self._state = state is self._state, state
        if is_known:
            return False
        if are_lie(state):
            # The drift that was saved with these weights, if it is these: the run goes on bit for bit.
            saved, tolerance = state[LIE_MARK], TOLERANCES[self.dtype]
            point = self.value if self.master is None else self.master
            if saved is not None and self.error_of(read(point)) <= saved + _ROUNDING * tolerance:
                self.drift = saved
            return False
        stale = have_stepped(state)
        if stale:
            restart(self.optimizer, self.parameter)
            state = self.optimizer.state.get(self.parameter)
        if state:
            state[LIE_MARK] = None
        return stale

    def mark_state(self, drift: float) -> None:
        """Note what a resumed run needs beside the moments of this step: the drift, which marks Lie
        coordinates, and the bytes of the float32 copy.
        """
        self.drift = drift
        self._is_fresh = False
        # A sharded weight would have to be gathered to be compared: it is measured at every step
        # instead.
        self._kept = self.square and self.is_direct
        if self._kept:
            self._copy_before()
        state = self.optimizer.state.get(self.parameter)
        self._state = state
        # SGD without momentum keeps nothing there, and does not mind.
        if not state and type(self.optimizer) is not torch.optim.SGD:
            return
        if self.square:
            self._state = state = self.optimizer.state[self.parameter]
            state[LIE_MARK] = drift
        if self.master is not None and not is_sharded(self.parameter):
            self._exposed = self.master.view(torch.uint8)
            self.optimizer.state[self.parameter][self._master_key] = self._exposed

    def release_state(self) -> None:
        """Restart moments that are in Lie coordinates, and take away what was noted beside them."""
        self.master = self._exposed = None
        state = self.optimizer.state.get(self.parameter)
        if state is None:
            return
        state.pop(self._master_key, None)
        if LIE_MARK in state:
            del state[LIE_MARK]
            if state:
                restart(self.optimizer, self.parameter)
        if not state:
            self.optimizer.state.pop(self.parameter, None)


def _joined(tensors: Sequence[Tensor], dtype: torch.dtype, name: str, work: Workspace) -> Tensor:
    """Return the one matrix, its own memory where that can be worked on, or a stack of several, tall."""
    if len(tensors) == 1:
        return tall(read(tensors[0]).to(dtype))
    matrices = [tall(tensor.detach()) for tensor in tensors]
    return torch.stack(matrices, out=work(name, (len(matrices), *matrices[0].shape), matrices[0]))


def _alike(first: Tensor | None, second: Tensor) -> bool:
    return first is not None and (first.shape, first.device) == (second.shape, second.device)


def _same(first: Tensor, second: Tensor) -> bool:
    if is_sharded(first):
        return bool((read(first) == read(second)).all())
    return torch.equal(first, second)
