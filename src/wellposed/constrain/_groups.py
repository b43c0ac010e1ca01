"""Parameter groups by weight decay, and by optimizer: Muon or AdamW."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.optim import Optimizer

from wellposed.call_checks import checked_arguments
from wellposed.constrain._select import Where, roles_or_error, select_weights, unwrap_model
from wellposed.errors import ConfigError, RoleNotFoundError, shortened
from wellposed.linalg import is_sharded
from wellposed.options import Strength
from wellposed.removed_names import removed_keywords
from wellposed.roles import (
    ATTENTION,
    FEEDFORWARD,
    Roles,
    RoleWeight,
    Verb,
    advice,
    is_table,
    is_transposed,
)

logger = logging.getLogger(__name__)

Group: TypeAlias = dict[str, Any]
_METHOD = "method"
_TRANSPOSED = "transposed"
_HIDDEN = frozenset((*ATTENTION, *FEEDFORWARD, "latent"))
_GROUPS = Verb.by_name("parameter_groups", "model, weight_decay")
_MUON = Verb.by_name("MuonAndAdamW", "model", "muon")
_NORM = re.compile(r"Norm(\d+d)?$")


@removed_keywords(roles="where")
@checked_arguments
def parameter_groups(
    model: nn.Module,
    weight_decay: Strength,
    *,
    where: Where | None = None,
    batch: Any = None,
) -> list[dict[str, object]]:
    """Split the trainable parameters in two: free matrices with ``weight_decay``, all else without.

    Status: exact; every trainable parameter is in one group. Without decay are vectors, scalars,
    all parameters of norms, biases of any shape, raw parameters from which
    ``torch.nn.utils.parametrize``, ``weight_norm`` or ``spectral_norm`` computes a weight, and the
    weights that ``where`` chooses for `constrain_`, which sets their size. A fused weight with a
    constrained part has no decay at all.

    Args:
        model: any module.
        weight_decay: of the free matrices, at least 0.
        where: as in `constrain_`; None if nothing is to be constrained.
        batch: as in `constrain_`.

    Returns:
        One or two groups, ``{"params": [...], "weight_decay": ...}``, for any optimizer of torch.

    Raises:
        ConfigError: a negative ``weight_decay``, no trainable parameter, or
            FullyShardedDataParallel.
        RoleNotFoundError: a name or role matches nothing.

    Cost: a walk over the modules. When not to use: if other matrices, such as embeddings, must not
    decay either; write the groups by hand.

    >>> model = torch.nn.TransformerEncoderLayer(8, 2, 16)
    >>> groups = parameter_groups(model, 0.1, where=("query", "key"))
    >>> [(len(group["params"]), group["weight_decay"]) for group in groups]
    [(3, 0.1), (9, 0.0)]
    """
    model = unwrap_model(model, "parameter_groups")
    constrained = chosen_parameters(_GROUPS, model, where, batch=batch)
    groups = decay_groups(model, weight_decay, constrained=constrained)
    if not groups:
        name = type(model).__name__
        raise ConfigError(f"parameter_groups: {name} has no parameter that trains; unfreeze some")
    return groups


def decay_groups(
    model: nn.Module, weight_decay: float, *, constrained: Iterable[nn.Parameter] = ()
) -> list[Group]:
    """Return the groups of `parameter_groups`, given the ``constrained`` parameters."""
    undecayed = set(map(id, constrained))
    for path, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if "FullyShardedDataParallel" in kinds:
            raise ConfigError(
                f"parameter groups: {path or 'the model'} is a FullyShardedDataParallel, whose flat"
                " parameters mix matrices and biases; shard with"
                " torch.distributed.fsdp.fully_shard"
            )
        norm = any(map(_NORM.search, kinds))
        undecayed |= _raw_parameters(module)
        named = module._parameters.items()
        undecayed |= {id(weight) for name, weight in named if norm or name.endswith("bias")}

    split: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        if parameter.requires_grad:
            split[parameter.ndim >= 2 and id(parameter) not in undecayed].append(parameter)
    decays = {True: weight_decay, False: 0.0}
    return [{"params": part, "weight_decay": decays[free]} for free, part in split.items() if part]


def _raw_parameters(module: nn.Module) -> set[int]:
    """Return the ids of parameters from which a weight is computed, so that decay does not shrink it.

    A normalised weight does not depend on the length of its raw parameter, so decay would only
    lengthen its steps; an orthogonal one reads signs and rotations there, which decay destroys. The
    scale of ``weight_norm`` is left out as those of norms are. A pruned weight does shrink with its
    raw parameter, so it decays.
    """
    if isinstance(module, ParametrizationList):
        raw = (p for name, p in module._parameters.items() if name.startswith("original"))
        return set(map(id, raw))
    names: list[str] = []
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            names += [f"{hook.name}_g", f"{hook.name}_v"]
        elif isinstance(hook, SpectralNorm):
            names.append(f"{hook.name}_orig")
    return {id(module._parameters.get(name)) for name in names}


def chosen_parameters(
    verb: Verb,
    model: nn.Module,
    where: Where | None,
    *,
    batch: Any = None,
) -> list[nn.Parameter]:
    """Return what `constrain_` would choose; nothing without ``where``."""
    if where is None:
        return []
    slices = select_weights(model, where, batch=batch, verb=verb, parameters_only=True)
    return [part.parameter for part in slices if part.parameter is not None]


class MuonAndAdamW(Optimizer):
    """Muon on hidden matrices, AdamW on all other parameters, as one optimizer.

    Status: empirical; the two are `torch.optim.Muon` and `torch.optim.AdamW`, bit for bit. Muon
    takes the trainable weights of attention and feed-forward networks that `find_roles` finds, each
    as the matrix that its layer applies: GPT-2's ``Conv1D`` transposed, each expert separately. A
    fused projection is one matrix. All else goes to AdamW: tables and weights tied to them, heads,
    poolers, classifiers, routers, adapters, computed matrices. A resumed run continues bit for bit.
    Source: Jordan et al. 2024 (Muon); Loshchilov and Hutter 2019.

    Args:
        model: Any module; its trainable parameters are taken.
        lr: Rate of the matrices.
        adamw_lr: Rate of the rest.
        momentum: Of Muon.
        betas: Of AdamW.
        eps: Of AdamW.
        weight_decay: Of matrices and embeddings; biases, norms and constrained weights have none.
        adjust_lr_fn: How Muon scales its step with the shape (out, in): ``"original"``, or
            ``"match_rms_adamw"`` for rates that fit AdamW.
        where: Weights for `constrain_`, which therefore have no decay.
        muon: The matrices for Muon, in place of those by role; as ``where`` of `constrain_`.
        batch: Input for `find_roles`.

    Raises:
        ConfigError: no matrix for Muon, no matrix in ``muon``, or roles that contradict names.
        RoleNotFoundError: a name or role matches nothing.

    Cost: 15 products with the smaller Gram matrix, in bfloat16, for each matrix and step;
    `find_roles` once. When not to use: to fine-tune weights that AdamW trained, or for sharded
    weights, which each step gathers.

    >>> optimizer = MuonAndAdamW(torch.nn.TransformerEncoderLayer(8, 2, 16))
    >>> [(group["method"], len(group["params"])) for group in optimizer.param_groups]
    [('muon', 4), ('adamw', 8)]
    """

    @removed_keywords(roles="where")
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
        muon: Where | None = None,
        batch: Any = None,
    ) -> None:
        model = unwrap_model(model, "MuonAndAdamW")
        constrained = chosen_parameters(_MUON, model, where, batch=batch)
        groups = decay_groups(model, weight_decay, constrained=constrained)
        stored = _hidden_matrices(model, muon, batch)
        hidden = [
            {**group, _TRANSPOSED: transposed}
            for transposed in (False, True)
            for group in _part(groups, lambda p, t=transposed: stored.get(id(p)) is t)
        ]
        rest = _part(groups, lambda parameter: id(parameter) not in stored)
        if not hidden:
            raise _nothing_for_muon(model, batch)

        self._parts: dict[str, Optimizer] = {
            "muon": _MuonOfMatrices(hidden, lr=lr, momentum=momentum, adjust_lr_fn=adjust_lr_fn)
        }
        if rest:
            self._parts["adamw"] = torch.optim.AdamW(rest, lr=adamw_lr, betas=betas, eps=eps)
        pairs = [(name, group) for name, part in self._parts.items() for group in part.param_groups]
        super().__init__([{**group, _METHOD: name} for name, group in pairs], {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group that names its ``method``; missing options are those of that method."""
        name = param_group.get(_METHOD)
        if name not in self._parts:
            expected = "a group names its method, 'muon' (matrices alone) or 'adamw'"
            raise ConfigError(f"MuonAndAdamW: {expected}; received {_METHOD}={name!r}")
        if name == "muon":
            params = param_group["params"]
            params = [params] if torch.is_tensor(params) else list(params)
            _check_matrices(("", parameter) for parameter in params)
        super().add_param_group({**self._parts[name].defaults, **param_group})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Take one step of both; ``closure`` runs once, before them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for name, part in self._parts.items():
            # Loading a state replaces these objects.
            part.param_groups = [group for group in self.param_groups if group[_METHOD] == name]
            part.state = self.state
            part.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, but keep how each weight of this model is stored."""
        stored = [group.get(_TRANSPOSED, False) for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, transposed in zip(self.param_groups, stored, strict=True):
            group[_TRANSPOSED] = transposed

    def __getstate__(self) -> dict[str, Any]:
        """Give a copy its two optimizers as well."""
        return {**super().__getstate__(), "_parts": self._parts}


def _part(groups: list[Group], belongs: Callable[[nn.Parameter], bool]) -> list[Group]:
    chosen = [{**group, "params": list(filter(belongs, group["params"]))} for group in groups]
    return [group for group in chosen if group["params"]]


class _MuonOfMatrices(torch.optim.Muon):
    """`torch.optim.Muon` on views: matrices as layers apply them, and each entry of a stack."""

    def __init__(self, groups: Iterable[Group], **options: Any) -> None:
        checked = [
            {**group, "params": [torch.empty(0, 0) for _ in group["params"]]} for group in groups
        ]
        super().__init__(checked, **options)
        for group, original in zip(self.param_groups, groups, strict=True):
            group["params"] = original["params"]

    def _init_group(self, group: Group, *lists: list[Tensor]) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        has_complex = super()._init_group(group, *lists)  # pyright: ignore[reportArgumentType]
        for tensors in lists:  # parameters, gradients, momenta
            views = [view for tensor in tensors for view in _matrices(tensor)]
            tensors[:] = [view.mT for view in views] if group.get(_TRANSPOSED) else views
        return has_complex


def _matrices(tensor: Tensor) -> list[Tensor]:
    """Return views of a matrix, or of the matrices of a stack on this process."""
    if tensor.ndim == 2:
        return [tensor]
    if is_sharded(tensor):
        if not all(p.is_replicate() or p.is_shard(0) for p in tensor.placements):
            raise ConfigError(
                f"MuonAndAdamW: a stack of matrices {tuple(tensor.shape)} is cut along"
                f" {tensor.placements}; shard it along axis 0, or leave it to AdamW with muon="
            )
        tensor = tensor.to_local()
    return [tensor[entry] for entry in range(len(tensor))]


def _check_matrices(named: Iterable[tuple[str, Tensor]]) -> None:
    flat = [f"{k} {tuple(v.shape)}".strip() for k, v in named if v.ndim not in (2, 3)]
    if flat:
        what = "Muon steps matrices and stacks of them; received"
        raise ConfigError(f"MuonAndAdamW: {what} {shortened(flat)}; step these by AdamW")


def _nothing_for_muon(model: nn.Module, batch: Any) -> ConfigError:
    choice = advice(_MUON, model, ran=batch is not None)
    return ConfigError(
        f"MuonAndAdamW: in {type(model).__name__} no trainable matrix of attention or feed-forward is"
        f" recognised; take muon=torch.nn.Linear for all linear layers, or torch.optim.AdamW.\n{choice}"
    )


def _hidden_matrices(model: nn.Module, muon: Where | None, batch: Any) -> dict[int, bool]:
    """Return the id of each parameter for Muon, and whether it is stored (in, out)."""
    located: list[RoleWeight] = []
    model_roles = roles_or_error(_MUON, model, batch)
    if isinstance(model_roles, Roles):
        located += model_roles.weights()
        if model_roles.notes and muon is None:
            notes = "; ".join(model_roles.notes)
            logger.warning("MuonAndAdamW: %s; or name matrices with muon=", notes)
    elif muon is None and not isinstance(model_roles, RoleNotFoundError):
        problem = f"{model_roles}\nor name the matrices with muon="
        raise ConfigError(problem) from model_roles

    views = [weight.view for weight in located if weight.role in _HIDDEN]
    by_role = {id(view.parameter): view.transposed for view in views}
    if muon is not None:
        chosen = select_weights(
            model, muon, model_roles=model_roles, verb=_MUON, parameters_only=True
        )
        named = [
            (weight_slice.label, weight_slice.parameter, weight_slice.module)
            for weight_slice in chosen
        ]
        stored = [(label, p, part) for label, p, part in named if p is not None]
        _check_matrices((label, p) for label, p, _ in stored)
        if len(stored) < len(named):
            logger.warning(
                "MuonAndAdamW: AdamW steps the parameters of these matrices, which their layers compute"
                " (a parametrisation or a hook): %s",
                shortened([label for label, p, _ in named if p is None]),
            )
        return {id(p): by_role.get(id(p), is_transposed(part)) for _, p, part in stored}

    tables = {id(getattr(part, "weight", None)) for part in model.modules() if is_table(part)}
    tables |= {
        id(weight.view.parameter) for weight in located if weight.role.endswith("_embedding")
    }
    return {key: transposed for key, transposed in by_role.items() if key not in tables}
