"""The variants of TransJect."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from wellposed_lab.compare.variants._parts import constrained, faster, with_model
from wellposed_lab.compare.variants._registry import VARIANTS
from wellposed_lab.training.config import RunConfig

# Part of wellposed.nn.ORTHOGONAL_WEIGHTS, repeated here as that module imports torch.
TRANSJECT_WEIGHTS = ("*.left", "*.right", "*.up_proj", "*.down_proj")
SPECTRUM_WEIGHTS = ("*.basis",)
EMBEDDING = ("*.embeddings.token",)
# Its weights only rotate, and its branches are divided by L and start from zero, so it learns
# slowly at a Transformer's rate. Accuracy after 200 steps at 5, 20, 50 and 100 times 1e-3, width 64,
# three seeds: AG News 0.59, 0.80, 0.84, 0.83; IMDb 0.63, 0.74, 0.77, 0.76; ListOps 0.34, 0.38, 0.36,
# 0.35 (majority 0.26, 0.50, 0.12).
TRANSJECT_RATE = 50.0


@VARIANTS.register("transject")
def transject(base: RunConfig, rate: float = TRANSJECT_RATE) -> RunConfig:
    """TransJect (Sengupta et al. 2023) with a Gram spectrum; learning rate 50 (or value) x the base's."""
    return _transject(base, "gram", rate, TRANSJECT_WEIGHTS + SPECTRUM_WEIGHTS)


@VARIANTS.register("transject_random")
def transject_random(base: RunConfig, rate: float = TRANSJECT_RATE) -> RunConfig:
    """TransJect with a learnt vector as the spectrum; learning rate 50 (or value) x the base's."""
    return _transject(base, "random", rate)


@VARIANTS.register("transject_redrawn")
def transject_redrawn(base: RunConfig, rate: float = TRANSJECT_RATE) -> RunConfig:
    """TransJect, its spectrum drawn in each pass as in the authors' code; rate 50 (or value) x the base's."""
    return _transject(base, "redrawn", rate)


def _transject(
    base: RunConfig,
    spectrum: Literal["gram", "random", "redrawn"],
    rate: float,
    weights: tuple[str, ...] = TRANSJECT_WEIGHTS,
) -> RunConfig:
    config = with_model(base, architecture="transject", residual="rezero", spectrum=spectrum)
    config = replace(config, train=faster(base.train, rate))
    return constrained(config, weights + EMBEDDING, embeddings="fit")
