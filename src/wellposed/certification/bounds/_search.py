"""Search for multipliers (which proves nothing) and for the smallest bound that a proof accepts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# Eigenvectors whose eigenvalues a step lowers together; the top one alone oscillates.
_TOP = 16
SLACKS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1)
"""Relative slacks of rho that are tried in turn."""
_RATE = 0.15
_FIRST_TEMPERATURE = 0.02
SMOOTHING = 0.01
# A search ends if so many steps lower rho by less than this share.
_PATIENCE = 12
_WORTH = 2e-3
# Factor of the rate after a restart from the best point.
_SLOWER = 0.3


class Ascent:
    """Gradient steps (Adam) on log multipliers, for a batch of maps; the best point is recorded."""

    def __init__(
        self,
        start: Tensor,
        value: Tensor,
        *,
        rate: float = _RATE,
        temperature: float = _FIRST_TEMPERATURE,
        restarts: int = 0,
    ) -> None:
        self.point = start
        self.best = start.clone()
        self.value = value.clone()
        self.count = 0
        self._first = torch.zeros_like(start)
        self._second = torch.zeros_like(start)
        self._rate = torch.full_like(start[..., :1], rate)
        self._temperature = temperature
        self._restarts = restarts
        self._history: list[Tensor] = []

    def is_over(self) -> bool:
        """Whether the last steps lowered no value of the batch by `_WORTH`, at the last rate."""
        self._history.append(self.value)
        if len(self._history) <= _PATIENCE:
            return False

        earlier = self._history[-1 - _PATIENCE]
        if bool((self.value * (1 + _WORTH) < earlier).any()):
            return False
        if not self._restarts:
            return True

        self._restarts -= 1
        self._history.clear()
        self.point = self.best
        self._first = torch.zeros_like(self._first)
        self._rate = _SLOWER * self._rate
        return False

    @property
    def temperature(self) -> float:
        """How much eigenvalues below the largest count, relative to it; it falls."""
        return self._temperature / math.sqrt(self.count + 1)

    def step(self, value: Tensor, gradient: Tensor) -> None:
        """Record the value of the point, and move on; back towards the best if it has none."""
        self.count += 1
        better = (value < self.value)[..., None]
        self.best = torch.where(better, self.point, self.best)
        self.value = torch.minimum(self.value, value.nan_to_num(nan=math.inf))
        fails = ~(value.isfinite()[..., None] & gradient.isfinite().all(-1, keepdim=True))
        gradient = torch.where(fails, 0.0, gradient)
        first = 0.8 * self._first + 0.2 * gradient
        second = 0.95 * self._second + 0.05 * gradient.square()
        size = (second / (1 - 0.95**self.count)).sqrt() + 1e-8
        move = first / (1 - 0.8**self.count) / size / self.count**0.25
        back = 0.5 * (self.point + self.best)
        self.point = torch.where(fails, back, self.point - self._rate * move)
        self._first = torch.where(fails, 0.0, first)
        self._second = torch.where(fails, 0.0, second)
        self._rate = torch.where(fails, 0.5 * self._rate, self._rate)


def top_weights(matrix: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest eigenvalue, the top eigenvectors, and weights that favour the first."""
    usable = matrix.isfinite().all(-1).all(-1)
    identity = torch.eye(matrix.shape[-1], dtype=matrix.dtype)
    values, vectors = torch.linalg.eigh(torch.where(usable[..., None, None], matrix, identity))
    count = min(_TOP, values.shape[-1])
    largest = values[..., -1:]
    scaled = (values[..., -count:] - largest) / (temperature * largest.clamp_min(1e-300))
    weights = torch.softmax(scaled, -1)
    return torch.where(usable, largest[..., 0], math.inf), vectors[..., -count:], weights


def smooth_largest(matrix: Tensor) -> Tensor:
    """Return a mean of the top eigenvalues, to differentiate: at the best multipliers several are
    equal, and one alone says little about how the largest changes."""
    _, vectors, weights = top_weights(matrix.detach(), SMOOTHING)
    return ((matrix @ vectors) * vectors).sum(-2) @ weights


def smallest_proved(
    guesses: Tensor, proves: Callable[[Tensor], Tensor], slacks: Sequence[float] = SLACKS
) -> Tensor:
    """Return sqrt(rho) for the smallest rho above each guess that is proved; infinite if none is."""
    proved_roots = torch.full_like(guesses, math.inf)
    for slack in slacks:
        still_open = proved_roots.isinf() & guesses.isfinite()
        if not bool(still_open.any()):
            break
        tried = (guesses * (1 + slack)).clamp_min(torch.finfo(guesses.dtype).tiny)
        proved = proves(torch.where(still_open, tried, 1.0)) & still_open
        # The root is rounded up.
        proved_roots = torch.where(proved, tried.sqrt() * (1 + 1e-15), proved_roots)
    return proved_roots
