"""Transformer blocks, and where their norms stand, assembled from the registries."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from wellposed.errors import NotLipschitzError
from wellposed.model_options import DynamicTanhOptions
from wellposed.nn._registry import (
    ATTENTIONS,
    CROSS_ATTENTIONS,
    FEEDFORWARDS,
    NORMS,
    RESIDUALS,
    LayerCache,
    MemoryCache,
)
from wellposed.nn.attention import AttentionMask, PaddingMask, l2_attention_refusal

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


class RemovedNorm(nn.Identity):
    """`x -> x`, in the place of a LayerNorm.

    `torch.nn.TransformerEncoderLayer` compares ``norm1.eps`` with ``norm2.eps`` before it takes its
    fused path, which would read the weights of both: not a number differs from itself, so that path
    is never taken.

    >>> RemovedNorm()(torch.ones(2)).tolist()
    [1.0, 1.0]
    """

    eps = float("nan")


class DynamicTanh(nn.Module):
    """`x -> gamma * tanh(alpha x) + beta` in the place of `PreNorm`: `x -> r(x, f(DyT(x)))`, and one
    at the end of the stack.

    Exact. Zhu et al. (2025), "Transformers without Normalization", eq. 1: alpha is one number,
    gamma, 1 at the start, and beta, 0, have one entry for each feature. It acts on each entry by
    itself and its slope is at most `max |gamma| |alpha|`, so that it can be certified. Alpha has
    shape (1,), since sharding refuses parameters without a dimension.

    Args:
        width: number of features.
        alpha: at the start; the paper takes 0.5, and for wide language models less.

    >>> DynamicTanh(2)(torch.tensor([0.0, 100.0])).tolist()
    [0.0, 1.0]
    """

    final_norm = True

    def __init__(self, width: int, alpha: float = 0.5) -> None:
        super().__init__()
        self.start = alpha
        self.alpha = nn.Parameter(torch.empty(1))
        self.weight, self.bias = (nn.Parameter(torch.empty(width)) for _ in range(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set alpha to what it starts from, gamma to 1 and beta to 0."""
        nn.init.constant_(self.alpha, self.start)
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * torch.tanh(self.alpha * x) + self.bias

    def around(self, x: Tensor, branch: Branch, join: Join) -> Tensor:
        """Return `join(x, branch(DyT(x)))`, same shape as `x`."""
        return join(x, branch(self(x)))


NORMS.register("pre")(lambda config: PreNorm(config.hidden_size, eps=config.layer_norm_eps))
NORMS.register("post")(lambda config: PostNorm(config.hidden_size, eps=config.layer_norm_eps))
NORMS.register("none")(lambda _: NoNorm())
NORMS.register("dyt")(
    lambda config: DynamicTanh(config.hidden_size, DynamicTanhOptions.of(config).dyt_alpha)
)


def cross_attention_name(attention: str, given: str | None = None) -> str:
    """Return the registered cross-attention that stands beside a self-attention.

    ``given`` where there is one; else the self-attention's own name where a cross-attention has it;
    cosine beside the L2 attentions, which have no Lipschitz cross form; else dot_product.

    Raises:
        NotLipschitzError: ``given`` is an L2 attention.
        ConfigError: ``given`` is not registered.

    >>> cross_attention_name("dot_product"), cross_attention_name("l2_tied")
    ('dot_product', 'cosine')
    """
    if given is not None and given.startswith("l2"):
        raise NotLipschitzError(
            f"cross_attention: received {given!r}: L2 attention to another sequence has no"
            f" Lipschitz constant: {l2_attention_refusal(other_sequence_only=True)}; give"
            " cross_attention='cosine', or leave it out: with an L2 attention, self-attentions are"
            " L2 and cross-attentions cosine"
        )
    if given is not None:
        CROSS_ATTENTIONS.get(given)
        return given
    if attention in CROSS_ATTENTIONS:
        return attention
    return "cosine" if attention.startswith("l2") else "dot_product"


class Block(nn.Module):
    """`x -> P(x, A)` then `x -> P(x, F)`: attention A and feed-forward F, inside a norm placement P
    and a residual.

    With norm placement `post`, `P(x, f) = LN(r(x, f(x)))`; with `pre`, `r(x, f(LN(x)))`; with
    `none`, `r(x, f(x))`. The four parts come from the registries by the names in `config`, so that
    a new part is never a branch in this class.

    Args:
        config: any object with `attention`, `feedforward`, `residual`, `norm` (registered names),
            `dropout` (on both branches) and the attributes that the named parts read.

    Raises:
        ConfigError: a name is not registered.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(
    ...     hidden_size=8, num_attention_heads=2, intermediate_size=16, activation="gelu", attention="dot_product",
    ...     feedforward="mlp", residual="plain", norm="pre", qk_norm=False, dropout=0.0, attention_dropout=0.0,
    ...     layer_norm_eps=1e-5,
    ... )
    >>> Block(config)(torch.randn(3, 5, 8), is_causal=True).shape
    torch.Size([3, 5, 8])
    """

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.attention = ATTENTIONS.get(config.attention)(config)
        self.attention_norm = NORMS.get(config.norm)(config)
        self.attention_residual = RESIDUALS.get(config.residual)(config)
        self.feedforward = FEEDFORWARDS.get(config.feedforward)(config)
        self.feedforward_norm = NORMS.get(config.norm)(config)
        self.feedforward_residual = RESIDUALS.get(config.residual)(config)
        self.dropout = nn.Dropout(config.dropout)
        # The names under which Hugging Face switches gradient checkpointing on.
        self.gradient_checkpointing = False
        recompute: Callable[..., Tensor] = partial(checkpoint, use_reentrant=False)
        self._gradient_checkpointing_func = recompute

    def forward(
        self,
        x: Tensor,
        *,
        key_padding_mask: PaddingMask = None,
        is_causal: bool = False,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Map (batch, tokens, width) to the same shape; the keywords are those of every
        attention."""
        seen = {"key_padding_mask": key_padding_mask, "is_causal": is_causal}
        return self.part("feedforward", self.part("attention", x, **seen, cache=cache))

    def part(self, name: str, x: Tensor, *inputs: Tensor, **reading: Any) -> Tensor:
        """Return `P(x, f)` for the part of this name, called with all the rest."""

        def branch(hidden: Tensor) -> Tensor:
            return self.dropout(getattr(self, name)(hidden, *inputs, **reading))

        return getattr(self, f"{name}_norm").around(x, branch, getattr(self, f"{name}_residual"))


def build_layers(
    config: Any, block: Callable[[Any], Block], count: int
) -> tuple[nn.ModuleList, nn.Module]:
    """Return ``count`` blocks, and the norm behind the last: `x -> x` where the norm placement asks
    for none."""
    layers = [block(config) for _ in range(count)]
    needs_norm = bool(layers) and layers[-1].feedforward_norm.final_norm
    if needs_norm and isinstance(layers[-1].feedforward_norm, DynamicTanh):
        norm = cast(nn.Module, NORMS.get(config.norm)(config))
    elif needs_norm:
        norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
    else:
        norm = nn.Identity()
    return nn.ModuleList(layers), norm


def run_block(
    layer: Block,
    *inputs: Tensor,
    mask: AttentionMask,
    is_causal: bool,
    cache: LayerCache | None = None,
    **reading: Any,
) -> Tensor:
    """Return the block's output, recomputed in the backward pass where the block is set to gradient
    checkpointing.

    ``inputs`` is `x`, and in a decoder the memory; ``reading`` is what a decoder's block takes
    besides.
    """
    call = partial(layer, key_padding_mask=mask, is_causal=is_causal, cache=cache, **reading)
    if layer.gradient_checkpointing and layer.training and torch.is_grad_enabled():
        return layer._gradient_checkpointing_func(call, *inputs)
    return call(*inputs)


class DecoderBlock(Block):
    """`x -> P(x, A)`, then `x -> P(x, C(., y))`, then `x -> P(x, F)`: a `Block` that reads a memory
    y in between.

    Exact. Vaswani et al. (2017), sec. 3.1. Norm placement P and residual as in `Block`; each of the
    three branches has its own.

    Args:
        config: see `Block`; and, where present, `cross_attention`, a name in `CROSS_ATTENTIONS`.

    Raises:
        ConfigError: a name is not registered.
        NotLipschitzError: an L2 attention is asked for as cross-attention.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(
    ...     hidden_size=8, num_attention_heads=2, intermediate_size=16, activation="gelu", attention="dot_product",
    ...     feedforward="mlp", residual="plain", norm="pre", qk_norm=False, dropout=0.0, attention_dropout=0.0,
    ...     layer_norm_eps=1e-5,
    ... )
    >>> DecoderBlock(config)(torch.randn(3, 5, 8), torch.randn(3, 9, 8), is_causal=True).shape
    torch.Size([3, 5, 8])
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        name = cross_attention_name(config.attention, getattr(config, "cross_attention", None))
        self.cross_attention = CROSS_ATTENTIONS.get(name)(config)
        self.cross_attention_norm = NORMS.get(config.norm)(config)
        self.cross_attention_residual = RESIDUALS.get(config.residual)(config)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        x: Tensor,
        memory: Tensor,
        *,
        key_padding_mask: PaddingMask = None,
        is_causal: bool = False,
        cache: LayerCache | None = None,
        memory_mask: PaddingMask = None,
        memory_cache: MemoryCache | None = None,
    ) -> Tensor:
        """Map (batch, tokens, width) and a memory (batch, memory tokens, width) to (batch, tokens,
        width).

        The first three keywords are those of every attention, the last two those of every
        cross-attention.
        """
        seen = {"key_padding_mask": key_padding_mask, "is_causal": is_causal}
        x = self.part("attention", x, **seen, cache=cache)
        of_memory = {"key_padding_mask": memory_mask, "cache": memory_cache}
        return self.part("feedforward", self.part("cross_attention", x, memory, **of_memory))
