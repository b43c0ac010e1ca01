"""From a `RunConfig` to the objects of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import nn

from wellposed.training.config import PenaltyOptions, RunConfig

if TYPE_CHECKING:
    from wellposed.tasks import Task

ModelFactory = Callable[[RunConfig, "Task"], nn.Module]


def build_run_model(config: RunConfig, task: Task) -> nn.Module:
    """Return the model that ``config.model`` describes, with the vocabulary, labels and positions of ``task``.

    Raises:
        ConfigError: an unknown architecture, attention or residual (nearest three named), or a bad combination.
    """
    from wellposed.models import build_model

    options = dataclasses.asdict(config.model)
    architecture = options.pop("architecture")
    given = {name: value for name, value in options.items() if value is not None}
    return build_model(architecture, task.kind, **{**given, **task.model_kwargs()})


def build_penalty(options: PenaltyOptions, model: nn.Module) -> Any | None:
    """Return the `OrthogonalityPenalty` of ``options`` attached to ``model``, or None when all strengths are zero.

    ``every`` is left to the loop, which counts optimizer steps where the penalty would count micro-batches.

    Raises:
        RoleNotFoundError: the model has no weight in a role that the penalty names.
    """
    if not options.active:
        return None
    from wellposed.penalize import OrthogonalityPenalty

    return OrthogonalityPenalty(model, **{**dataclasses.asdict(options), "every": 1})
