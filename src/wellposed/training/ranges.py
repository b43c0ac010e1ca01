"""Numeric ranges of the options of a run; free of torch. Every field out of range is named in one error."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from wellposed.option_checks import OutOfRangeError

if TYPE_CHECKING:
    from wellposed.training.config import ConstrainOptions, PenaltyOptions, TrainOptions

Rule = tuple[str, Callable[[Any], bool]]

AT_LEAST_ONE: Rule = ("at least 1", lambda value: value >= 1)
NOT_NEGATIVE: Rule = ("a finite number, 0 or more", lambda value: math.isfinite(value) and value >= 0)
POSITIVE: Rule = ("a finite number above 0", lambda value: math.isfinite(value) and value > 0)
BELOW_ONE: Rule = ("0 <= value < 1", lambda value: 0 <= value < 1)
SEED: Rule = ("0 <= seed < 2^32", lambda value: 0 <= value < 2**32)

PENALTY_RULES: dict[str, Rule] = {
    **dict.fromkeys(("affinity", "attention", "feedforward", "query", "key", "value", "embedding"), NOT_NEGATIVE),
    "every": AT_LEAST_ONE,
}
TRAIN_RULES: dict[str, Rule] = {
    "steps": AT_LEAST_ONE,
    "batch_size": AT_LEAST_ONE,
    "gradient_accumulation": AT_LEAST_ONE,
    "learning_rate": POSITIVE,
    "warmup_steps": NOT_NEGATIVE,
    "decay_steps": AT_LEAST_ONE,
    "gamma": POSITIVE,
    "weight_decay": NOT_NEGATIVE,
    "adam_beta1": BELOW_ONE,
    "adam_beta2": BELOW_ONE,
    "adam_epsilon": NOT_NEGATIVE,
    "max_grad_norm": NOT_NEGATIVE,
    "label_smoothing": BELOW_ONE,
    "temperature": POSITIVE,
    "eval_every": AT_LEAST_ONE,
    "eval_batches": AT_LEAST_ONE,
    "patience": AT_LEAST_ONE,
    "checkpoint_every": AT_LEAST_ONE,
    "keep_checkpoints": AT_LEAST_ONE,
    "average_checkpoints": ("0, or at least 2", lambda value: value == 0 or value >= 2),
    "log_every": AT_LEAST_ONE,
    "seed": SEED,
}
NEEDS_WARMUP = ("inverse_sqrt_warmup", "kim2021")


def penalty_problems(options: PenaltyOptions) -> list[str]:
    """Return one line per field of ``options`` that is out of range."""
    return _out_of_range(options, PENALTY_RULES)


def constrain_problems(options: ConstrainOptions) -> list[str]:
    """Return a line for an empty pattern of ``options``, and for an option that nothing would read."""
    problems = []
    if options.where and not all(part.strip() for part in options.where.split(",")):
        problems.append(f"where = {options.where!r}, expected names or patterns between its commas")
    if options.embeddings not in ("refuse", "fit"):
        problems.append(f"embeddings = {options.embeddings!r}, expected refuse or fit")
    elif options.embeddings == "fit" and not options.where:
        problems.append("embeddings = 'fit' without where, so no weight is held; name the embedding in where")
    return problems


def train_problems(options: TrainOptions) -> list[str]:
    """Return one line per field of ``options`` that is out of range or does not fit the schedule."""
    problems = _out_of_range(options, TRAIN_RULES)
    if options.schedule in NEEDS_WARMUP and options.warmup_steps < 1:
        problems.append(
            f"warmup_steps = {options.warmup_steps}, expected at least 1 for the schedule {options.schedule}"
        )
    if options.schedule == "cosine" and options.steps <= options.warmup_steps:
        problems.append(
            f"warmup_steps = {options.warmup_steps}, expected fewer than steps = {options.steps} "
            "for the schedule cosine"
        )
    return problems


def refuse(problems: list[str]) -> None:
    """Raise one error that lists all ``problems``, if there are any."""
    if problems:
        raise OutOfRangeError(problems)


def _out_of_range(options: object, rules: dict[str, Rule]) -> list[str]:
    problems = []
    for name, (expected, holds) in rules.items():
        value = getattr(options, name)
        if value is not None and not holds(value):
            problems.append(f"{name} = {value!r}, expected {expected}")
    return problems
