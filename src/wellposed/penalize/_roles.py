"""Roles of weights that a penalty takes: each is a strength of `OrthogonalityPenalty`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from wellposed.registry import Registry
from wellposed.roles import (
    ATTENTION,
    FEEDFORWARD,
    AttentionRole,
    Roles,
    RoleWeight,
    WeightView,
)

Labelled: TypeAlias = tuple[str, tuple[WeightView, ...]]
"""The name of a term, and its weights, which are stacked along outputs."""
AFFINITY = "affinity"
"""The strength that is on no weight."""


@dataclass(frozen=True)
class RoleOptions:
    """Options of `OrthogonalityPenalty` that say which weights a role has."""

    joint: bool = True
    """Whether the four weights of an attention are one stack."""
    cross_attention: bool = False
    """Whether cross-attention is penalised."""

    def attention(self, roles: Roles) -> list[AttentionRole]:
        """Return the attention modules whose weights are penalised."""
        return [role for role in roles.attention if self.cross_attention or role.kind == "self"]


@dataclass(frozen=True)
class PenalisedRole:
    """Weights that one strength of `OrthogonalityPenalty` pulls towards orthogonality.

    A registered name is a keyword of `OrthogonalityPenalty`, and of its ``form``.
    """

    weights: Callable[[Roles, RoleOptions], Iterable[Labelled]]
    """Returns the terms of a model."""
    paper_form: str = "gram"
    """The form for ``form="paper"``."""
    side: Literal["rows", "columns"] = "rows"
    """The side of a weight (out, in) that should be orthonormal."""
    counted_with: str = ""
    """Name of a group of roles that count a weight once together; by default the role alone."""


PENALISED_ROLES = Registry[PenalisedRole](
    "role of a penalty", entry_points="wellposed.penalised_roles", taken=(AFFINITY,)
)
"""Roles by the name of their strength."""


def attention_weights(name: str) -> Callable[[Roles, RoleOptions], Iterator[Labelled]]:
    """Return the ``weights`` of the role of one projection: query, key, value or output."""

    def weights(roles: Roles, options: RoleOptions) -> Iterator[Labelled]:
        for role in options.attention(roles):
            yield label_of(role), (getattr(role, name),)
            for extra_name, view in role.extra_projections:
                if extra_name == name:
                    yield f"{label_of(role)}.{name} {view.parameter_name}", (view,)
        yield from _loose(roles, name)

    return weights


def label_of(role: AttentionRole | RoleWeight) -> str:
    """Return the name of an attention in the terms of a penalty."""
    return f"{role.stack}.{role.layer}{'.cross' if role.kind == 'cross' else ''}"


def _loose(roles: Roles, prefix: str) -> Iterator[Labelled]:
    """Yield the weights outside complete parts whose role begins with a word."""
    views = (weight.view for weight in roles.loose if weight.role.startswith(prefix))
    yield from ((view.parameter_name, (view,)) for view in views)


def _whole_attention(roles: Roles, options: RoleOptions) -> Iterator[Labelled]:
    """Yield the four weights of each attention, stacked or one by one, and its further ones."""
    for role in options.attention(roles):
        views = {name: getattr(role, name) for name in ATTENTION}
        yield from _together_or_apart(label_of(role), views, options)
        for name, view in role.extra_projections:
            yield f"{label_of(role)}.{name} {view.parameter_name}", (view,)
    yield from _attention_without_heads(roles, options)


def _together_or_apart(
    label: str, views: dict[str, WeightView], options: RoleOptions
) -> Iterator[Labelled]:
    if options.joint:
        yield label, tuple(views.values())
    else:
        yield from ((f"{label}.{name}", (view,)) for name, view in views.items())


def _attention_without_heads(roles: Roles, options: RoleOptions) -> Iterator[Labelled]:
    """Yield the terms of attention whose four weights are known, and whose heads are not."""
    blocks: dict[str, dict[str, RoleWeight]] = {}
    for weight in roles.loose:
        if weight.role in ATTENTION and (options.cross_attention or weight.kind != "cross"):
            blocks.setdefault(weight.path, {})[weight.role] = weight

    for block in blocks.values():
        if block.keys() == {*ATTENTION}:
            views = {role: block[role].view for role in ATTENTION}
            yield from _together_or_apart(label_of(block["query"]), views, options)


def _feedforward(roles: Roles, options: RoleOptions) -> Iterator[Labelled]:
    del options
    for network in roles.feedforward:
        label = f"{network.stack}.{network.layer}"
        views = ((name, getattr(network, name)) for name in FEEDFORWARD.values())
        yield from ((f"{label}.{name}", (view,)) for name, view in views if view is not None)
    yield from _loose(roles, "feedforward")


def _token_embeddings(roles: Roles, options: RoleOptions) -> Iterator[Labelled]:
    del options
    tables = (table for table in roles.embeddings if table.kind == "token")
    yield from ((table.path or "token", (table.weight,)) for table in tables)


# Zhang et al. (2021): squared, columns of the stacked weights.
PENALISED_ROLES.register("attention")(PenalisedRole(_whole_attention, "gram_squared", "columns"))
PENALISED_ROLES.register("feedforward")(PenalisedRole(_feedforward, "gram_squared", "columns"))
# McGrath (2024): the norm, rows of each weight.
for _name in ("query", "key", "value"):
    PENALISED_ROLES.register(_name)(
        PenalisedRole(attention_weights(_name), counted_with="projection")
    )
PENALISED_ROLES.register("embedding")(PenalisedRole(_token_embeddings))
