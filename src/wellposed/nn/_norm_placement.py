"""Where LayerNorm stands in a block: before the branch, after the sum, or nowhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from wellposed.nn._registry import NORMS

Branch = Callable[[Tensor], Tensor]
Join = Callable[[Tensor, Tensor], Tensor]


class PreNorm(nn.LayerNorm):
    """`x -> r(x, f(LN(x)))`; the stack ends in a LayerNorm of its own.

    Exact. Xiong et al. (2020), "On Layer Normalization in the Transformer Architecture", table 1,
    right.

    >>> import torch
    >>> PreNorm(4).around(torch.zeros(2, 4), lambda x: x, torch.add).shape
    torch.Size([2, 4])
    """

    final_norm = True

    def around(self, x: Tensor, branch: Branch, join: Join) -> Tensor:
        """Return `join(x, branch(LN(x)))`, same shape as `x`."""
        return join(x, branch(self(x)))


class PostNorm(nn.LayerNorm):
    """`x -> LN(r(x, f(x)))`, the original Transformer.

    Exact. Vaswani et al. (2017), sec. 3.1.

    >>> import torch
    >>> PostNorm(4).around(torch.zeros(2, 4), lambda x: x, torch.add).shape
    torch.Size([2, 4])
    """

    final_norm = False

    def around(self, x: Tensor, branch: Branch, join: Join) -> Tensor:
        """Return `LN(join(x, branch(x)))`, same shape as `x`."""
        return self(join(x, branch(x)))


class NoNorm(nn.Module):
    """`x -> r(x, f(x))`, without any parameter.

    >>> import torch
    >>> NoNorm().around(torch.ones(2), lambda x: 2 * x, torch.add)
    tensor([3., 3.])
    """

    final_norm = False

    def around(self, x: Tensor, branch: Branch, join: Join) -> Tensor:
        """Return `join(x, branch(x))`, same shape as `x`."""
        return join(x, branch(x))


@NORMS.register("pre")
def build_pre(config: Any) -> PreNorm:
    """Build the norm in front of a branch."""
    return PreNorm(config.hidden_size, eps=config.layer_norm_eps)


@NORMS.register("post")
def build_post(config: Any) -> PostNorm:
    """Build the norm behind a sum."""
    return PostNorm(config.hidden_size, eps=config.layer_norm_eps)


NORMS.register("none")(lambda _: NoNorm())
