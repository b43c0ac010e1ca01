"""Decision of the head of a classifier, read from its configuration; imports no torch."""

from __future__ import annotations

from typing import Any

from wellposed.errors import ConfigError

SINGLE = "single_label_classification"
SEVERAL = "multi_label_classification"
NUMBER = "regression"


def problem_type(config: Any) -> str:
    """Return the ``problem_type`` of a configuration; `ConfigError` if it cannot be.

    If unset, it is regression for one label and a single label otherwise, as in transformers.

    >>> from types import SimpleNamespace
    >>> problem_type(SimpleNamespace(num_labels=1)), problem_type(SimpleNamespace(num_labels=3))
    ('regression', 'single_label_classification')
    """
    count = getattr(config, "num_labels", None)
    kind = getattr(config, "problem_type", None)
    if kind is None:
        return NUMBER if count == 1 else SINGLE
    if kind not in (SINGLE, SEVERAL, NUMBER) or (kind == SINGLE and count == 1):
        raise ConfigError(
            f"problem_type = {kind!r} with num_labels = {count}: expected {SINGLE} of two labels or"
            f" more, {SEVERAL} or {NUMBER}; correct the model's config.json"
        )
    return kind


def check_single_label(model: Any, asked: str) -> None:
    """Raise `ConfigError` if a head does not choose one label; ``asked`` starts the message."""
    config = getattr(model, "config", None)
    kind = SINGLE if config is None else problem_type(config)
    if kind != SINGLE:
        raise ConfigError(
            f"{asked} is for heads that choose one label, and this model's problem_type is {kind};"
            " only the Lipschitz bound of `wellposed certify MODEL` holds for it"
        )
