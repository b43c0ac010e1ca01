"""Parameter groups: what weight decay may shrink and what it may not, and what steps by Muon and what by AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from wellposed.call_checks import checked_arguments
from wellposed.constrain._select import Where, select_weights, unwrap_model
from wellposed.errors import ConfigError
from wellposed.options import Strength

Group: TypeAlias = dict[str, Any]
_METHOD = "method"


@checked_arguments
def parameter_groups(
    model: nn.Module,
    weight_decay: Strength,
    *,
    where: Where | None = None,
    roles: str | Sequence[str] | None = None,
    adapters: bool = False,
    batch: Any = None,
) -> list[dict[str, object]]:
    """Split the trainable parameters in two: free matrices with ``weight_decay``, all else with
    none.

    Status: exact; every trainable parameter is in one group. Without decay are biases, norms and
    scalars (fewer than two axes) and the weights that ``where``, ``roles`` and ``adapters`` choose:
    those `constrain_` is to hold, whose size is given. A fused weight of which a part is held has
    no decay as a whole.

    Args:
        model: any module. weight_decay: of the free matrices, at least 0.
        where, roles, adapters, batch: as in `constrain_`; none of them where nothing is to be held.

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
    model = unwrap_model(model, "parameter_groups")
    held = chosen_parameters(model, where, roles, adapters=adapters, batch=batch)
    groups = decay_groups(model, weight_decay, constrained=held)
    if not groups:
        name = type(model).__name__
        raise ConfigError(f"parameter_groups: {name} has no parameter that trains; unfreeze some")
    return groups


def decay_groups(
    model: nn.Module, weight_decay: float, *, constrained: Iterable[nn.Parameter] = ()
) -> list[Group]:
    """Return the groups of `parameter_groups` where the ``constrained`` parameters are known
    already."""
    kept = set(map(id, constrained))
    split: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            split[parameter.ndim >= 2 and id(parameter) not in kept].append(parameter)
    decays = {True: weight_decay, False: 0.0}
    return [{"params": own, "weight_decay": decays[free]} for free, own in split.items() if own]


def chosen_parameters(
    model: nn.Module,
    where: Where | None,
    roles: str | Sequence[str] | None = None,
    *,
    adapters: bool = False,
    batch: Any = None,
) -> list[nn.Parameter]:
    """Return the parameters that `constrain_` would choose; none where nothing is asked for."""
    if where is None and not roles:
        return []
    found = select_weights(model, where, roles=roles, adapters=adapters, batch=batch)
    return [place.parameter for place in found if place.parameter is not None]


class MuonAndAdamW(Optimizer):
    """Step hidden matrices along the polar factor of their momentum (Muon), and all other
    parameters by AdamW.

    Status: empirical; the two are `torch.optim.Muon` and `torch.optim.AdamW`, bit for bit. Muon
    takes every trainable matrix that is neither an embedding (nor tied to one) nor named in
    ``adamw``; vectors, scalars and those go to AdamW. It is one optimizer with one ``state_dict``,
    so schedulers, Accelerate, `constrain_` and checkpoints need nothing more, and a resumed run
    goes on bit for bit. Source: Jordan et al. 2024 (Muon); Loshchilov and Hutter 2019.

    Args:
        model: any module; its trainable parameters are taken.
        lr: of the matrices. adamw_lr: of the rest.
        momentum: of Muon. betas, eps: of AdamW.
        weight_decay: of both, for matrices and embeddings; biases, norms and constrained weights
            have none.
        adjust_lr_fn: how Muon scales its step with the shape: ``"original"`` or
            ``"match_rms_adamw"``, with which the rates of AdamW fit.
        adamw: further matrices for AdamW, such as the output layer; as ``where`` of `constrain_`.
        where, roles: weights that `constrain_` is to hold, which therefore have no decay.

    Raises:
        ConfigError: the model has no matrix for Muon. RoleNotFoundError: a name or role matches
            nothing.

    Cost: Muon adds 15 products with the smaller Gram matrix, in bfloat16, to each matrix and step.
    When not to use: for fine-tuning weights that AdamW trained, and for sharded weights.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Embedding(10, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
    >>> optimizer = MuonAndAdamW(model, adamw="2")
    >>> [(group["method"], len(group["params"])) for group in optimizer.param_groups]
    [('muon', 1), ('adamw', 2), ('adamw', 2)]
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float = 2e-2,
        adamw_lr: float = 3e-4,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adjust_lr_fn: str | None = None,
        adamw: Where | None = None,
        where: Where | None = None,
        roles: str | Sequence[str] | None = None,
    ) -> None:
        model = unwrap_model(model, "MuonAndAdamW")
        held = chosen_parameters(model, where, roles)
        kept = {id(parameter) for parameter in chosen_parameters(model, adamw)}
        kept |= {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
        groups = decay_groups(model, weight_decay, constrained=held)
        hidden = _part(groups, lambda parameter: parameter.ndim == 2 and id(parameter) not in kept)
        rest = _part(groups, lambda parameter: parameter.ndim != 2 or id(parameter) in kept)
        if not hidden:
            raise ConfigError(
                f"MuonAndAdamW: {type(model).__name__} has no trainable matrix beside embeddings"
                f" and adamw={adamw!r}; use torch.optim.AdamW"
            )
        muon = torch.optim.Muon(hidden, lr=lr, momentum=momentum, adjust_lr_fn=adjust_lr_fn)
        self._parts: dict[str, Optimizer] = {"muon": muon}
        if rest:
            self._parts["adamw"] = torch.optim.AdamW(rest, lr=adamw_lr, betas=betas, eps=eps)
        pairs = [(name, group) for name, part in self._parts.items() for group in part.param_groups]
        super().__init__([{**group, _METHOD: name} for name, group in pairs], {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group that names its ``method``; what it does not say is as that method has it."""
        name = param_group.get(_METHOD)
        if name not in self._parts:
            said = "a group names its method, 'muon' (matrices alone) or 'adamw'"
            raise ConfigError(f"MuonAndAdamW: {said}; received {_METHOD}={name!r}")
        super().add_param_group({**self._parts[name].defaults, **param_group})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step of both; ``closure`` runs once, before them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for name, part in self._parts.items():
            # Loading a state puts other objects in their place.
            part.param_groups = [group for group in self.param_groups if group[_METHOD] == name]
            part.state = self.state
            part.step()
        return loss

    def __getstate__(self) -> dict[str, Any]:
        """Give a copy its two parts as well."""
        return {**super().__getstate__(), "_parts": self._parts}


def _part(groups: list[Group], belongs: Callable[[nn.Parameter], bool]) -> list[Group]:
    chosen = [{**group, "params": list(filter(belongs, group["params"]))} for group in groups]
    return [group for group in chosen if group["params"]]
