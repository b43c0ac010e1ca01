"""One weight for queries and keys, in checkpoints that still read like those of the plain model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from wellposed.call_checks import known_keywords
from wellposed.errors import CheckpointError, ConfigError, RoleNotFoundError, ShapeError, listed
from wellposed.initialize._plan import distance, is_loaded, say
from wellposed.roles import AttentionRole, WeightView, find_roles

_BIAS_OF = {"weight": "bias", "in_proj_weight": "in_proj_bias"}


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

    Separate projections share one `torch.nn.Parameter`. A fused one (GPT-2 ``c_attn``,
    ``in_proj_weight``, Phi-3 ``qkv_proj``) gets a parametrization that holds query and value rows
    alone and reads the key rows off the query's. Either way ``state_dict`` and ``save_pretrained``
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
        ConfigError: only one of them has a bias, or they are parametrised or wrapped. Nothing is
            changed then.
        CheckpointError: later, when a state dict in which they differ is loaded into the tied
            model.

    Cost: none for separate projections; for fused ones a copy of the weight in each forward pass.
    When not to use: norms of queries and keys that have weights of their own, and rotations by
    position, lie behind the projections and are left untied. A model with a parametrised weight
    cannot be pickled whole, only its state dict.

    >>> attention = nn.MultiheadAttention(8, 2)
    >>> tie_queries_and_keys_(attention)
    ('in_proj_weight',)
    >>> query, key, _ = attention.in_proj_weight.chunk(3)
    >>> torch.equal(query, key), attention.parametrizations.in_proj_weight.original.shape
    (True, torch.Size([16, 8]))
    """
    found = [role for role in find_roles(model, patterns=patterns).attention if role.kind == "self"]
    if not found:
        raise RoleNotFoundError(
            f"tie_queries_and_keys_: no self-attention was found in {type(model).__name__}; name"
            " its query, key, value and output weights with patterns="
        )
    roles = [role for role in found if not _is_tied(role)]
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
        if role.query.owner is role.key.owner:
            _tie_fused(role)
        else:
            _tie_separate(role, model.get_submodule(role.path))
    say(f"tie_queries_and_keys_: {len(roles)} keys took the numbers of their queries", moved)
    return tuple(names)


class _KeyIsQuery(nn.Module):
    """A fused weight from the one without its key part, which lies at ``key`` along ``dim`` and
    repeats ``query``."""

    def __init__(self, query: tuple[int, int], key: tuple[int, int], dim: int) -> None:
        super().__init__()
        self.query, self.key, self.dim = query, key, dim

    def forward(self, free: Tensor) -> Tensor:
        start, size = self.query[0], self.key[1] - self.key[0]
        # The query part keeps its place unless it followed the key part that is gone.
        query = free.narrow(self.dim, start if start < self.key[0] else start - size, size)
        before, after = free.tensor_split([self.key[0]], dim=self.dim)
        return torch.cat([before, query, after], self.dim)

    def right_inverse(self, whole: Tensor) -> Tensor:
        before, _, after = whole.tensor_split(list(self.key), dim=self.dim)
        return torch.cat([before, after], self.dim)


def _tie_fused(role: AttentionRole) -> None:
    query, owner = role.query, role.query.owner
    for name, dim in ((query.attribute, int(query.transposed)), (_BIAS_OF[query.attribute], 0)):
        if getattr(owner, name, None) is not None:
            tie = _KeyIsQuery(_rows(query), _rows(role.key), dim)
            parametrize.register_parametrization(owner, name, tie)
    owner.register_state_dict_post_hook(_save_fused)
    owner.register_load_state_dict_pre_hook(_load_fused)


def _save_fused(owner: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in _tied_names(owner):
        del state[f"{prefix}parametrizations.{name}.original"]
        state[f"{prefix}{name}"] = getattr(owner, name).detach()


def _load_fused(owner: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, tie in _tied_names(owner).items():
        whole = state.pop(f"{prefix}{name}", None)
        if whole is not None:
            parts = [whole.narrow(tie.dim, a, b - a) for a, b in (tie.query, tie.key)]
            _check_equal(f"{prefix}{name}", *parts)
            state[f"{prefix}parametrizations.{name}.original"] = tie.right_inverse(whole)


def _tie_separate(role: AttentionRole, attention: nn.Module) -> None:
    query, key = role.query, role.key
    inside = len(role.path) + 1 if role.path else 0
    for name in ("weight", "bias"):
        if getattr(key.owner, name, None) is not None:
            setattr(key.owner, name, getattr(query.owner, name))
            names = [f"{view.owner_path[inside:]}.{name}" for view in (query, key)]
            attention.register_state_dict_post_hook(partial(_save_separate, names))
            attention.register_load_state_dict_pre_hook(partial(_load_separate, names))


def _save_separate(
    names: list[str], _: nn.Module, state: dict[str, Any], prefix: str, *__: Any
) -> None:
    """Give the key a tensor of its own: file formats refuse two names for one."""
    query, key = (prefix + name for name in names)
    if query in state and key in state:
        state[key] = state[key].clone()


def _load_separate(
    names: list[str], _: nn.Module, state: dict[str, Any], prefix: str, *__: Any
) -> None:
    query, key = (prefix + name for name in names)
    if query in state and key in state:
        _check_equal(key, state[query], state[key])


def _tied_names(owner: nn.Module) -> dict[str, _KeyIsQuery]:
    found: Mapping[str, Any] = getattr(owner, "parametrizations", {})
    return {name: steps[0] for name, steps in found.items() if isinstance(steps[0], _KeyIsQuery)}


def _rows(view: WeightView) -> tuple[int, int]:
    return view.rows or (0, view.shape[0])


def _is_tied(role: AttentionRole) -> bool:
    return role.query.key == role.key.key or role.query.attribute in _tied_names(role.query.owner)


def _obstacle(role: AttentionRole) -> str | None:
    """Say why query and key of this attention cannot be tied; None where they can."""
    query, key = role.query, role.key
    fused = query.owner is key.owner and query.attribute == key.attribute
    if query.attribute not in _BIAS_OF or not (fused or query.rows is key.rows is None):
        return f"{key.parameter_name} is neither a linear layer's weight nor fused with the query's"
    if any(view.owner_path.rpartition(".")[2] == "base_layer" for view in (query, key)):
        return "it carries adapters, which would stay untied; tie first, then add them"
    biases = [getattr(view.owner, _BIAS_OF[view.attribute], None) for view in (query, key)]
    if (biases[0] is None) != (biases[1] is None):
        return "one of query and key has a bias and the other has none; give both one, or neither"
    if any(
        parametrize.is_parametrized(view.owner, name)
        for view in (query, key)
        for name in (view.attribute, _BIAS_OF[view.attribute])
    ):
        return f"{key.parameter_name} or the query's is parametrised; tie first, then parametrise"
    return None


def _check_equal(name: str, query: Tensor, key: Tensor) -> None:
    if not query.is_meta and not torch.equal(query, key):
        raise CheckpointError(
            f"{name}: the model has one weight for queries and keys, and in this state dict they"
            " differ; load it into a new model first, then call tie_queries_and_keys_ (this one is"
            " loaded in part)"
        )
