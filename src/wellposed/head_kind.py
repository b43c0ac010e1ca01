"""Which decision the head of a classifier makes, as transformers reads its configuration; free of
torch."""

from __future__ import annotations

from typing import Any

from wellposed.errors import ConfigError

SINGLE, SEVERAL, NUMBER = "single_label_classification", "multi_label_classification", "regression"


def problem_type(config: Any) -> str:
    """Return the ``problem_type`` of a model's configuration; of one that has none, regression for
    one label, and a single label otherwise, as the losses of transformers do.

    Raises:
        ConfigError: another name, or a single label of one class.

    >>> from types import SimpleNamespace
    >>> problem_type(SimpleNamespace(num_labels=1)), problem_type(SimpleNamespace(num_labels=3))
    ('regression', 'single_label_classification')
    """
    count, given = getattr(config, "num_labels", None), getattr(config, "problem_type", None)
    if given is None:
        return NUMBER if count == 1 else SINGLE
    if given not in (SINGLE, SEVERAL, NUMBER) or (given == SINGLE and count == 1):
        raise ConfigError(
            f"problem_type = {given!r} with num_labels = {count}: expected {SINGLE} of two labels or"
            f" more, {SEVERAL} or {NUMBER}; correct the model's config.json"
        )
    return given


def check_single_label(model: Any, asked: str) -> None:
    """Refuse a model whose configuration says that its head does not choose one label, for what is
    asked of the largest logit.

    Raises:
        ConfigError: its ``problem_type`` is another.
    """
    config = getattr(model, "config", None)
    if config is not None and (found := problem_type(config)) != SINGLE:
        raise ConfigError(
            f"{asked} is for heads that choose one label, and this model's problem_type is {found};"
            " only the Lipschitz bound of `wellposed certify MODEL` holds for it"
        )
