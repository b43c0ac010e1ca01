"""The square weight without bias of which TransJect is made."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wellposed.errors import ConfigError

ORTHOGONAL_WEIGHTS: tuple[str, ...] = ("*.left", "*.right", "*.up_proj", "*.down_proj", "*.basis")
"""Patterns of every weight of a TransJect model that `constrain_` is to hold; see `orthogonal_patterns`."""


class OrthogonalLinear(nn.Linear):
    """`x -> x W^T` with square `W`, `W^T W = I` at the start: distances between tokens are kept.

    To tolerance at the start (QR of a Gaussian matrix: Haar measure; Mezzadri 2007). The weight is a plain parameter:
    `wellposed.constrain_(model, optimizer, where=OrthogonalLinear)` holds it there in training, and without that it
    drifts.

    Args:
        embed_dim: width d.

    Raises:
        ConfigError: `embed_dim` is below 1.

    Cost: N d^2 multiply-adds for N tokens; d^3 at construction.

    >>> layer = OrthogonalLinear(8)
    >>> bool((layer.weight @ layer.weight.T - torch.eye(8)).abs().max() < 1e-5), layer.norm_bound() < 1.001
    (True, True)
    """

    def __init__(self, embed_dim: int) -> None:
        if embed_dim < 1:
            raise ConfigError(f"OrthogonalLinear: embed_dim is {embed_dim}; expected at least 1")
        super().__init__(embed_dim, embed_dim, bias=False)

    def reset_parameters(self) -> None:
        """Draw the weight anew."""
        if not self.weight.is_meta:
            nn.init.orthogonal_(self.weight)

    @torch.no_grad()
    def norm_bound(self) -> float:
        """Return `sqrt(1 + |W^T W - I|_F) >= |W|_2`, in float64: tight where W is nearly orthogonal."""
        weight = self.weight.detach().double()
        defect = weight.mT @ weight
        defect.diagonal().sub_(1.0)
        return float((1.0 + torch.linalg.matrix_norm(defect)).sqrt())


def orthogonal_patterns(module: nn.Module) -> tuple[str, ...]:
    """Return those of `ORTHOGONAL_WEIGHTS` that match a weight of `module`: each pattern of `constrain_` must match.

    >>> orthogonal_patterns(nn.ModuleDict({"left": OrthogonalLinear(2), "right": nn.Linear(2, 2)}))
    ('*.left',)
    """
    names = {path.rpartition(".")[2] for path, part in module.named_modules() if isinstance(part, OrthogonalLinear)}
    return tuple(pattern for pattern in ORTHOGONAL_WEIGHTS if pattern.removeprefix("*.") in names)


def is_plain(modules: list[nn.Module]) -> bool:
    """Whether calling these modules is nothing but their formula: no hook, no parametrisation, no adapter."""
    return (
        all(
            not (part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks)
            and "parametrizations" not in part._modules
            for part in modules
        )
        and not torch.nn.modules.module._has_any_global_hook()
    )


def transposed_weight(layer: nn.Linear) -> Tensor:
    """Return U with `layer(x) = x U`."""
    return layer.weight.mT
