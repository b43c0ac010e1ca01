"""Numeric ranges of the options of a run; free of torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wellposed.training.config import (
        ConstrainOptions,
        PenaltyOptions,
        StartOptions,
        TrainOptions,
    )

Rule = tuple[str, Callable[[Any], bool]]

AT_LEAST_ONE: Rule = ("at least 1", lambda value: value >= 1)
NOT_NEGATIVE: Rule = (
    "a finite number, 0 or more",
    lambda value: math.isfinite(value) and value >= 0,
)
POSITIVE: Rule = ("a finite number above 0", lambda value: math.isfinite(value) and value > 0)
BELOW_ONE: Rule = ("0 <= value < 1", lambda value: 0 <= value < 1)
SEED: Rule = ("0 <= seed < 2^32", lambda value: 0 <= value < 2**32)

PENALTY_RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("affinity", "attention", "feedforward", "query", "key", "value", "embedding"), NOT_NEGATIVE
    ),
    "every": AT_LEAST_ONE,
}
TRAIN_RULES: dict[str, Rule] = {
    "steps": AT_LEAST_ONE,
    "num_workers": ("0 or more", lambda value: value >= 0),
    "epochs": POSITIVE,
    "warmup_share": BELOW_ONE,
    "batch_size": AT_LEAST_ONE,
    "gradient_accumulation": AT_LEAST_ONE,
    "learning_rate": POSITIVE,
    "warmup_steps": NOT_NEGATIVE,
    "decay_steps": AT_LEAST_ONE,
    "gamma": POSITIVE,
    "momentum": BELOW_ONE,
    "weight_decay": NOT_NEGATIVE,
    "adam_beta1": BELOW_ONE,
    "adam_beta2": BELOW_ONE,
    "adam_epsilon": NOT_NEGATIVE,
    "max_grad_norm": NOT_NEGATIVE,
    "label_smoothing": BELOW_ONE,
    "temperature": POSITIVE,
    "margin_radius": NOT_NEGATIVE,
    "eval_every": AT_LEAST_ONE,
    "eval_batches": AT_LEAST_ONE,
    "patience": AT_LEAST_ONE,
    "checkpoint_every": AT_LEAST_ONE,
    "keep_checkpoints": AT_LEAST_ONE,
    "average_checkpoints": ("0, or at least 2", lambda value: value == 0 or value >= 2),
    "log_every": AT_LEAST_ONE,
    "seed": SEED,
}
START_CHOICES = {"attention": ("own", "l2", "cosine"), "init": ("own", "t_fixup")}
UNSET = (False, "own")
DEVICE = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
NEEDS_WARMUP = ("inverse_sqrt_warmup", "kim2021")
DECAYS_TO_ZERO = ("cosine", "linear")
OPTIMIZERS = ("adamw", "muon", "sgd")
MARGIN_LOSSES = ("ce", "certified", "hinge")


def penalty_problems(options: PenaltyOptions) -> list[str]:
    """Return one line per field of ``options`` that is out of range."""
    return _out_of_range(options, PENALTY_RULES)


def constrain_problems(options: ConstrainOptions) -> list[str]:
    """Return a line for an empty pattern of ``options``, and for an option that nothing would
    read."""
    problems = []
    if options.where and not all(part.strip() for part in options.where.split(",")):
        problems.append(f"where = {options.where!r}, expected names or patterns between its commas")
    if options.embeddings not in ("refuse", "fit"):
        problems.append(f"embeddings = {options.embeddings!r}, expected refuse or fit")
    elif options.embeddings == "fit" and not options.where:
        problems.append(
            "embeddings = 'fit' without where, so no weight is held; name the embedding in where"
        )
    if options.to not in ("orthogonal", "spectral", "columns"):
        problems.append(f"to = {options.to!r}, expected orthogonal, spectral or columns")
    elif options.to != "orthogonal" and options.embeddings == "fit":
        problems.append(f"embeddings = 'fit' with to = {options.to!r}, expected to = orthogonal")
    if not 0.0 < options.bound < math.inf:
        problems.append(f"bound = {options.bound!r}, expected a finite number above 0")
    elif options.bound != 1.0 and options.to == "orthogonal":
        problems.append(f"bound = {options.bound!r} with to = orthogonal, which has none")
    return problems


def start_problems(options: StartOptions) -> list[str]:
    """Return one line per option of a start that needs a model to start from, or another option,
    and has none."""
    problems = [
        f"{name} = {getattr(options, name)!r}, expected {' or '.join(known)}"
        for name, known in START_CHOICES.items()
        if getattr(options, name) not in known
    ]
    if not options.model:
        given = [
            name
            for name in ("from_scratch", "new_head", *START_CHOICES)
            if getattr(options, name) not in UNSET
        ]
        return problems + [
            f"{name} needs a model to start from; name it with --from" for name in given
        ]
    if options.from_scratch and options.new_head:
        problems.append("from_scratch draws a new head as well; leave new_head out")
    if options.init == "t_fixup" and not options.from_scratch:
        problems.append(
            "init = 't_fixup' draws every weight anew and takes the LayerNorms out, without which"
            " pretrained weights are of no use; give --from-scratch, or another variant"
        )
    return problems


def train_problems(options: TrainOptions) -> list[str]:
    """Return one line per field of ``options`` that is out of range or does not fit the
    schedule."""
    problems = _out_of_range(options, TRAIN_RULES)
    if not DEVICE.fullmatch(options.device):
        problems.append(f"device = {options.device!r}, expected auto, cpu, cuda, cuda:N or mps")
    if options.warmup_share and options.warmup_steps:
        problems.append(
            f"warmup_share = {options.warmup_share} and warmup_steps = {options.warmup_steps}:"
            " give one"
        )
    if options.schedule in NEEDS_WARMUP and options.warmup_steps < 1 and not options.warmup_share:
        problems.append(
            f"warmup_steps = {options.warmup_steps}, expected at least 1 for the schedule"
            f" {options.schedule}"
        )
    if (
        options.schedule in DECAYS_TO_ZERO
        and options.epochs is None
        and options.steps <= options.warmup_steps
    ):
        problems.append(
            f"warmup_steps = {options.warmup_steps}, expected fewer than steps = {options.steps} "
            f"for the schedule {options.schedule}"
        )
    if options.optimizer not in OPTIMIZERS:
        problems.append(f"optimizer = {options.optimizer!r}, expected {', '.join(OPTIMIZERS)}")
    elif options.momentum is not None and options.optimizer == "adamw":
        problems.append(
            f"momentum = {options.momentum} with optimizer = adamw, which reads adam_beta1 instead"
        )
    return problems + _margin_problems(options) + _sharding_problems(options)


def _sharding_problems(options: TrainOptions) -> list[str]:
    if options.parallel not in ("ddp", "fsdp"):
        return [f"parallel = {options.parallel!r}, expected ddp or fsdp"]
    whole = {
        "optimizer = muon, which steps whole matrices": options.optimizer == "muon",
        "margin_radius, whose loss reads the whole head": options.margin_radius,
        "compile, whose graphs hold whole weights": options.compile,
    }
    given = [name for name, is_given in whole.items() if is_given and options.parallel == "fsdp"]
    return [f"parallel = fsdp with {name}; leave it out, or take ddp" for name in given]


def _margin_problems(options: TrainOptions) -> list[str]:
    loss, radius = options.margin_loss, options.margin_radius
    if loss is None:
        return []
    if loss not in MARGIN_LOSSES:
        return [f"margin_loss = {loss!r}, expected {', '.join(MARGIN_LOSSES)}"]
    problems = []
    if loss == "ce" and radius:
        problems.append(
            f"margin_radius = {radius} with margin_loss = ce, which has no margin; take certified"
            " or hinge"
        )
    if loss != "ce" and not radius:
        problems.append(f"margin_loss = {loss} needs a margin_radius above 0")
    if loss == "hinge" and options.label_smoothing:
        problems.append(
            f"label_smoothing = {options.label_smoothing} with margin_loss = hinge, expected 0"
        )
    return problems


def _out_of_range(options: object, rules: dict[str, Rule]) -> list[str]:
    problems = []
    for name, (expected, holds) in rules.items():
        value = getattr(options, name)
        if value is not None and not holds(value):
            problems.append(f"{name} = {value!r}, expected {expected}")
    return problems
