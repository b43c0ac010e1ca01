"""Refuse a penalty that trains nothing, because the weights it falls on are frozen."""

from __future__ import annotations

from collections.abc import Sequence

from wellposed.errors import ConfigError, listed
from wellposed.penalize._terms import Term


def frozen_weights(terms: Sequence[Term]) -> list[str]:
    """Return, one line each, the terms that no trained weight is part of.

    Raises:
        ConfigError: all terms of a strength are such; every weight is named.
    """
    frozen = [term for term in terms if not any(view.trainable for view in term.views)]
    trained = {term.strength for term in terms if term not in frozen}
    useless = [line for term in frozen if term.strength not in trained for line in _lines(term)]
    if useless:
        raise ConfigError(
            "these weights are frozen (requires_grad=False), so their penalty has no gradient and"
            " would train nothing:\n"
            + listed(useless)
            + "\nLeave their strength out, train them, or, where LoRA adapters are on them, make"
            " the penalty after the adapters with adapters=True. To look at the value alone, call"
            " it under torch.no_grad()"
        )
    return [line for term in frozen for line in _lines(term)]


def _lines(term: Term) -> list[str]:
    return [f"{view.parameter_name}: {term.strength} of {term.label}" for view in term.views]
