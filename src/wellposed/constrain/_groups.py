"""Parameter groups: what weight decay may shrink and what it may not, and what steps by Muon and what by AdamW."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wellposed.call_checks import checked_arguments
from wellposed.constrain._select import Where, select_weights, unwrap_model
from wellposed.errors import ConfigError, RoleNotFoundError, WellposedError, shortened
from wellposed.linalg import is_sharded
from wellposed.options import Strength
from wellposed.roles import ATTENTION, FEEDFORWARD, RoleWeight, find_roles, is_table, is_transposed

logger = logging.getLogger(__name__)

Group: TypeAlias = dict[str, Any]
_METHOD, _TRANSPOSED = "method", "transposed"
_HIDDEN = frozenset((*ATTENTION, *FEEDFORWARD, "latent"))
_NORM = re.compile(r"Norm(\d+d)?$")


@checked_arguments
def parameter_groups(
    model: nn.Module,
    weight_decay: Strength,
    *,
    where: Where | None = None,
    roles: str | Sequence[str] | None = None,
    batch: Any = None,
) -> list[dict[str, object]]:
    """Split the trainable parameters in two: free matrices with ``weight_decay``, all else with
    none.

    Status: exact; every trainable parameter is in one group. Without decay are vectors and scalars,
    whatever a norm owns or is called a bias, of any shape (stacked biases of experts), and the
    weights that ``where`` and ``roles`` choose: those `constrain_` is to hold, whose
    size is given. A fused weight of which a part is held has no decay as a whole.

    Args:
        model: any module. weight_decay: of the free matrices, at least 0.
        where, roles, batch: as in `constrain_`; none of them where nothing is to be held.

    Returns:
        One or two groups, ``{"params": [...], "weight_decay": ...}``, for any optimizer of torch.

    Raises:
        ConfigError: a negative ``weight_decay``, no parameter that trains, or
            FullyShardedDataParallel, which flattens weights. RoleNotFoundError: nothing is chosen
            by a name or role.

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
    held = chosen_parameters(model, where, roles, batch=batch)
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
    for path, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if "FullyShardedDataParallel" in kinds:
            raise ConfigError(
                f"parameter groups: {path or 'the model'} is a FullyShardedDataParallel, whose flat"
                " parameters do not tell matrices from biases; shard by"
                " torch.distributed.fsdp.fully_shard"
            )
        norm = any(map(_NORM.search, kinds))
        own = module._parameters.items()
        kept |= {id(weight) for name, weight in own if norm or name.endswith("bias")}
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
    batch: Any = None,
) -> list[nn.Parameter]:
    """Return the parameters that `constrain_` would choose; none where nothing is asked for."""
    if where is None and not roles:
        return []
    found = select_weights(model, where, roles=roles, batch=batch)
    return [place.parameter for place in found if place.parameter is not None]


class MuonAndAdamW(Optimizer):
    """Step hidden matrices along the polar factor of their momentum (Muon), and all other
    parameters by AdamW.

    Status: empirical; the two are `torch.optim.Muon` and `torch.optim.AdamW`, bit for bit. Muon
    takes the trainable weights of attention and feed-forward networks, by what `find_roles` finds,
    each as the matrix that its layer applies: the transpose of what GPT-2's ``Conv1D`` stores, and
    each expert of a stack by itself. Fused projections are one matrix. All else goes to AdamW:
    tables and what is tied to them, heads, poolers, classifiers, routers, adapters, matrices
    computed from others. It is one optimizer with one ``state_dict``, so
    schedulers, Accelerate, `constrain_` and checkpoints need nothing more, and a resumed run
    continues bit for bit. Source: Jordan et al. 2024 (Muon); Loshchilov and Hutter 2019.

    Args:
        model: any module; its trainable parameters are taken.
        lr: of the matrices. adamw_lr: of the rest.
        momentum: of Muon. betas, eps: of AdamW.
        weight_decay: of both, for matrices and embeddings; biases, norms and constrained weights
            have none.
        adjust_lr_fn: how Muon scales its step with the shape (out, in): ``"original"`` or
            ``"match_rms_adamw"``, with which the rates of AdamW fit.
        where, roles: weights that `constrain_` is to hold, which therefore have no decay.
        muon: the matrices for Muon, in place of those by role; as ``where`` of `constrain_`.
        batch: what `find_roles` runs the model on.

    Raises:
        ConfigError: no matrix for Muon is found, a matrix named in ``muon`` is none, or roles
            contradict names. RoleNotFoundError: a name or role matches nothing.

    Cost: Muon adds 15 products with the smaller Gram matrix, in bfloat16, to each matrix and step;
    once, what `find_roles` costs.
    When not to use: for fine-tuning weights that AdamW trained, and for sharded weights, which each
    step gathers.

    >>> import torch
    >>> model = torch.nn.TransformerEncoderLayer(8, 2, 16)
    >>> optimizer = MuonAndAdamW(model)
    >>> [(group["method"], len(group["params"])) for group in optimizer.param_groups]
    [('muon', 4), ('adamw', 8)]
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
        where: Where | None = None,
        roles: str | Sequence[str] | None = None,
        muon: Where | None = None,
        batch: Any = None,
    ) -> None:
        model = unwrap_model(model, "MuonAndAdamW")
        held = chosen_parameters(model, where, roles, batch=batch)
        groups = decay_groups(model, weight_decay, constrained=held)
        stored = _hidden_matrices(model, muon, batch)
        hidden = [
            {**group, _TRANSPOSED: transposed}
            for transposed in (False, True)
            for group in _part(groups, lambda each, t=transposed: stored.get(id(each)) is t)
        ]
        rest = _part(groups, lambda parameter: id(parameter) not in stored)
        if not hidden:
            raise ConfigError(
                f"MuonAndAdamW: in {type(model).__name__} no trainable matrix of attention or"
                " feed-forward is recognised; name matrices with muon= (muon=torch.nn.Linear takes"
                " those of every linear layer), or use torch.optim.AdamW"
            )
        self._parts: dict[str, Optimizer] = {
            "muon": _MuonOfMatrices(hidden, lr=lr, momentum=momentum, adjust_lr_fn=adjust_lr_fn)
        }
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
        if name == "muon":
            params = param_group["params"]
            params = [params] if torch.is_tensor(params) else list(params)
            _check_matrices(("", each) for each in params)
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

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state; how a weight of this model is stored is no part of it."""
        stored = [group.get(_TRANSPOSED, False) for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, transposed in zip(self.param_groups, stored, strict=True):
            group[_TRANSPOSED] = transposed

    def __getstate__(self) -> dict[str, Any]:
        """Give a copy its two parts as well."""
        return {**super().__getstate__(), "_parts": self._parts}


def _part(groups: list[Group], belongs: Callable[[nn.Parameter], bool]) -> list[Group]:
    chosen = [{**group, "params": list(filter(belongs, group["params"]))} for group in groups]
    return [group for group in chosen if group["params"]]


class _MuonOfMatrices(torch.optim.Muon):
    """`torch.optim.Muon` on the matrices that layers apply: a view of what is stored transposed, and
    each entry of a stack."""

    def __init__(self, groups: Iterable[Group], **options: Any) -> None:
        checked = [
            {**group, "params": [torch.empty(0, 0) for _ in group["params"]]} for group in groups
        ]
        super().__init__(checked, **options)
        for group, given in zip(self.param_groups, groups, strict=True):
            group["params"] = given["params"]

    def _init_group(self, group: Group, *lists: list[Tensor]) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        has_complex = super()._init_group(group, *lists)  # pyright: ignore[reportArgumentType]
        for each in lists:  # parameters, gradients, momenta
            views = [view for tensor in each for view in _matrices(tensor)]
            each[:] = [view.mT for view in views] if group.get(_TRANSPOSED) else views
        return has_complex


def _matrices(tensor: Tensor) -> list[Tensor]:
    """Return views of a matrix, or of the matrices of a stack that this process has."""
    if tensor.ndim == 2:
        return [tensor]
    if is_sharded(tensor):
        if not all(each.is_replicate() or each.is_shard(0) for each in tensor.placements):
            raise ConfigError(
                f"MuonAndAdamW: a stack of matrices {tuple(tensor.shape)} is cut along"
                f" {tensor.placements}; shard it along its first axis, or leave it to AdamW by muon="
            )
        tensor = tensor.to_local()
    return [tensor[entry] for entry in range(len(tensor))]


def _check_matrices(named: Iterable[tuple[str, Tensor]]) -> None:
    flat = [f"{k} {tuple(v.shape)}".strip() for k, v in named if v.ndim not in (2, 3)]
    if flat:
        what = "Muon steps matrices and stacks of them; received"
        raise ConfigError(f"MuonAndAdamW: {what} {shortened(flat)}; step these by AdamW")


def _hidden_matrices(model: nn.Module, muon: Where | None, batch: Any) -> dict[int, bool]:
    """Return the id of each parameter that Muon steps, and whether it is stored (in, out)."""
    found: list[RoleWeight] = []
    try:
        roles = find_roles(model, batch)
        found += roles.weights()
        if roles.notes and muon is None:
            logger.warning("MuonAndAdamW: %s; or name matrices with muon=", "; ".join(roles.notes))
    except WellposedError as error:
        if muon is None and not isinstance(error, RoleNotFoundError):
            raise ConfigError(f"MuonAndAdamW: {error}\nor name the matrices with muon=") from error
    views = [weight.view for weight in found if weight.role in _HIDDEN]
    by_role = {id(view.parameter): view.transposed for view in views}
    if muon is not None:
        chosen = select_weights(model, muon, batch=batch)
        named = [(each.label, each.parameter, each.module) for each in chosen]
        _check_matrices((label, own) for label, own, _ in named if own is not None)
        return {id(own): by_role.get(id(own), is_transposed(part)) for _, own, part in named}
    tables = {id(getattr(part, "weight", None)) for part in model.modules() if is_table(part)}
    tables |= {id(weight.view.parameter) for weight in found if weight.role.endswith("_embedding")}
    return {key: transposed for key, transposed in by_role.items() if key not in tables}
