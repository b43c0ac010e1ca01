"""Drawn shapes: a tiny set of gray images for trying tasks of images without any file."""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

SHAPES = ("disc", "ring", "square", "cross")
GENERATOR_VERSION = 1
_NOISE = 24


def draw_shapes(count: int, size: int, seed: str) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Return ``count`` noisy images of one bright shape each and their classes, in turn, by (seed,
    number) alone."""
    labels = np.arange(count, dtype=np.int64) % len(SHAPES)
    drawn = [
        _draw(SHAPES[label], size, random.Random(f"shapes/{GENERATOR_VERSION}/{seed}/{index}"))
        for index, label in enumerate(labels.tolist())
    ]
    return np.stack(drawn), labels


def _draw(shape: str, size: int, generator: random.Random) -> NDArray[np.uint8]:
    radius = generator.uniform(0.15, 0.3) * size
    centre = [generator.uniform(radius, size - radius) for _ in range(2)]
    level = generator.uniform(100, 200)
    axis = np.arange(size) + 0.5
    x, y = np.abs(axis[None, :] - centre[0]), np.abs(axis[:, None] - centre[1])
    far = np.hypot(x, y)
    inside = {
        "disc": far <= radius,
        "ring": (far <= radius) & (far >= 0.55 * radius),
        "square": np.maximum(x, y) <= 0.85 * radius,
        "cross": (np.maximum(x, y) <= radius) & (np.minimum(x, y) <= 0.3 * radius),
    }[shape]
    noise = np.frombuffer(generator.randbytes(size * size), np.uint8).reshape(size, size)
    return (noise % (2 * _NOISE) + level * inside).astype(np.uint8)
