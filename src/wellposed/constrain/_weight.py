"""One held matrix: where it lives in the model, and what the handle asks of it whatever its set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wellposed.constrain._report import ConstrainedWeight
from wellposed.constrain._select import Candidate
from wellposed.linalg import Retraction, Workspace

# Optimizers that scale their step by the size of the weight: the weight may not be displaced under
# them.
_READS_WEIGHT_SIZE = frozenset({"adafactor", "lamb", "lars", "nvlamb", "fusedlamb"})

# Entries up to which a CPU saves more by fewer calls than it loses by stacking.
_SMALL = 2**14


class Weight(ABC):
    """A matrix that is put back into a set after each step; a set is a subclass."""

    decays = False
    """Whether weight decay keeps the matrix in the set."""
    stored_dtype: torch.dtype | None = None
    """The dtype that copies were made for; None where any dtype will do."""
    is_steered: bool
    """Whether the gradient is put into coordinates of the set before the optimizer steps."""

    def __init__(
        self, place: Candidate, optimizer: Optimizer, size: float, also: tuple[str, ...] = ()
    ) -> None:
        assert place.parameter is not None  # what cannot be held was refused before
        self.place = place
        self.path = place.label
        self.parameter: nn.Parameter = place.parameter
        self.rows = place.rows
        self.optimizer = optimizer
        self.gain = size
        # Whether a batched product is faster than a loop.
        self.gains_from_batch = self.parameter.device.type != "cpu" or self.value.numel() <= _SMALL
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

    @abstractmethod
    def error(self) -> float:
        """Measure how far the matrix, as stored, is from the set."""

    @abstractmethod
    def start(self, *, dry_run: bool) -> ConstrainedWeight:
        """Move the matrix into the set, unless it is there, and tell how far."""

    @abstractmethod
    def retract_(self, work: Workspace, /) -> Retraction:
        """Put the matrix back into the set."""

    @classmethod
    @abstractmethod
    def retract_batch_(cls, weights: Sequence[Any], work: Workspace, /) -> Retraction:
        """Do `retract_` for weights of one `batch_key`; nothing is written when a step is not
        finite."""

    @property
    @abstractmethod
    def batch_key(self) -> object | None:
        """What those share that one batched product can serve; None where the matrix is worked on
        by itself."""

    @abstractmethod
    def project_gradient_(self, work: Workspace, /) -> None:
        """Put the gradient into the coordinates the optimizer is to step in."""

    @classmethod
    @abstractmethod
    def project_gradients_(cls, weights: Sequence[Any], work: Workspace, /) -> None:
        """Do `project_gradient_` for weights of one `batch_key`."""

    @abstractmethod
    def remember_(self, *, decayed: bool) -> None:
        """Keep what the retraction needs."""

    @abstractmethod
    def restore_(self) -> None:
        """Undo `remember_` when the step it prepared never came to its end."""

    @abstractmethod
    def claim_state(self) -> bool:
        """Return whether moments in other coordinates had to be restarted."""

    @abstractmethod
    def mark_state(self, drift: float) -> None:
        """Note beside the moments what a resumed run needs."""

    @abstractmethod
    def release_state(self) -> None:
        """Restart moments that only a constrained step understands."""


def reads_weight_size(optimizer: Optimizer) -> bool:
    """Whether the optimizer's step depends on the norm of the weight."""
    return type(optimizer).__name__.lower() in _READS_WEIGHT_SIZE
