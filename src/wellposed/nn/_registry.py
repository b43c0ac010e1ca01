"""The registries from which blocks are assembled: one registration adds a new layer.

A builder is called with the model's configuration, any object with the attributes listed at each
registry. `wellposed.model_options` declares the options that only some layers read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from wellposed.registry import Registry

LayerBuilder = Callable[[Any], nn.Module]
"""`build(config) -> module`; every layer of a stack is built alike."""

ATTENTIONS = Registry[LayerBuilder]("attention", entry_points="wellposed.attentions")
"""Self-attentions: `forward(x, *, key_padding_mask=None, is_causal=False, cache=None) -> Tensor`.

`x` and the result are (batch, tokens, width). `key_padding_mask` is bool (batch, keys), True =
padding, or a finished `AttentionMask`. With `is_causal`, a token does not see later ones.
`attention_mask` makes one mask of both. A padded token sees only itself, so no row is empty. The
`cache` is a `LayerCache`. Builders read `hidden_size`, `num_attention_heads`, `attention_dropout`,
`qk_norm` and `layer_norm_eps`.
"""

CROSS_ATTENTIONS = Registry[LayerBuilder]("cross-attention")
"""Attentions to a memory: `forward(x, memory, *, key_padding_mask=None, cache=None) -> Tensor`.

`x` is (batch, tokens, width), `memory` (batch, memory tokens, width). `memory_mask` makes the mask
from `key_padding_mask`. A builder reads the same attributes as for `ATTENTIONS`.
"""

FEEDFORWARDS = Registry[LayerBuilder]("feedforward")
"""Token-wise maps, `forward(x) -> Tensor`; read hidden_size, intermediate_size, activation."""

RESIDUALS = Registry[LayerBuilder]("residual")
"""Ways to join a branch to its input: `forward(x, branch) -> Tensor`."""

NORMS = Registry["Callable[[Any], NormPlacement]"]("norm")
"""Norm placements around `x -> residual(x, f(x))`; read hidden_size, layer_norm_eps."""


class NormPlacement(Protocol):
    """A module that puts a norm around `x -> join(x, branch(x))`."""

    final_norm: bool
    """Whether a stack of such blocks needs a LayerNorm after the last."""

    def around(
        self,
        x: Tensor,
        branch: Callable[[Tensor], Tensor],
        join: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Return the block's half, same shape as `x`."""
        ...


class LayerCache(Protocol):
    """Earlier keys and values of one attention layer, (batch, heads, tokens, head_dim) each."""

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store the new keys and values and return all of them, the earlier ones first."""
        ...


class MemoryCache(Protocol):
    """Keys and values of a memory, (batch, heads, memory tokens, head_dim) each, for one layer."""

    def once(self, project: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return what is stored; the first time, call `project` and store what it returns."""
        ...
