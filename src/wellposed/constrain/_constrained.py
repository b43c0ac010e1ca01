"""`Constrained`: one constrained weight or module as its handle sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wellposed.constrain._weight_slice import WeightSlice
from wellposed.constrain._wholes import Wholes
from wellposed.linalg import ErrorNorm


class Constrained(ABC):
    """Parameters that a handle changes after each step, and what undoes a step that does not end."""

    def __init__(
        self,
        path: str,
        slices: Sequence[WeightSlice],
        parameter: nn.Parameter,
        optimizer: Optimizer,
    ) -> None:
        self.path = path
        """The name in reports and messages."""
        self.slices = slices
        """All matrices that are constrained with it."""
        self.parameter = parameter
        """The parameter whose gradient shows that the next step changes it."""
        self.optimizer = optimizer
        self.is_in_step = False
        """Whether a step began that has not written its result."""
        self.is_saved = False
        """Whether there is a copy from before the step that began."""
        self.spare: list[Tensor] = []
        """Copies of `stepped`, while a step runs, if nothing else keeps them."""

    @property
    def entries_in_float32(self) -> int:
        """Count of entries of `parameter` with a float32 copy, in which small steps are not lost."""
        return 0

    @abstractmethod
    def stepped(self) -> list[Tensor]:
        """Return this process's part of each tensor that a step and its result change: views."""

    @abstractmethod
    def error(self, wholes: Wholes | None = None, *, norm: ErrorNorm = "max") -> float:
        """Measure how far it is from what `constrain_` promised."""

    @abstractmethod
    def claim(self) -> bool:
        """Follow edits and loaded states; return whether moments of other steps restarted."""

    def watch(self, handles: list[Any]) -> None:
        """Register hooks on modules, if any are needed; append their removable handles."""

    def forget(self) -> None:
        """Drop what is remembered of earlier steps: free ones may have come between."""
        self.is_in_step = self.is_saved = False
        self.spare = []

    def restore(self) -> None:
        """Go back to the copies from before the step that began."""
        if self.is_saved and self.spare:
            torch._foreach_copy_(self.stepped(), self.spare)
        self.is_in_step = self.is_saved = False
        self.spare = []

    def restore_gradient(self) -> None:
        """Put a changed gradient back, so that a second step takes the same way."""

    def abandon(self) -> None:
        """Leave a step that did not end, of which nobody was told."""
        if self.is_in_step:
            self.forget()  # a free step, and perhaps edits since

    def release(self) -> None:
        """Remove all notes from the optimizer's state."""
