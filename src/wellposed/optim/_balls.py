"""Norm balls: their farthest point along a gradient, and the size of a matrix in units of the ball."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.errors import unknown_name
from wellposed.linalg import certified_spectral_norm, compute_dtype, near_polar_factors


@dataclass(frozen=True)
class Ball(ABC):
    """``{W : size(W) <= radius(shape)}``, for a matrix (out, in) and a radius of 1."""

    takes: tuple[int, ...] = (2,)
    """Dimensions that a parameter, or one entry of a stack, may have."""

    @abstractmethod
    def radius(self, shape: tuple[int, ...]) -> float:
        """Return the radius, in the units of `size`, that the shape gives."""

    @abstractmethod
    def size(self, weight: Tensor) -> float:
        """Measure the norm of a weight; the certified one, where rounding matters."""

    @abstractmethod
    def farthest(self, gradient: Tensor) -> Tensor:
        """Return ``argmax <G, Z>`` over ``size(Z) <= 1``, of each in a stack; 0 if G is 0."""


class SpectralBall(Ball):
    """``|W|_2 <= sqrt(out / in)``: the root mean square of W x is at most that of x."""

    def radius(self, shape: tuple[int, ...]) -> float:
        return math.sqrt(shape[-2] / shape[-1])

    def size(self, weight: Tensor) -> float:
        return float(certified_spectral_norm(weight))

    def farthest(self, gradient: Tensor) -> Tensor:
        return near_polar_factors(gradient)


class SignBall(Ball):
    """``|W_ij| <= 1 / in``: logits of a token of root mean square 1 are at most 1."""

    def radius(self, shape: tuple[int, ...]) -> float:
        return 1.0 / shape[-1]

    def size(self, weight: Tensor) -> float:
        return float(weight.abs().max()) if weight.numel() else 0.0

    def farthest(self, gradient: Tensor) -> Tensor:
        return gradient.sign()


class VectorsBall(Ball):
    """Vectors of an embedding, the rows of a table, of root mean square at most 1."""

    def radius(self, shape: tuple[int, ...]) -> float:
        return math.sqrt(shape[-1])

    def size(self, weight: Tensor) -> float:
        return float(torch.linalg.vector_norm(weight.double(), dim=-1).max())

    def farthest(self, gradient: Tensor) -> Tensor:
        wide = gradient.to(compute_dtype(gradient))
        tiny = torch.finfo(wide.dtype).tiny
        wide = wide / wide.abs().amax(-1, keepdim=True).clamp_min(tiny)
        return wide / torch.linalg.vector_norm(wide, dim=-1, keepdim=True).clamp_min(tiny)


BALLS: dict[str, Ball] = {
    "spectral": SpectralBall(),
    "sign": SignBall(),
    "vectors": VectorsBall(),
    "rms": VectorsBall(takes=(0, 1, 2)),
}
"""Balls by the name that a group gives as its ``norm``; ``"rms"`` is for biases, also a row for each
expert, and gains."""


def ball_named(name: str) -> Ball:
    """Return a ball; `ConfigError` with the nearest names for another."""
    if name not in BALLS:
        raise unknown_name("norm of Scion", name, BALLS)
    return BALLS[name]
