"""An error function in place of LayerNorm."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from wellposed.model_options import DynamicErfOptions
from wellposed.nn._block import DynamicTanh
from wellposed.nn._registry import NORMS
from wellposed.options import Size


class DynamicErf(DynamicTanh):
    """`Derf(x) = gamma * erf(alpha x + s) + beta` in place of `PreNorm`: `x -> r(x, f(Derf(x)))`.

    Exact. Chen et al. (2025, arXiv 2512.10938), "Stronger Normalization-Free Transformers". As
    `DynamicTanh`, with one more number: the shift `s`, 0 at the start. The slope is at most `2 /
    sqrt(pi) max |gamma| |alpha|`, so it can be certified. The stack ends in another one.
    Cost: one erf an entry. When not to use: a pretrained model, whose LayerNorms compute otherwise.

    >>> DynamicErf(2)(torch.tensor([0.0, 100.0])).tolist()
    [0.0, 1.0]
    """

    def __init__(self, width: Size, alpha: float = 0.5) -> None:
        super().__init__(width, alpha)
        self.shift = nn.Parameter(torch.zeros(1))

    def reset_parameters(self) -> None:
        """Set alpha to its start value, gamma to 1, beta and s to 0."""
        super().reset_parameters()
        if "shift" in self._parameters:  # not while the base class is built
            nn.init.zeros_(self.shift)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * torch.erf(self.alpha * x + self.shift) + self.bias


NORMS.register("derf")(
    lambda config: DynamicErf(config.hidden_size, DynamicErfOptions.from_config(config).derf_alpha)
)
