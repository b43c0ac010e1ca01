"""The changes of a configuration that several variants share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from wellposed.model_options import ModelOptions
from wellposed_lab.compare.variants._registry import OwnArchitectureError
from wellposed_lab.training.config import RunConfig, TrainOptions

PARTS = ["architecture", "attention", "feedforward", "norm", "residual", "qk_norm"]
PARTS += ["unit_embeddings", "ball_embeddings", "logit_gain"]
"""Parts of a model that a variant resets to the defaults, except those that it changes."""


def with_model(base: RunConfig, **changes: Any) -> RunConfig:
    """Return ``base`` with these options of its model, and the defaults for the other `PARTS`."""
    if base.start.model:
        raise OwnArchitectureError(f"{base.start.model} has its own architecture")
    usual = ModelOptions()
    plain = {name: getattr(usual, name) for name in PARTS}
    if base.model.init == "t_fixup":
        # Only the variant of that name uses it; with norms it is refused.
        plain["init"] = "xavier"
    start = replace(base.start, dt_fixup=0)
    return replace(base, start=start, model=base.model.with_parts(**{**plain, **changes}))


def baseline(base: RunConfig) -> RunConfig:
    """Return what a penalty or a set of weights is added to: the model of --from, or post_ln."""
    return base if base.start.model else with_model(base)


def without_warmup(config: RunConfig) -> RunConfig:
    """Return the run without warm-up; a schedule that is one becomes inverse_sqrt."""
    warm = config.train.schedule in ("inverse_sqrt_warmup", "kim2021")
    schedule = "inverse_sqrt" if warm else config.train.schedule
    train = replace(config.train, warmup_steps=0, warmup_share=0.0, schedule=schedule)
    return replace(config, train=train)


def faster(options: TrainOptions, rate: float) -> TrainOptions:
    """Scale the learning rate, and gamma for the schedule kim2021."""
    return replace(options, learning_rate=rate * options.learning_rate, gamma=rate * options.gamma)


def constrained(
    config: RunConfig,
    weights: tuple[str, ...],
    to: Literal["orthogonal", "spectral", "hypersphere", "logits"] = "orthogonal",
    bound: float | str | None = None,
    embeddings: Literal["refuse", "fit"] = "refuse",
) -> RunConfig:
    """Return the run that keeps these weights in a set; the other options of sets are the base's."""
    where = ",".join(weights)
    chosen = replace(config.constrain, where=where, to=to, bound=bound, embeddings=embeddings)
    return replace(config, constrain=chosen)
