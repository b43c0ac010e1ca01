"""Which weights each strength of a penalty falls on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from wellposed.errors import ConfigError, RoleNotFoundError, ShapeError, listed, unknown_name
from wellposed.functional import gram_penalty, qr_penalty
from wellposed.functional.penalties import Side, check_weights
from wellposed.roles import AttentionRole, Roles, WeightView, joined_views
from wellposed.roles.adapters import adapted_view, has_lora

FORMS = ("gram_squared", "gram", "qr")
SINGLE_ROLES = ("query", "key", "value")


@dataclass(frozen=True)
class How:
    """How one term measures the distance to orthogonality."""

    form: str
    qr_method: str
    gram_dtype: torch.dtype | None


@dataclass(frozen=True)
class Term:
    """One number of the penalty: a weight, or a stack of weights along outputs, of one layer."""

    strength: str  # the keyword whose strength it carries
    label: str
    views: tuple[WeightView, ...]
    side: Side

    def value(self, how: How) -> Tensor:
        """Return the distance to orthogonality, before its strength."""
        weights = [view.tensor() for view in self.views]
        if how.form == "qr":
            stack = weights[0] if len(weights) == 1 else torch.cat(weights)
            return qr_penalty(stack, how.qr_method)  # type: ignore[arg-type]
        return gram_penalty(
            weights, squared=how.form == "gram_squared", side=self.side, gram_dtype=how.gram_dtype
        )


def weight_terms(
    roles: Roles, strengths: Sequence[str], *, attention_mode: str, cross_attention: bool
) -> tuple[list[Term], list[str]]:
    """Return the terms of the strengths in use and, one line each, the shared weights that were
    counted once."""
    attention = [role for role in roles.attention if cross_attention or role.kind == "self"]
    readers: dict[str, Callable[[], Iterator[Term]]] = {
        "attention": lambda: _attention_terms(attention, attention_mode),
        "feedforward": lambda: _feedforward_terms(roles),
        **{role: lambda role=role: _single_terms(roles, attention, role) for role in SINGLE_ROLES},
        "embedding": lambda: _embedding_terms(roles),
    }
    terms: list[Term] = []
    notes: list[str] = []
    missing: list[str] = []
    for strength in strengths:
        found = list(readers[strength]())
        if not found:
            missing.append(f"{strength}: the model has no such weight")
        terms += found
    if missing:
        raise RoleNotFoundError(
            "a penalty was asked for where there is nothing to penalise:\n"
            + listed(missing)
            + "\nRoles found:\n"
            + str(roles)
        )
    terms = _counted_once(terms, notes)
    _check(terms)
    return terms, notes


def adapted_terms(model: nn.Module, terms: Sequence[Term]) -> list[Term]:
    """Return the terms on the weights that layers compute with, LoRA factors included.

    Raises:
        ConfigError: the model holds no LoRA factors, or some that cannot be added to the weight.
    """
    if not any(map(has_lora, model.modules())):
        raise ConfigError(
            f"adapters=True: no layer of {type(model).__name__} holds LoRA factors (lora_A and"
            " lora_B beside a base_layer); make the penalty after the adapters, or leave"
            " adapters out"
        )
    return [
        replace(term, views=tuple(adapted_view(model, view) for view in term.views))
        for term in terms
    ]


def form_of(strength: str, form: str | Mapping[str, str]) -> str:
    """Return the form of one strength; a mapping names those that differ from ``gram_squared``."""
    return form if isinstance(form, str) else form.get(strength, "gram_squared")


def check_form(form: str | Mapping[str, str], strengths: Sequence[str]) -> None:
    """Raise `ConfigError` for a form, or a strength given a form, that does not exist."""
    for name in [form] if isinstance(form, str) else form.values():
        if name not in FORMS:
            raise unknown_name("form", name, FORMS)
    for strength in [] if isinstance(form, str) else form:
        if strength not in strengths:
            raise unknown_name("strength in form", strength, strengths)


def _attention_terms(attention: Sequence[AttentionRole], mode: str) -> Iterator[Term]:
    uneven: list[str] = []
    for role in attention:
        label = _label(role)
        parts = {name: getattr(role, name) for name in ("query", "key", "value", "output")}
        if mode == "separate":
            for name, view in parts.items():
                yield Term("attention", f"{label}.{name}", (view,), "columns")
            continue
        if len({view.shape[1] for view in parts.values()}) > 1:
            shapes = ", ".join(f"{name} {view.shape}" for name, view in parts.items())
            uneven.append(f"{role.path}: {shapes}")
        yield Term("attention", label, tuple(parts.values()), "columns")
    if uneven:
        raise ShapeError(
            "attention_mode='joint' stacks query, key, value and output along outputs, which needs"
            " one input width; use attention_mode='separate':\n" + listed(uneven)
        )


def _feedforward_terms(roles: Roles) -> Iterator[Term]:
    for network in roles.feedforward:
        for name in ("up", "gate", "down"):
            view = getattr(network, name)
            if view is not None:
                yield Term(
                    "feedforward", f"{network.stack}.{network.layer}.{name}", (view,), "columns"
                )
    for weight in roles.loose:
        if weight.role.startswith("feedforward"):
            yield Term("feedforward", weight.view.parameter_name, (weight.view,), "columns")


def _single_terms(roles: Roles, attention: Sequence[AttentionRole], role: str) -> Iterator[Term]:
    for part in attention:
        yield Term(role, _label(part), (getattr(part, role),), "rows")
    for weight in roles.loose:
        if weight.role == role:
            yield Term(role, weight.view.parameter_name, (weight.view,), "rows")


def _embedding_terms(roles: Roles) -> Iterator[Term]:
    for table in roles.embeddings:
        if table.kind == "token":
            yield Term("embedding", table.path or "token", (table.weight,), "rows")


def _label(role: AttentionRole) -> str:
    suffix = ".cross" if role.kind == "cross" else ""
    return f"{role.stack}.{role.layer}{suffix}"


def _counted_once(terms: Sequence[Term], notes: list[str]) -> list[Term]:
    """Leave out what an earlier term of the same kind holds already: one weight in two roles is
    penalised once."""
    seen: dict[tuple[object, ...], str] = {}
    kept: list[Term] = []
    for term in terms:
        group = "single" if term.strength in SINGLE_ROLES else term.strength
        fresh: list[WeightView] = []
        for view in term.views:
            first = seen.setdefault((group, *view.key), f"{term.strength} of {term.label}")
            repeated = (
                any(view.key == other.key for other in fresh)
                or first != f"{term.strength} of {term.label}"
            )
            if repeated:
                notes.append(
                    f"{view.parameter_name}: also {term.strength} of {term.label}, counted once as"
                    f" {first}"
                )
            else:
                fresh.append(view)
        if fresh:
            kept.append(Term(term.strength, term.label, joined_views(fresh), term.side))
    return kept


def _check(terms: Sequence[Term]) -> None:
    offenders: list[str] = []
    for term in terms:
        for view in term.views:
            try:
                check_weights([view.tensor()])
            except (ConfigError, ShapeError) as error:
                offenders.append(f"{view.parameter_name}: {error}")
    if offenders:
        raise ConfigError(
            "these weights cannot be penalised:\n" + listed(list(dict.fromkeys(offenders)))
        )
