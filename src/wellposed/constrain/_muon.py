"""Matrices by Muon, everything else by AdamW, as one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from wellposed.constrain._groups import chosen_parameters, decay_groups
from wellposed.constrain._select import Where, unwrap_model
from wellposed.errors import ConfigError

_METHOD = "method"


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
        kept |= {
            id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)
        }
        groups = decay_groups(model, weight_decay, constrained=held)
        hidden = _part(groups, lambda parameter: parameter.ndim == 2 and id(parameter) not in kept)
        rest = _part(groups, lambda parameter: parameter.ndim != 2 or id(parameter) in kept)
        if not hidden:
            raise ConfigError(
                f"MuonAndAdamW: {type(model).__name__} has no trainable matrix beside embeddings"
                f" and adamw={adamw!r}; use torch.optim.AdamW"
            )
        self._parts: dict[str, Optimizer] = {
            "muon": torch.optim.Muon(hidden, lr=lr, momentum=momentum, adjust_lr_fn=adjust_lr_fn)
        }
        if rest:
            self._parts["adamw"] = torch.optim.AdamW(rest, lr=adamw_lr, betas=betas, eps=eps)
        super().__init__(
            [
                {**group, _METHOD: name}
                for name, part in self._parts.items()
                for group in part.param_groups
            ],
            {},
        )

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


def _part(
    groups: list[dict[str, Any]], belongs: Callable[[nn.Parameter], bool]
) -> list[dict[str, Any]]:
    chosen = [
        {**group, "params": [entry for entry in group["params"] if belongs(entry)]}
        for group in groups
    ]
    return [group for group in chosen if group["params"]]
