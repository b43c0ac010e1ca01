"""The variant with a certified Lipschitz bound."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from wellposed.errors import ConfigError
from wellposed_lab.compare.variants._parts import constrained, faster, with_model
from wellposed_lab.compare.variants._registry import VARIANTS
from wellposed_lab.tasks.task import TASKS
from wellposed_lab.training.config import PenaltyOptions, RunConfig

# One pattern, so that it matches at least the head of a model without blocks.
LIPSCHITZ_WEIGHTS = (
    r"re:(.*\.)?([qkvo]_proj|up_proj|down_proj|classifier(\.(hidden|output))?|lm_head)",
)
# Logits of a 1-Lipschitz model are small, so their softmax is nearly uniform.
LIPSCHITZ_LOGIT_SCALE = 10.0
# Weights stay small, so rates are high. AG News, width 64, 200 steps, rates 0.005, 0.02 and 0.1:
# accuracy 0.823, 0.831 and 0.818, certified at 0.1 of a token's norm 0.38, 0.50 and 0.53 of it.
LIPSCHITZ_RATE = 20.0
# Initial temperature for a margin loss of words.
COOL = 0.25
# AG News, budget 4, strengths 0.1, 0.3 and 1: certified accuracy 0.378, 0.418, 0.441 (0.335 without),
# accuracy 0.832, 0.830, 0.828 (docs/howto/classifier.md).
BOUND_STRENGTH = 0.3


@VARIANTS.register("lipschitz")
def lipschitz(base: RunConfig, budget: float = 1.0) -> RunConfig:
    """Lipschitz bound 1 (or value) on a change of a token: ball attention, MaxMin, unit weights, no
    norms.

    The value is the budget L: 1 makes convex residuals, more makes sums that share L. No singular
    value of a weight exceeds 1, so the certified total is at most L after every step. The learning
    rate is 20 x the base's, and the loss multiplies the logits by ten unless there is a
    ``logit_scale``. ``num_hidden_layers=0`` is the control without blocks. With ``margin_loss =
    words:k``, embeddings lie in the ball (not on the sphere), tokens have no positions, and
    attention starts cool, since the effect of a word grows as e^(2 t). A classifier with L > 1 trains
    with the bound as a loss unless there is a ``penalty.bound``, that margin loss, windows that vote
    or gradient checkpointing.
    """
    if not 1 <= budget < float("inf"):
        problem = f"budget = {budget}, expected a finite number, 1 or more"
        raise ConfigError(f"lipschitz: {problem}: a residual keeps its input")

    residual: dict[str, Any] = {"residual": "convex"}
    if budget > 1:
        residual = {"residual": "budget", "budget": budget}

    embeddings: dict[str, Any] = {"unit_embeddings": True}
    if _counts_words(base):
        embeddings = {"ball_embeddings": True, "position": "none", "ball_temperature": COOL}

    parts = {"attention": "ball", "feedforward": "maxmin", "norm": "none", "attention_dropout": 0.0}
    config = with_model(base, **parts, **embeddings, **residual)
    scale = LIPSCHITZ_LOGIT_SCALE if base.train.logit_scale == 1 else base.train.logit_scale
    train = replace(faster(config.train, LIPSCHITZ_RATE), logit_scale=scale)
    config = replace(config, train=train, penalty=_bound_as_a_loss(base, budget))
    return constrained(config, LIPSCHITZ_WEIGHTS, to="spectral")


def _bound_as_a_loss(base: RunConfig, budget: float) -> PenaltyOptions:
    """Return the base's penalties with that of the bound, if a run like it gained by that
    (docs/howto/classifier.md)."""
    penalty = base.penalty
    is_classifier = TASKS.get(base.task).kind.endswith("classification")
    is_voted = bool(base.task_options.get("certified_windows"))
    # The inputs of a checkpointed model have a hook, which no certificate covers.
    has_bound = not (is_voted or _counts_words(base) or base.train.gradient_checkpointing)
    if penalty.bound is not None or budget == 1 or not (is_classifier and has_bound):
        return penalty
    return replace(penalty, bound=BOUND_STRENGTH)


def _counts_words(base: RunConfig) -> bool:
    return (base.train.margin_loss or "").startswith("words")
