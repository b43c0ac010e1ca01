"""`CappedAttention`: one attention module, the largest logits seen in it, and its notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wellposed.constrain._constrained import Constrained
from wellposed.constrain._moments import leave_lie_coordinates
from wellposed.constrain._wholes import Wholes
from wellposed.constrain.logits._rows import head_rows, scaled_parameters
from wellposed.errors import ConfigError
from wellposed.hooks import AttentionCall, AttentionWatcher, largest_logits
from wellposed.linalg import ErrorNorm
from wellposed.roles import AttentionRole

NEAR = 0.5
"""Fraction of the bound from which logits are read exactly, and their growth is remembered."""
_NOTES = "wellposed_logits"
"""Key in the optimizer's state: the growth, and each head's last largest logit."""


class LateNumbers:
    """Numbers on their way from a device to the host, which does not wait for them."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers.to("cpu", non_blocking=True)
        self._arrival = None if numbers.device.type == "cpu" else torch.Event(numbers.device)
        if self._arrival is not None:
            self._arrival.record()

    @cached_property
    def values(self) -> list[float]:
        """The numbers."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._numbers.tolist()

    def __getstate__(self) -> dict[str, Any]:
        return {"values": self.values}


class CappedAttention(Constrained):
    """One attention module: rows of its query and key, and the largest logits seen in it."""

    def __init__(
        self, role: AttentionRole, model: nn.Module, owners: Mapping[Any, Optimizer], bound: float
    ) -> None:
        self.role = role
        self.module = model.get_submodule(role.path)
        self.bound = bound
        self.num_heads = role.num_heads
        self.parts = head_rows(role)
        self.scaled = scaled_parameters(self.parts, role.num_heads)
        slices = [part.weight_slice for part in self.parts]
        assert slices[0].parameter is not None  # refused before otherwise
        path = role.path or type(model).__name__
        super().__init__(path, slices, slices[0].parameter, owners[role.query.parameter])
        self.largest: Tensor | None = None
        """The largest logit of each head in the passes since the last step."""
        self.peak: Tensor | float = -torch.inf
        """The largest logit of all heads before the last step."""
        self.late: tuple[LateNumbers, int] | None = None
        """Until the next step: the numbers on their way to the host, and the index of `peak`."""
        self.scaled_with: tuple[Any, tuple[Tensor, Tensor]] | None = None
        """The modules that were scaled with this one first, and their `heads_and_powers`."""

    def error(self, wholes: Wholes | None = None, *, norm: ErrorNorm = "max") -> float:
        """Return by what part the largest logit was above the bound before the last scaling."""
        del wholes
        if norm != "max":
            raise ConfigError(
                "error(norm='spectral') is by singular values, and the set Logits says nothing of"
                " them; leave norm= out, or look with wellposed.measure(model)"
            )
        return max(0.0, float(self.peak) / self.bound - 1.0)

    def claim(self) -> bool:
        """Leave the coordinates of an orthogonal query; return whether moments restarted."""
        return leave_lie_coordinates(self.optimizer, self.parameter)

    def release(self) -> None:
        """Remove the notes from the optimizer's state."""
        leave_lie_coordinates(self.optimizer, self.parameter)
        state = self.optimizer.state.get(self.parameter)
        if state is None:
            return
        state.pop(_NOTES, None)
        if not state:
            self.optimizer.state.pop(self.parameter, None)

    def stepped(self) -> list[Tensor]:
        """Return the local parts of all parameters whose rows are scaled."""
        return [part.local for part in self.scaled]

    def watch(self, handles: list[Any]) -> None:
        """Watch the forward passes that have gradients."""
        role = replace(self.role, path="")
        # In one line, so that no interrupt comes between the two.
        handles.append(AttentionWatcher(self.module, [role], self._see, wanted=_with_gradients))

    @torch.no_grad()
    def _see(self, _role: Any, calls: Sequence[tuple[AttentionCall, Tensor]]) -> None:
        for call, output in calls:
            largest = largest_logits(call, output, above=NEAR * self.bound).float()
            self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)

    def note(self) -> Tensor:
        """Return the largest growth of a logit near the bound, and each head's last logit."""
        state = self.optimizer.state.get(self.parameter, {})
        device = self.parameter.device
        saved = state.get(_NOTES)
        if saved is None:
            return nn.functional.pad(torch.ones(1, device=device), (0, self.num_heads))
        # Optimizers cast loaded state to the dtype of the parameter; all dtypes represent bytes.
        is_bytes = isinstance(saved, Tensor)
        saved = saved.to(torch.uint8).view(torch.float32) if is_bytes else torch.tensor(saved)
        return saved.to(device)

    def keep(self, note: Tensor) -> None:
        """Store the next result of `note`."""
        # Other optimizers than SGD may mistake the note for their own initialised state.
        if self.optimizer.state.get(self.parameter) or type(self.optimizer) is torch.optim.SGD:
            self.optimizer.state[self.parameter][_NOTES] = note.view(torch.uint8)


def _with_gradients(_: AttentionRole) -> bool:
    return torch.is_grad_enabled()
