"""Find the query, key, value, output, feed-forward and embedding weights of any Transformer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from torch import nn

from wellposed.call_checks import known_keywords, require_module
from wellposed.errors import RoleNotFoundError, listed
from wellposed.roles._located_module import LocatedModule
from wellposed.roles._patterns import roles_from_patterns
from wellposed.roles._roles import AttentionRole, EmbeddingRole, FeedForwardRole, Roles
from wellposed.roles._views import WeightView
from wellposed.roles.families import FAMILIES, Role
from wellposed.roles.layer_paths import shared_segments

_NOT_TOKENS = ("type", "segment", "relative", "class", "label")
_POSITION_TABLE = re.compile(r"pos(ition(al)?)?_embed(ding)?s?")


@known_keywords
def find_roles(
    model: nn.Module, *, patterns: Mapping[str, str | Sequence[str]] | None = None
) -> Roles:
    """Return views W, one per weight, such that the model's layer computes ``W x`` for that role.

    Exact: each view shares storage with the real parameter and sends gradients to it; fused
    projections (`torch.nn.MultiheadAttention`, GPT-2 ``c_attn``, ``qkv``) are sliced and stored
    transposes are undone, without a copy. Modules are recognised by the names of their children, so
    any model built like one of the families is
    found: `torch.nn` Transformer layers, BERT, RoBERTa, DistilBERT, GPT-2, Llama, Mistral, Qwen,
    T5, BART, Marian, ViT and wellposed's own models. A parameter that sits in two modules (tied
    embeddings) appears once per role.

    Args:
        model: any module; nothing in it is changed.
        patterns: role name -> shell-style pattern(s) on parameter names, for models of no known
            family, for example ``{"query": "*.attn.wq.weight", "feedforward_in":
            "*.mlp.w1.weight"}``. A role named here is found by its patterns alone, the others as
            usual. Query, key, value and output of one module make up an attention role, in and out
            a feed-forward role.

    Returns:
        `Roles` in model order; printing it shows a table.

    Raises:
        RoleNotFoundError: nothing matches (what was seen is listed), or a pattern matches no
            parameter.
        ConfigError: ``model`` is no module; a pattern matches a bias or another parameter that is
            no matrix, or a role name is unknown.
        ShapeError: heads do not divide the weights.

    Cost: one walk over the modules, no arithmetic.

    When not to use: convolutional attention and recurrent models have no such weights.

    >>> from torch import nn
    >>> roles = find_roles(nn.TransformerEncoderLayer(16, 4, 32))
    >>> [weight.role for weight in roles.weights()]
    ['query', 'key', 'value', 'output', 'feedforward_in', 'feedforward_out']
    >>> roles.attention[0].key.parameter_name
    'self_attn.in_proj_weight'
    """
    require_module("find_roles", model)
    modules = [LocatedModule(path, module, model) for path, module in model.named_modules()]
    families = [FAMILIES.get(name) for name in FAMILIES]
    attention: list[AttentionRole] = []
    for place in modules:
        if not any(place.path.startswith(f"{role.path}.") for role in attention):
            attention += _first(family.attention(place) for family in families)
    feedforward: list[FeedForwardRole] = []
    for place in modules:
        if not any(f"{place.path}.".startswith(f"{role.path}.") for role in attention):
            feedforward += _first(family.feedforward(place) for family in families)
    roles = Roles(
        tuple(attention),
        tuple(_beside(role, attention) for role in feedforward),
        _embedding_roles(modules),
    )
    if patterns is not None:
        roles = roles_from_patterns(model, patterns, roles)
    if not (roles.attention or roles.feedforward or roles.loose):
        raise _nothing_found(model)
    return roles


def _first(found: Iterable[Role | None]) -> list[Role]:
    """Return the first that is not None, alone, or nothing."""
    role = next((role for role in found if role is not None), None)
    return [] if role is None else [role]


def _beside(role: FeedForwardRole, attention: Sequence[AttentionRole]) -> FeedForwardRole:
    """Take the stack from the attention that shares the longest path: a feed-forward module does
    not know it."""
    if not attention:
        return role
    nearest = max(attention, key=lambda other: len(shared_segments(other.path, role.path)))
    return replace(role, stack=nearest.stack)


def _embedding_roles(modules: Iterable[LocatedModule]) -> tuple[EmbeddingRole, ...]:
    found: list[EmbeddingRole] = []
    seen: set[int] = set()
    for place in modules:
        for view, kind in _tables(place):
            if id(view.parameter) not in seen:
                seen.add(id(view.parameter))
                found.append(EmbeddingRole(place.path, kind, view))
    return tuple(found)


def _tables(place: LocatedModule) -> Iterable[tuple[WeightView, Literal["token", "position"]]]:
    name = place.name.lower()
    if isinstance(place.module, nn.Embedding):
        if not any(word in name for word in _NOT_TOKENS):
            kind = "position" if "pos" in name or name == "wpe" else "token"
            yield WeightView(place.path, place.module, "weight"), kind
        return
    for attribute, table in place.module.named_parameters(recurse=False):
        matrix = table.ndim == 2 or (table.ndim == 3 and table.shape[0] == 1)
        if matrix and _POSITION_TABLE.fullmatch(attribute):
            yield WeightView(place.path, place.module, attribute), "position"


def _nothing_found(model: nn.Module) -> RoleNotFoundError:
    seen = [
        f"{name} {tuple(weight.shape)}"
        for name, weight in model.named_parameters()
        if weight.ndim == 2
    ]
    known = ", ".join(FAMILIES.names())
    return RoleNotFoundError(
        f"no attention or feed-forward weight was recognised in {type(model).__name__}; known"
        f" families: {known}.\nMatrices seen:\n{listed(seen) if seen else '  none'}\nName them"
        " yourself: find_roles(model, patterns={'query': '*.wq.weight', 'key': '*.wk.weight',"
        " ...})"
    )
