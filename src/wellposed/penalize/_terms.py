"""Which weights each strength of a penalty falls on, how far they are from orthogonal, and the gradient of that."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from wellposed.errors import ConfigError, RoleNotFoundError, ShapeError, listed, unknown_name
from wellposed.functional import gram_penalty, qr_penalty
from wellposed.functional.penalties import accumulate_gram_penalty_, check_weights
from wellposed.linalg.sharded import is_sharded
from wellposed.roles import (
    ATTENTION,
    FEEDFORWARD,
    AttentionRole,
    Roles,
    WeightView,
    block_of,
    joined_views,
)
from wellposed.roles.adapters import AdaptedView, adapted_view, has_lora

Form = Literal["paper", "gram_squared", "gram", "qr"]
PAPER_FORMS = {
    "attention": "gram_squared",  # Zhang et al. (2021)
    "feedforward": "gram_squared",
    "query": "gram",  # McGrath (2024)
    "key": "gram",
    "value": "gram",
    "embedding": "gram",
}
"""The form that each strength on weights has in the paper it comes from."""
_SINGLE_ROLES = ("query", "key", "value")


@dataclass(frozen=True)
class PenaltyForm:
    """How the distance to orthogonality is measured: ``gram_squared``, ``gram`` or ``qr``."""

    name: str
    qr_method: Any
    gram_dtype: torch.dtype | None


@dataclass(frozen=True)
class Term:
    """One number of the penalty: a weight, or a stack of weights along outputs, of one layer."""

    strength: str  # the keyword whose strength it carries
    label: str
    views: tuple[WeightView, ...]
    form: PenaltyForm

    def value(self) -> Tensor:
        """Return the distance to orthogonality, before its strength."""
        weights = [view.tensor() for view in self.views]
        if self.form.name == "qr":
            stack = weights[0] if len(weights) == 1 else torch.cat(weights)
            return qr_penalty(stack, self.form.qr_method)
        return gram_penalty(weights, **self._gram)

    @torch.no_grad()
    def accumulate_(self, strength: float) -> Tensor:
        """Return ``strength`` times the value and add its gradient to ``.grad``, by products alone."""
        weights = [view.tensor() for view in self.views]
        gradients = [_gradient(view) for view in self.views]
        return accumulate_gram_penalty_(weights, gradients, strength=strength, **self._gram)

    @property
    def _gram(self) -> dict[str, Any]:
        return {
            "squared": self.form.name == "gram_squared",
            # whether columns or rows are to be orthonormal
            "side": "columns" if self.strength in ("attention", "feedforward") else "rows",
            "gram_dtype": self.form.gram_dtype,
        }


def chosen_forms(
    form: Form | Mapping[str, Form] | None, strengths: Sequence[str]
) -> dict[str, str]:
    """Return the form of each strength: what was asked for, or that of its paper."""
    if not (form is None or isinstance(form, (str, Mapping))):
        raise ConfigError(f"form = {form!r}, expected a form or a mapping from strength to form")
    given = dict.fromkeys(strengths, form) if isinstance(form, str) else dict(form or {})
    for strength, name in given.items():
        if name not in get_args(Form):
            raise unknown_name("form", str(name), get_args(Form))
        if strength not in PAPER_FORMS:
            raise unknown_name("strength in form", strength, PAPER_FORMS)
    changed = [name for name in strengths if name not in given and PAPER_FORMS[name] == "gram"]
    if changed:
        warnings.warn(
            f"OrthogonalityPenalty: without form=, {', '.join(changed)} is now the norm |W W^T - I|_F,"
            " as McGrath (2024) prints it and as the variants key: and query: have it; before 0.3 it"
            " was its square. Write form='paper' for the norm, or form='gram_squared' for the square."
            " This warning goes in 0.4",
            FutureWarning,
            stacklevel=5,
        )
    chosen = {name: given.get(name, "paper") for name in strengths}
    return {name: PAPER_FORMS[name] if form == "paper" else form for name, form in chosen.items()}


def weight_terms(
    roles: Roles, forms: Mapping[str, PenaltyForm], *, joint: bool, cross_attention: bool
) -> tuple[list[Term], list[str]]:
    """Return the terms of the strengths in use and, one line each, the shared weights that were
    counted once."""
    attention = [role for role in roles.attention if cross_attention or role.kind == "self"]
    terms = [
        Term(strength, label, views, form)
        for strength, form in forms.items()
        for label, views in _weights_of(strength, roles, attention, joint)
    ]
    found = {term.strength for term in terms}
    missing = [f"{name}: the model has no such weight" for name in forms if name not in found]
    if missing:
        raise RoleNotFoundError(
            "a penalty was asked for where there is nothing to penalise:\n"
            f"{listed(missing)}\nRoles found:\n{roles}"
        )
    terms, notes = _counted_once(terms)
    _check(terms)
    return terms, notes


def adapted_terms(model: nn.Module, terms: Sequence[Term]) -> list[Term]:
    """Return the terms on the weights that layers compute with, LoRA factors included.

    Raises:
        ConfigError: the model holds no LoRA factors, or some that cannot be added to the weight.
    """
    if not any(map(has_lora, model.modules())):
        raise ConfigError(
            f"adapters=True: no layer of {type(model).__name__} holds LoRA factors (lora_A, lora_B"
            " beside base_layer); make the penalty after the adapters, or leave adapters out"
        )
    return [
        replace(term, views=tuple(adapted_view(model, view) for view in term.views))
        for term in terms
    ]


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
            "these weights are frozen (requires_grad=False), so their penalty would train nothing:\n"
            f"{listed(useless)}\nLeave their strength out, train them, or, where LoRA adapters are on"
            " them, make the penalty after the adapters with adapters=True. To look at the value"
            " alone, call it under torch.no_grad()"
        )
    return [line for term in frozen for line in _lines(term)]


def check_in_place(terms: Sequence[Term]) -> None:
    """Raise `ConfigError` for terms whose gradient only autograd can give; every one is named."""
    offenders = [f"{term.strength}: form 'qr'" for term in terms if term.form.name == "qr"]
    for view in (view for term in terms for view in term.views):
        if isinstance(view, AdaptedView):
            problem = "the gradient goes to the factors of its adapters"
        elif not view.parameter.is_leaf:
            problem = "a parametrised weight, computed from another parameter"
        elif view.spans is not None and block_of(view.spans) is None:
            problem = "its rows lie between those of other roles"
        elif is_sharded(view.parameter):
            problem = "sharded over processes"
        else:
            continue
        offenders.append(f"{view.parameter_name}: {problem}")
    if offenders:
        raise ConfigError(
            "accumulate_() cannot add these gradients in place; use penalty() and backward():\n"
            + listed(list(dict.fromkeys(offenders)))
        )


def _weights_of(
    strength: str, roles: Roles, attention: Sequence[AttentionRole], joint: bool
) -> Iterator[tuple[str, tuple[WeightView, ...]]]:
    """Yield the label and the weights of each term of one strength."""
    if strength == "embedding":
        tables = (table for table in roles.embeddings if table.kind == "token")
        yield from ((table.path or "token", (table.weight,)) for table in tables)
        return
    if strength == "feedforward":
        for network in roles.feedforward:
            views = ((name, getattr(network, name)) for name in FEEDFORWARD.values())
            label = f"{network.stack}.{network.layer}"
            yield from ((f"{label}.{name}", (view,)) for name, view in views if view is not None)
        attention = ()
    for role in attention:
        label = f"{role.stack}.{role.layer}{'.cross' if role.kind == 'cross' else ''}"
        if strength != "attention":
            yield label, (getattr(role, strength),)
        elif joint:
            yield label, tuple(getattr(role, name) for name in ATTENTION)
        else:
            yield from ((f"{label}.{name}", (getattr(role, name),)) for name in ATTENTION)
        for name, view in role.further:
            if strength in (name, "attention"):
                yield f"{label}.{name} {view.parameter_name}", (view,)
    loose = (weight.view for weight in roles.loose if weight.role.startswith(strength))
    yield from ((view.parameter_name, (view,)) for view in loose)


def _counted_once(terms: Iterable[Term]) -> tuple[list[Term], list[str]]:
    """Leave out what an earlier term of the same kind holds already: one weight in two roles is
    penalised once."""
    seen: dict[tuple[object, ...], str] = {}
    kept: list[Term] = []
    notes: list[str] = []
    for term in terms:
        own = f"{term.strength} of {term.label}"
        group = "single" if term.strength in _SINGLE_ROLES else term.strength
        fresh: list[WeightView] = []
        for view in term.views:
            key = (group, *view.key)
            if key in seen:
                notes.append(f"{view.parameter_name}: also {own}, counted once as {seen[key]}")
                continue
            seen[key] = own
            fresh.append(view)
        if fresh:
            kept.append(replace(term, views=joined_views(fresh)))
    return kept, notes


def _check(terms: Sequence[Term]) -> None:
    offenders: list[str] = []
    uneven: list[str] = []
    for term in terms:
        if len({view.shape[1] for view in term.views}) > 1:
            uneven.append(f"{term.label}: {', '.join(str(view.shape) for view in term.views)}")
        for view in term.views:
            try:
                check_weights([view.tensor()])
            except (ConfigError, ShapeError) as error:
                offenders.append(f"{view.parameter_name}: {error}")
    if uneven:
        raise ShapeError(
            "attention_mode='joint' stacks query, key, value and output along outputs, which needs"
            " one input width; use attention_mode='separate':\n" + listed(uneven)
        )
    if offenders:
        raise ConfigError(
            "these weights cannot be penalised:\n" + listed(list(dict.fromkeys(offenders)))
        )


def _lines(term: Term) -> list[str]:
    return [f"{view.parameter_name}: {term.strength} of {term.label}" for view in term.views]


def _gradient(view: WeightView) -> Tensor | None:
    """Return the part of ``.grad`` that belongs to a view, in its orientation; None for a frozen
    parameter."""
    parameter = view.parameter
    if not parameter.requires_grad:
        return None
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return view.seen(parameter.grad)
