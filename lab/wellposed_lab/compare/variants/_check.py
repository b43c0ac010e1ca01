"""Which options of a comparison a variant sets itself, and which it would drop."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from wellposed.errors import ConfigError
from wellposed.options import flat_options
from wellposed_lab.compare.variants._registry import apply_variant
from wellposed_lab.tasks.task import TASKS
from wellposed_lab.training.config import STRENGTHS, PenaltyOptions, RunConfig

REPLACEABLE = ("model.", "train.warmup_", "start.dt_fixup")
"""Options that a variant may set itself: architecture, initial weights and warm-up."""
SQUARED = ("attention", "feedforward")
"""Strengths whose penalty is a squared norm in the form ``paper``; the others use the norm."""


def check_options(
    base: RunConfig, variants: Sequence[str], *, asked_of: RunConfig | None = None
) -> list[str]:
    """Refuse options of ``base`` that a variant would drop; return a line for each that it sets.

    Options that change ``asked_of``, the base before the command line, must reach a variant.

    Raises:
        ConfigError: all options that the first such variant drops, or that no variant reads.

    >>> from wellposed_lab.training.config import TrainOptions
    >>> base = RunConfig("listops", train=TrainOptions(warmup_steps=9))
    >>> check_options(base, ["post_ln", "t_fixup"])
    ['t_fixup: train.warmup_steps = 0 in the place of 9']
    """
    replaced = {spec: _replaced_options(base, spec) for spec in variants}
    problems = []
    for spec, options in replaced.items():
        lines = {
            k: f"{k} = {used!r} in the place of {value!r}" for k, (value, used) in options.items()
        }
        lost = [line for k, line in lines.items() if not k.startswith(REPLACEABLE)]
        if lost:
            raise ConfigError(
                f"variant {spec!r} would take {', '.join(lost)}, so the options would not reach"
                " every variant; leave them out, or the variant"
            )
        problems += [f"{spec}: {', '.join(lines.values())}"] if lines else []

    asked, before = (flat_options((config or base).to_dict()) for config in (base, asked_of))
    unread = sorted(
        name
        for name in set(asked).intersection(*replaced.values())
        if asked[name] != before.get(name)
    )
    if unread:
        names = ", ".join(f"{name} = {asked[name]!r}" for name in unread)
        raise ConfigError(f"{names}: no variant of {', '.join(variants)} reads it; leave it out")

    return problems


def _replaced_options(base: RunConfig, spec: str) -> dict[str, tuple[Any, Any]]:
    """Return old and new value of each option of ``base`` that a variant fixes otherwise."""
    fields = dataclasses.fields(TASKS.get(base.task).options)
    defaults = {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    start = replace(type(base.start)(base.start.model), from_scratch=base.start.from_scratch)
    usual = RunConfig(base.task, {**base.task_options, **defaults}, start=start)
    used = apply_variant(spec, base)
    applied = apply_variant(spec, usual)
    configs = (base, usual, used, applied)
    asked, plain, constrained, alone = (flat_options(config.to_dict()) for config in configs)
    replaced = {
        name: (value, constrained.get(name))
        for name, value in asked.items()
        if name != "variant" and value not in (plain.get(name), constrained.get(name))
        if constrained.get(name) == alone.get(name)
    }
    for name in STRENGTHS[1:]:  # the affinity has only one form
        forms = _form(base.penalty, name), _form(used.penalty, name)
        if asked[f"penalty.{name}"] and asked[f"penalty.{name}"] == constrained[f"penalty.{name}"]:
            replaced |= {f"penalty.{name}'s form": forms} if forms[0] != forms[1] else {}

    return replaced


def _form(penalty: PenaltyOptions, strength: str) -> str:
    chosen = penalty.feedforward_form if strength == "feedforward" else "same"
    form = penalty.form if chosen == "same" else chosen
    return form if form != "paper" else "gram_squared" if strength in SQUARED else "gram"
