"""Slopes between two inputs, ``|f(x) - f(y)| / |x - y|``, measured as the module runs, whatever its
gradients say."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.attack._directions import perturbation_size
from wellposed.linalg import Norm

ROUNDING = 8
"""This many eps of the two outputs' sizes are taken off their difference before it counts."""


@dataclass(frozen=True)
class Pairs:
    """Two inputs (batch, tokens, width) each, and the slope measured between them (batch,),
    float64."""

    x: Tensor
    y: Tensor
    slopes: Tensor

    def better(self, other: Pairs) -> Pairs:
        """Keep the steeper pair of each entry of the batch."""
        wins = other.slopes > self.slopes
        wide = wins[:, None, None]
        return Pairs(
            torch.where(wide, other.x, self.x),
            torch.where(wide, other.y, self.y),
            torch.where(wins, other.slopes, self.slopes),
        )


@dataclass(frozen=True)
class SlopeMeter:
    """Measures and ascends slopes of a module in one dtype."""

    call: Callable[[Tensor], Tensor]
    norm: Norm
    dtype: torch.dtype
    allowed: Tensor
    """(tokens, 1), 1 where a token may move."""
    radius: float | None

    @property
    def least(self) -> float:
        """Smallest ``|x - y| / |x|`` that counts: below the cube root of the unit, rounding
        outweighs curvature."""
        return torch.finfo(self.dtype).eps ** (1 / 3)

    def steps(self) -> list[float]:
        """Step lengths relative to ``|x|`` from 1 down: four for float32, nine for float64, two for
        bfloat16."""
        return [
            4.0**-power for power in range(1 + math.floor(-math.log(self.least) / math.log(4.0)))
        ]

    def search(self, start: Tensor, random: Tensor, found: tuple[Tensor, Tensor]) -> Pairs:
        """Return the steepest pair of each restart: along the direction found at its input, random,
        start to start."""
        pairs = self.along(*found)
        pairs = pairs.better(
            self.along(start, random / perturbation_size(random, self.norm)[:, None, None])
        )
        return pairs.better(self.best([(start, start.roll(1, 0)), (start, 2 * start)]))

    def along(self, x: Tensor, direction: Tensor) -> Pairs:
        """Return the steepest pair ``x, x + t |x| v`` over the step lengths t of both signs."""
        length = perturbation_size(x, self.norm)
        length = torch.where(length > 0, length, 1.0)[:, None, None]
        return self.best(
            (x, x + sign * step * length * direction) for step in self.steps() for sign in (1, -1)
        )

    def best(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Pairs:
        """Measure pairs and keep the steepest for each entry of the batch."""
        with torch.no_grad():
            measured = [self.measure(x, y) for x, y in pairs]
        found = measured[0]
        for other in measured[1:]:
            found = found.better(other)
        return found

    def measure(self, x: Tensor, y: Tensor) -> Pairs:
        """Return the slopes between inputs rounded to the dtype: 0 if too close, -inf where an
        output is not finite."""
        x, y = self._place(x), self._place(x + self.allowed.to(x) * (y - x))
        outputs = [self.call(value).double() for value in (x, y)]
        apart = perturbation_size(x.double() - y.double(), self.norm)
        sizes = sum(perturbation_size(output.detach(), self.norm) for output in outputs)
        noise = ROUNDING * torch.finfo(self.dtype).eps * sizes
        moved = (perturbation_size(outputs[0] - outputs[1], self.norm) - noise).clamp_min(0.0)
        far = apart > self.least * perturbation_size(x.double(), self.norm)
        slopes = torch.where(far | ~torch.isfinite(moved), moved, 0.0) / torch.where(
            far, apart, 1.0
        )
        return Pairs(x, y, torch.where(torch.isfinite(slopes), slopes, -math.inf))

    def ascend(self, pairs: Pairs, steps: int, learning_rate: float) -> Pairs:
        """Move both inputs up the gradient of their slope; what counts is measured, so a wrong
        gradient does no harm.

        The inputs are moved in float64 and rounded for each measurement: a step of Adam is lost in
        low precision.
        """
        scales = [value.double().flatten(1).square().mean(-1).sqrt().clamp_min(1e-12)[:, None, None]
                  for value in (pairs.x, pairs.y)]  # fmt: skip
        units = [
            (value.double() / scale).requires_grad_()
            for value, scale in zip((pairs.x, pairs.y), scales, strict=True)
        ]
        optimizer = torch.optim.Adam(units, lr=learning_rate, maximize=True)
        for _ in range(steps):
            optimizer.zero_grad()
            moved = self.measure(*(unit * scale for unit, scale in zip(units, scales, strict=True)))
            score = moved.slopes.clamp_min(torch.finfo(torch.float64).tiny).log().sum()
            pairs = pairs.better(Pairs(moved.x.detach(), moved.y.detach(), moved.slopes.detach()))
            if not score.requires_grad:
                break
            score.backward()
            for unit in units:
                unit.grad = None if unit.grad is None else unit.grad.nan_to_num(0.0, 0.0, 0.0)
            optimizer.step()
        return pairs

    def _place(self, x: Tensor) -> Tensor:
        if self.radius is not None:
            room = self.radius * (1 - torch.finfo(self.dtype).eps)
            x = x * (room / x.norm(dim=-1, keepdim=True).clamp_min(room))
        return x.to(self.dtype)
