"""One weight for queries and keys, in checkpoints that still read like those of the plain model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from wellposed.call_checks import known_keywords
from wellposed.errors import CheckpointError, ConfigError, RoleNotFoundError, ShapeError, listed
from wellposed.initialize._plan import distance, is_loaded, say
from wellposed.roles import AttentionRole, find_roles


@known_keywords
def tie_queries_and_keys_(
    model: nn.Module, *, patterns: Mapping[str, str | Sequence[str]] | None = None
) -> tuple[str, ...]:
    """Make `W_K = W_Q` and `b_K = b_Q` in every self-attention, in place and for good: one
    parameter, not two.

    Exact, and it stays so under any optimizer. The query's numbers are kept and the key's are
    dropped, so a pretrained model has to be trained again. Needed for Lipschitz L2 attention (Kim,
    Papamakarios, Mnih 2021, theorem 3.2), not
    sufficient: see theory note B4. Cross-attention stays as it is: tied or not, it has no bound
    there.

    Query and key share one `torch.nn.Parameter`. ``state_dict`` and ``save_pretrained``
    write both, under the names of the plain model. Such a checkpoint loads into a model that is not
    tied; tie that one again before it is trained on. Into a tied model any checkpoint loads in
    which query and key are equal.

    Args:
        model: any model whose attention `wellposed.find_roles` recognises. Tie before the optimizer
            is made and before adapters, sharding or `wellposed.constrain_`.
        patterns: as in `wellposed.find_roles`.

    Returns:
        Names of the key weights that are now tied, in model order; those that already were are not
        among them.

    Raises:
        RoleNotFoundError: no self-attention was found.
        ShapeError: query and key weights differ in shape (grouped heads). Nothing is changed then.
        ConfigError: only one of them has a bias, they are rows of one fused weight (GPT-2
            ``c_attn``, ``in_proj_weight``), or they are parametrised or wrapped. Nothing is changed
            then.
        CheckpointError: later, when a state dict in which they differ is loaded into the tied
            model.

    Cost: none. When not to use: norms of queries and keys that have weights of their own, and
    rotations by position, lie behind the projections and are left untied.

    >>> from wellposed.nn import DotProductAttention
    >>> attention = DotProductAttention(8, 2)
    >>> tie_queries_and_keys_(attention)
    ('k_proj.weight',)
    >>> attention.k_proj.weight is attention.q_proj.weight
    True
    """
    found = [role for role in find_roles(model, patterns=patterns).attention if role.kind == "self"]
    if not found:
        raise RoleNotFoundError(
            f"tie_queries_and_keys_: no self-attention was found in {type(model).__name__}; name"
            " its query, key, value and output weights with patterns="
        )
    roles = [role for role in found if role.query.key != role.key.key]
    pairs = [(role.query, role.key) for role in roles if role.query.shape != role.key.shape]
    misshapen = [f"{key.parameter_name}: query {q.shape}, key {key.shape}" for q, key in pairs]
    if misshapen:
        raise ShapeError(
            "tie_queries_and_keys_: queries and keys of different shape (grouped heads) cannot be"
            " one weight; build the model with as many key heads as query heads:\n"
            + listed(misshapen)
        )
    problems = [f"{role.path or 'the model'}: {why}" for role in roles if (why := _obstacle(role))]
    if problems:
        raise ConfigError("tie_queries_and_keys_ cannot tie:\n" + listed(problems))
    names: list[str] = []
    moved: dict[str, float] = {}
    for role in roles:
        key = role.key
        names.append(f"{key.owner_path}.{key.attribute}".lstrip("."))
        if is_loaded(key.parameter):
            moved[names[-1]] = distance(role.query.tensor(), key.tensor())
        _tie(role, model.get_submodule(role.path))
    say(f"tie_queries_and_keys_: {len(roles)} keys took the numbers of their queries", moved)
    return tuple(names)


def _tie(role: AttentionRole, attention: nn.Module) -> None:
    query, key = role.query, role.key
    inside = len(role.path) + 1 if role.path else 0
    for name in ("weight", "bias"):
        if getattr(key.owner, name, None) is not None:
            setattr(key.owner, name, getattr(query.owner, name))
            names = [f"{view.owner_path[inside:]}.{name}" for view in (query, key)]
            attention.register_state_dict_post_hook(partial(_save, names))
            attention.register_load_state_dict_pre_hook(partial(_load, names))


def _save(names: list[str], _: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
    """Give the key a tensor of its own: file formats refuse two names for one."""
    query, key = (prefix + name for name in names)
    if query in state and key in state:
        state[key] = state[key].clone()


def _load(names: list[str], _: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
    query, key = (prefix + name for name in names)
    told = query in state and key in state and not state[query].is_meta
    if told and not torch.equal(state[query], state[key]):
        raise CheckpointError(
            f"{key}: the model has one weight for queries and keys, and in this state dict they"
            " differ; load it into a new model first, then call tie_queries_and_keys_ (this one is"
            " loaded in part)"
        )


def _obstacle(role: AttentionRole) -> str | None:
    """Say why query and key of this attention cannot be tied; None where they can."""
    query, key = role.query, role.key
    if not (query.attribute == key.attribute == "weight" and query.rows is key.rows is None):
        return (
            f"{key.parameter_name} is no linear layer's weight by itself; take the fused one apart"
        )
    if any(view.owner_path.rpartition(".")[2] == "base_layer" for view in (query, key)):
        return "it carries adapters, which would stay untied; tie first, then add them"
    biases = [getattr(view.owner, "bias", None) for view in (query, key)]
    if (biases[0] is None) != (biases[1] is None):
        return "one of query and key has a bias and the other has none; give both one, or neither"
    if any(
        parametrize.is_parametrized(view.owner, name)
        for view in (query, key)
        for name in ("weight", "bias")
    ):
        return f"{key.parameter_name} or the query's is parametrised; tie first, then parametrise"
    return None
