"""The ascent that attacks share, and its two scores: a Jacobian's norm, or a slope between inputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from wellposed.attack._inputs import Call, perturbation_size, steepest_direction
from wellposed.linalg import TokenNorm

ROUNDING = 8
"""Multiples of eps times the size of two outputs that their difference must exceed to count."""


def ascend(
    variables: Sequence[Tensor], score: Callable[[bool], Tensor], steps: int, learning_rate: float
) -> None:
    """Move ``variables`` up the sum of ``score(is_last)`` by Adam; non-finite gradients are zero."""
    optimizer = torch.optim.Adam(variables, lr=learning_rate, maximize=True)
    for step in range(steps + 1):
        optimizer.zero_grad()
        reached = score(step == steps)
        # A linear map has no gradient to climb, but its score still searches directions.
        if step == steps or not reached.requires_grad:
            continue
        reached.nan_to_num(0.0, 0.0, 0.0).sum().backward()
        for variable in variables:
            if variable.grad is not None:
                variable.grad.nan_to_num_(0.0, 0.0, 0.0)
        optimizer.step()


def as_variables(start: Tensor) -> tuple[Tensor, Tensor]:
    """Split inputs into entries about 1 and a log scale: one learning rate fits all scales."""
    size = start.flatten(1).square().mean(-1).sqrt().clamp_min(1e-12)[:, None, None]
    return (start / size).requires_grad_(), size.log().requires_grad_()


def in_ball(x: Tensor, radius: float | None) -> Tensor:
    """Scale tokens down to this 2-norm."""
    return x if radius is None else x * (radius / x.norm(dim=-1, keepdim=True).clamp_min(radius))


@dataclass(frozen=True)
class Found:
    """The best input of each restart, a second tensor (batch, tokens, width), and their slopes."""

    x: Tensor
    other: Tensor
    """A direction, or a second input."""
    slopes: Tensor

    @classmethod
    def detached(cls, x: Tensor, other: Tensor, slopes: Tensor) -> Found:
        """Detach the tensors."""
        return cls(x.detach(), other.detach(), slopes.detach())

    def better(self, other: Found) -> Found:
        """Return the steeper of each restart; non-finite slopes never win."""
        wins = torch.isfinite(other.slopes) & (other.slopes > self.slopes)
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Found(*(torch.where(wins.view(-1, *[1] * (a.ndim - 1)), b, a) for a, b in pairs))

    @property
    def best(self) -> int:
        """Number of the steepest restart."""
        return int(self.slopes.argmax())


@dataclass(frozen=True)
class LocalSlope:
    """Finds v of norm 1 with a large ``|J(x) v|`` for every input of a batch."""

    call: Call
    norm: TokenNorm

    def __call__(self, x: Tensor, direction: Tensor, inner: int) -> tuple[Tensor, Tensor]:
        """Return ``|J(x) v|`` (differentiable) and v, searched from ``direction``."""
        y = self.call(x)
        if not y.requires_grad:
            return y.new_zeros(y.shape[0]), direction

        # Alternate u <- dual(J v), v <- dual(J^T u); J v is the derivative of u -> J^T u.
        dummy = torch.zeros_like(y, requires_grad=True)
        (pullback,) = torch.autograd.grad(y, x, dummy, create_graph=True)
        direction = steepest_direction(direction, self.norm)
        left = torch.zeros_like(y)
        for _ in range(inner):
            (pushed,) = torch.autograd.grad(pullback, dummy, direction, retain_graph=True)
            left = _aligned(pushed, self.norm)
            (pulled,) = torch.autograd.grad(y, x, left, retain_graph=True)
            direction = steepest_direction(pulled, self.norm)

        (pulled,) = torch.autograd.grad(y, x, left, create_graph=True)
        # At the best (u, v) the gradient of the norm is that of u^T J(x) v with u and v fixed.
        return (pulled * direction).flatten(1).sum(-1), direction


_DUALS: dict[TokenNorm, TokenNorm] = {2: 2, "tok": "sum", "sum": "tok"}


def _aligned(pushed: Tensor, norm: TokenNorm) -> Tensor:
    """Return the functional of dual norm 1 that attains the norm of ``J v``."""
    if norm != "inf":
        return steepest_direction(pushed, _DUALS[norm])
    flat = pushed.flatten(1)
    chosen = nn.functional.one_hot(flat.abs().argmax(-1), flat.shape[-1])
    return (chosen * flat.sign()).view_as(pushed)


@dataclass(frozen=True)
class SlopeMeter:
    """Measures and ascends ``|f(x) - f(y)| / |x - y|`` in one dtype, without trusting gradients."""

    call: Callable[[Tensor], Tensor]
    norm: TokenNorm
    dtype: torch.dtype
    radius: float | None

    @property
    def smallest_step(self) -> float:
        """Smallest ``|x - y| / |x|`` that counts; below it, rounding outweighs curvature."""
        return torch.finfo(self.dtype).eps ** (1 / 3)

    def search(self, start: Tensor, random: Tensor, ascended: Found) -> Found:
        """Return each restart's steepest pair: along its direction, at random, to the next start."""
        unit = random / perturbation_size(random, self.norm)[:, None, None]
        pairs = self.along(ascended.x, ascended.other).better(self.along(start, unit))
        return pairs.better(self.best([(start, start.roll(1, 0)), (start, 2 * start)]))

    def along(self, x: Tensor, direction: Tensor) -> Found:
        """Return the steepest pair ``x, x + t |x| v`` for step lengths t of both signs, from 1
        down: nine in float64, four in float32, two in bfloat16."""
        length = perturbation_size(x, self.norm)
        length = torch.where(length > 0, length, 1.0)[:, None, None]
        count = 1 + math.floor(-math.log(self.smallest_step) / math.log(4.0))
        steps = [sign * 4.0**-power for power in range(count) for sign in (1, -1)]
        return self.best((x, x + step * length * direction) for step in steps)

    def best(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> Found:
        """Measure pairs and return the steepest for each entry of the batch."""
        with torch.no_grad():
            first, *others = [self.measure(x, y) for x, y in pairs]
        for other in others:
            first = first.better(other)
        return first

    def measure(self, x: Tensor, y: Tensor) -> Found:
        """Return slopes of inputs in the dtype: 0 if too close, -inf if an output is not finite."""
        x = self._in_range(x)
        y = self._in_range(y)
        outputs = [self.call(value).double() for value in (x, y)]
        apart = perturbation_size(x.double() - y.double(), self.norm)
        sizes = sum(perturbation_size(output.detach(), self.norm) for output in outputs)
        noise = ROUNDING * torch.finfo(self.dtype).eps * sizes
        moved = (perturbation_size(outputs[0] - outputs[1], self.norm) - noise).clamp_min(0.0)
        far = apart > self.smallest_step * perturbation_size(x.double(), self.norm)
        counted = torch.where(far | ~torch.isfinite(moved), moved, 0.0)
        slopes = counted / torch.where(far, apart, 1.0)
        slopes = torch.where(torch.isfinite(slopes), slopes, -math.inf)
        return Found(x, y, slopes)

    def ascend(self, pairs: Found, steps: int, learning_rate: float) -> Found:
        """Move both inputs up their slope. Slopes are measured, so wrong gradients do no harm;
        inputs move in float64, as low precision would lose the steps of Adam."""
        (unit_x, scale_x), (unit_y, scale_y) = (
            as_variables(value.double()) for value in (pairs.x, pairs.other)
        )
        scales = [scale.detach().exp() for scale in (scale_x, scale_y)]

        def score(is_last: bool) -> Tensor:
            nonlocal pairs
            del is_last
            moved = self.measure(unit_x * scales[0], unit_y * scales[1])
            pairs = pairs.better(Found.detached(moved.x, moved.other, moved.slopes))
            return moved.slopes.clamp_min(torch.finfo(torch.float64).tiny).log()

        if steps:
            ascend([unit_x, unit_y], score, steps - 1, learning_rate)
        return pairs

    def _in_range(self, x: Tensor) -> Tensor:
        radius = self.radius
        room = None if radius is None else radius * (1 - torch.finfo(self.dtype).eps)
        return in_ball(x, room).to(self.dtype)
