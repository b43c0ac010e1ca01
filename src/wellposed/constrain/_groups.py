"""Parameter groups: what weight decay may shrink, and what it may not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from wellposed.constrain._select import Where, select_weights, unwrap_model
from wellposed.errors import ConfigError


def parameter_groups(
    model: nn.Module,
    weight_decay: float,
    *,
    where: Where | None = None,
    roles: str | Sequence[str] | None = None,
    adapters: bool = False,
) -> list[dict[str, object]]:
    """Split the trainable parameters in two: free matrices with ``weight_decay``, all else with
    none.

    Status: exact; every trainable parameter is in one group. Without decay are biases, norms and
    scalars (fewer than two axes) and the weights that ``where``, ``roles`` and ``adapters`` choose:
    those `constrain_` is to hold, whose size is given. A fused weight of which a part is held has
    no decay as a whole.

    Args:
        model: any module. weight_decay: of the free matrices, at least 0.
        where, roles, adapters: as in `constrain_`; none of them where nothing is to be held.

    Returns:
        One or two groups, ``{"params": [...], "weight_decay": ...}``, for any optimizer of torch.

    Raises:
        ConfigError: a negative ``weight_decay``, or no parameter that trains. RoleNotFoundError:
            nothing is chosen by a name or role.

    Cost: a walk over the modules. When not to use: where embeddings, or other matrices, are not to
    decay either; write the groups by hand.

    >>> import torch, wellposed as wp
    >>> model = torch.nn.TransformerEncoderLayer(8, 2, 16)
    >>> groups = wp.parameter_groups(model, 0.1, roles=("query", "key"))
    >>> optimizer = torch.optim.AdamW(groups, lr=1e-3)
    >>> wp.constrain_(model, optimizer, roles=("query", "key")).error().worst < 1e-5
    True
    """
    if not weight_decay >= 0.0:
        raise ConfigError(
            f"parameter_groups: weight_decay must be at least 0, received {weight_decay!r}"
        )
    model = unwrap_model(model, "parameter_groups")
    held = chosen_parameters(model, where, roles, adapters=adapters)
    groups = decay_groups(model, weight_decay, constrained=held)
    if not groups:
        raise ConfigError(
            f"parameter_groups: {type(model).__name__} has no parameter that trains; unfreeze some"
        )
    return groups


def decay_groups(
    model: nn.Module, weight_decay: float, *, constrained: Iterable[nn.Parameter] = ()
) -> list[dict[str, object]]:
    """Return the groups of `parameter_groups` where the ``constrained`` parameters are known
    already."""
    kept_in_size = set(map(id, constrained))
    free: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            is_free = parameter.ndim >= 2 and id(parameter) not in kept_in_size
            (free if is_free else others).append(parameter)
    groups: list[dict[str, object]] = [
        {"params": free, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def chosen_parameters(
    model: nn.Module,
    where: Where | None,
    roles: str | Sequence[str] | None = None,
    *,
    adapters: bool = False,
) -> list[nn.Parameter]:
    """Return the parameters that `constrain_` would choose; none where nothing is asked for."""
    if where is None and not roles:
        return []
    found = select_weights(model, where, roles=roles, adapters=adapters)
    return [place.parameter for place in found if place.parameter is not None]
