"""The square weight without bias of which TransJect is made."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wellposed.nn.sizes import check_sizes

ORTHOGONAL_WEIGHTS: tuple[str, ...] = ("*.left", "*.right", "*.up_proj", "*.down_proj", "*.basis")
"""Patterns of every weight of a TransJect model that `constrain_` is to hold; see
`orthogonal_patterns`."""


class OrthogonalLinear(nn.Linear):
    """`x -> x W^T` with square `W`, `W^T W = I` at the start: distances between tokens are kept.

    To tolerance at the start (QR of a Gaussian matrix: Haar measure; Mezzadri 2007). The weight is
    a plain parameter: `wellposed.constrain_(model, optimizer, where=OrthogonalLinear)` holds it
    there in training, and without that it drifts. In half precision it is drawn in float32 and then
    rounded: `W^T W = I` to the half type's rounding.

    Args:
        embed_dim: width d.

    Raises:
        ConfigError: `embed_dim` is no integer of at least 1.

    Cost: N d^2 multiply-adds for N tokens; d^3 at construction.

    >>> layer = OrthogonalLinear(8)
    >>> bool((layer.weight @ layer.weight.T - torch.eye(8)).abs().max() < 1e-5), layer.norm_bound() < 1.001
    (True, True)
    """

    def __init__(self, embed_dim: int) -> None:
        check_sizes("OrthogonalLinear", embed_dim=embed_dim)
        super().__init__(embed_dim, embed_dim, bias=False)

    def reset_parameters(self) -> None:
        """Draw the weight anew."""
        if self.weight.is_meta:
            return
        wide = torch.promote_types(self.weight.dtype, torch.float32)
        if self.weight.dtype is wide:
            nn.init.orthogonal_(self.weight)
            return
        # There is no QR of halves.
        with torch.no_grad():
            self.weight.copy_(nn.init.orthogonal_(torch.empty_like(self.weight, dtype=wide)))

    @torch.no_grad()
    def norm_bound(self) -> float:
        """Return `sqrt(1 + |W^T W - I|_F) >= |W|_2`, in float64: tight where W is nearly
        orthogonal."""
        weight = self.weight.detach().double()
        defect = weight.mT @ weight
        defect.diagonal().sub_(1.0)
        return float((1.0 + torch.linalg.matrix_norm(defect)).sqrt())


def orthogonal_patterns(module: nn.Module) -> tuple[str, ...]:
    """Return those of `ORTHOGONAL_WEIGHTS` that match a weight of `module`: each pattern of
    `constrain_` must match.

    >>> orthogonal_patterns(nn.ModuleDict({"left": OrthogonalLinear(2), "right": nn.Linear(2, 2)}))
    ('*.left',)
    """
    names = {
        path.rpartition(".")[2]
        for path, part in module.named_modules()
        if isinstance(part, OrthogonalLinear)
    }
    return tuple(pattern for pattern in ORTHOGONAL_WEIGHTS if pattern.removeprefix("*.") in names)


def transposed_weight(layer: nn.Linear) -> Tensor:
    """Return U with `layer(x) = x U`."""
    return layer.weight.mT
