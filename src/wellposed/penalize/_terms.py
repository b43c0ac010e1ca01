"""The terms of a penalty on weights: which they are, counted once, and checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from wellposed.errors import ConfigError, RoleNotFoundError, ShapeError, listed
from wellposed.functional import check_weights
from wellposed.penalize._roles import PENALISED_ROLES, RoleOptions
from wellposed.roles import Roles, Verb, WeightView, batch_advice, joined_views

PENALTY = Verb.by_role("OrthogonalityPenalty", "model, ...")
Part: TypeAlias = tuple[list[str], Tensor]
"""Names of terms, and a number for each."""
# Attributes of an adapted layer that say which adapters it applies.
_ADAPTERS = ("merged", "disable_adapters", "active_adapters")


@dataclass(frozen=True)
class Term:
    """One number of the penalty: a weight, or a stack of weights along outputs, of one layer."""

    strength: str
    """The keyword whose strength it carries."""
    label: str
    views: tuple[WeightView, ...]
    form: str
    """One of gram_squared, gram, qr, or of `FORMS`."""
    side: Literal["rows", "columns"]
    """The side that should be orthonormal."""
    qr_method: Any
    gram_dtype: torch.dtype | None


def weight_terms(
    model: nn.Module,
    roles: Roles,
    forms: Mapping[str, str],
    options: RoleOptions,
    *,
    qr_method: Any,
    gram_dtype: torch.dtype | None,
) -> list[Term]:
    """Return the terms of the strengths in use, before `distinct_terms`."""
    terms: list[Term] = []
    for strength, form in forms.items():
        role = PENALISED_ROLES.get(strength)
        terms += [
            Term(strength, label, views, form, role.side, qr_method, gram_dtype)
            for label, views in role.weights(roles, options)
        ]

    present = {term.strength for term in terms}
    missing = [f"{name}: the model has no such weight" for name in forms if name not in present]
    if missing:
        problem = f"OrthogonalityPenalty: there is nothing to penalise:\n{listed(missing)}"
        choice = batch_advice(PENALTY, model, roles)
        raise RoleNotFoundError(f"{problem}\n{choice}\nRoles found:\n{roles}")
    return terms


def distinct_terms(terms: Iterable[Term]) -> tuple[list[Term], list[str]]:
    """Return checked terms that count each weight once, and one line for each shared weight."""
    terms, notes = _counted_once(terms)
    _check(terms)
    return terms, notes


def bound_state(terms: Iterable[Term], adapted: Iterable[Term]) -> tuple[list[Any], list[str]]:
    """Return the shape, storage and sharing of each weight, and the active adapters."""
    weights: list[Any] = []
    first: dict[object, int] = {}
    for number, view in enumerate(view for term in terms for view in term.views):
        stored = view.owner._parameters.get(view.attribute)
        kind = None
        shape = None
        if stored is not None:  # otherwise a parametrization or a hook computes it
            kind = type(stored), stored.dtype, stored.device
            shape = stored.shape if view.spans or view.expert is not None else None
        shared = first.setdefault(view.owner if stored is None else id(stored), number)
        weights.append((shape, kind, shared))
    layers = (getattr(view, "layer", None) for term in adapted for view in term.views)

    return weights, [str(getattr(layer, name, None)) for layer in layers for name in _ADAPTERS]


def frozen_weights(terms: Sequence[Term]) -> list[str]:
    """Name the terms without a trained weight; ConfigError if a strength has no other."""
    frozen = [term for term in terms if not any(view.trainable for view in term.views)]
    trained = {term.strength for term in terms if term not in frozen}
    useless = [line for term in frozen if term.strength not in trained for line in _lines(term)]
    if useless:
        raise ConfigError(
            "these weights are frozen (requires_grad=False), so their penalty would train nothing:\n"
            f"{listed(useless)}\nLeave their strength out, train them, or make the penalty after the"
            " adapters that train them. To look at the value alone, call it under torch.no_grad()"
        )
    return [line for term in frozen for line in _lines(term)]


def _counted_once(terms: Iterable[Term]) -> tuple[list[Term], list[str]]:
    """Drop weights that an earlier term of the same kind has; note each of them."""
    first: dict[tuple[object, ...], str] = {}
    distinct: list[Term] = []
    notes: list[str] = []
    for term in terms:
        name = f"{term.strength} of {term.label}"
        group = PENALISED_ROLES.get(term.strength).counted_with or term.strength
        fresh: list[WeightView] = []
        for view in term.views:
            key = (group, *view.key)
            if key in first:
                notes.append(f"{view.parameter_name}: also {name}, counted once as {first[key]}")
                continue
            first[key] = name
            fresh.append(view)
        if fresh:
            distinct.append(replace(term, views=joined_views(fresh)))

    return distinct, notes


def _check(terms: Sequence[Term]) -> None:
    offenders: list[str] = []
    uneven: list[str] = []
    for term in terms:
        if len({view.shape[1] for view in term.views}) > 1:
            uneven.append(f"{term.label}: {', '.join(str(view.shape) for view in term.views)}")
        for view in term.views:
            if view.deviation is not None and not view.is_computed:
                offenders.append(
                    f"{view.deviation}, which is no product with one matrix; remove that, or leave"
                    f" {view.parameter_name} out (where=)"
                )
                continue
            try:
                with torch.no_grad():  # a layer that is called shows whether it is linear
                    check_weights([_like(view)])
            except (ConfigError, ShapeError) as error:
                offenders.append(f"{view.parameter_name}: {error}")

    if uneven:
        raise ShapeError(
            "attention_mode='joint' stacks query, key, value and output along outputs, which needs"
            " one input width; use attention_mode='separate':\n" + listed(uneven)
        )

    unique = list(dict.fromkeys(offenders))
    if unique:
        raise ConfigError(f"these weights cannot be penalised:\n{listed(unique)}")


def _like(view: WeightView) -> Tensor:
    """Return the weight, or a stand-in of its kind and shape if it would be gathered for a look."""
    if not view.crosses_shards:
        return view.tensor()
    stored: Any = view.parameter
    return stored.to_local().new_empty(1, 1).expand(view.shape)


def _lines(term: Term) -> list[str]:
    return [f"{view.parameter_name}: {term.strength} of {term.label}" for view in term.views]
