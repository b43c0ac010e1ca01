"""One held matrix: where it lives in the model, and what every set answers for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wellposed.constrain._report import ConstrainedWeight
from wellposed.constrain._select import Candidate
from wellposed.linalg import Retraction, Workspace
from wellposed.linalg.sharded import read, write_


class Weight:
    """A matrix that is held in a set by projecting it after each step; a set is a subclass."""

    square = False
    is_frame = False
    is_half = False
    is_direct = False
    decays = False
    """Whether weight decay keeps the matrix in the set."""
    tolerance = 0.0
    """The error up to which a matrix counts as one of the set already."""
    inner_tolerance = 0.0
    step_is_skew = False
    drift: float | None = None
    master: Tensor | None = None
    before: Tensor | None = None

    def __init__(self, place: Candidate, optimizer: Optimizer, size: float, also: tuple[str, ...] = ()) -> None:
        assert place.parameter is not None  # what cannot be held was refused before
        self.place = place
        self.path = place.label
        self.parameter: nn.Parameter = place.parameter
        self.rows = place.rows
        self.optimizer = optimizer
        self.gain = size
        self.also = also

    @property
    def value(self) -> Tensor:
        """The matrix, without its graph: a view of the parameter."""
        return self.place.seen(self.parameter.detach())

    @property
    def gradient(self) -> Tensor | None:
        """The part of the gradient that belongs to the matrix, a view of it."""
        gradient = self.parameter.grad
        return None if gradient is None else self.place.seen(gradient)

    def error(self) -> float:
        """Measure how far the matrix, as stored, is from the set."""
        raise NotImplementedError

    def retract_(self, work: Workspace, /) -> Retraction:
        """Put the matrix back into the set."""
        raise NotImplementedError

    def nearest(self) -> tuple[Tensor, float]:
        """Return the matrix of the set to start from, and the error of the present one."""
        raise NotImplementedError

    def start(self, *, dry_run: bool) -> ConstrainedWeight:
        """Move the matrix into the set, unless it is there, and tell how far."""
        whole = read(self.value).double()
        inside, before = self.nearest()
        moved = inside.double() - whole
        if not dry_run and before > self.tolerance:
            write_(self.value, inside)
        return ConstrainedWeight(
            path=self.path,
            shape=(whole.shape[0], whole.shape[1]),
            gain=self.gain,
            moved_frobenius=_ratio(moved.norm(), whole.norm()),
            moved_spectral=_ratio(torch.linalg.matrix_norm(moved, 2), torch.linalg.matrix_norm(whole, 2)),
            error_before=before,
            error_after=self.error_of(inside),
            also=self.also,
        )

    def error_of(self, matrix: Tensor) -> float:
        """Measure how far a matrix is from the set."""
        raise NotImplementedError

    def project_gradient_(self, work: Workspace) -> None:
        """Put the gradient into the coordinates the optimizer is to step in: its own, unless a set says otherwise."""

    def remember_(self, *, displace: bool) -> None:
        """Keep what the retraction needs."""

    def restore_(self) -> None:
        """Undo `remember_` when the step it prepared never came to its end."""

    def claim_state(self) -> bool:
        """Return whether moments in other coordinates had to be restarted."""
        return False

    def mark_state(self, drift: float | None = None) -> None:
        """Note beside the moments what a resumed run needs."""

    def release_state(self) -> None:
        """Restart moments that only a constrained step understands."""


def _ratio(part: Tensor, whole: Tensor) -> float:
    return float(part / whole.clamp_min(torch.finfo(whole.dtype).tiny))
