"""Variants of the encoder-decoder study: warm-up put back, and T-Fixup together with orthogonality constraints."""

from __future__ import annotations

from dataclasses import replace

from wellposed.errors import ConfigError
from wellposed.recipes.variants import VARIANTS, oc3, post_ln, t_fixup
from wellposed.training.config import RunConfig

PAPER_WARMUP_STEPS, WARMUP_SHARE = 4000, 10


@VARIANTS.register("post_ln_warmup")
def post_ln_warmup(base: RunConfig, warmup_steps: float = 0) -> RunConfig:
    """post_ln with linear warm-up: of the base, else a tenth of the steps and at most 4,000 (Vaswani et al. 2017).

    The value is the number of steps. A schedule without a warm-up of its own, inverse_sqrt, becomes
    inverse_sqrt_warmup.
    """
    config = post_ln(base)
    steps = config.train.steps
    if warmup_steps != int(warmup_steps) or warmup_steps < 0:
        raise ConfigError(f"post_ln_warmup: warmup_steps = {warmup_steps}, expected a whole number of steps, 1 or more")
    automatic = config.train.warmup_steps or min(PAPER_WARMUP_STEPS, max(1, steps // WARMUP_SHARE))
    schedule = "inverse_sqrt_warmup" if config.train.schedule == "inverse_sqrt" else config.train.schedule
    train = replace(config.train, warmup_steps=int(warmup_steps) or automatic, schedule=schedule)
    return replace(config, train=train)


@VARIANTS.register("t_fixup_oc3")
def t_fixup_oc3(base: RunConfig, strength: float = 1e-6) -> RunConfig:
    """t_fixup + VAR-III of Zhang et al. (2021): no LayerNorm, no warm-up, orthogonality constraints."""
    return replace(t_fixup(base), penalty=oc3(base, strength).penalty)
