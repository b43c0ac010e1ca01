"""Transformer blocks and the placement of their norms, assembled from the registries."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from wellposed.call_checks import known_keywords
from wellposed.errors import ConfigError, NotLipschitzError
from wellposed.model_options import DynamicTanhOptions
from wellposed.nn._checks import CheckedModule, check_unwritten, writes_to
from wellposed.nn._recompute import once
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
from wellposed.options import Positive, Size, fits

Branch = Callable[[Tensor], Tensor]
Join = Callable[[Tensor, Tensor], Tensor]


class _SizedNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm`, which refuses sizes that no token has."""

    @known_keywords
    def __init__(  # noqa: PLR0917 (as torch.nn.LayerNorm)
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        sizes = normalized_shape if isinstance(normalized_shape, (list, tuple)) else None
        if not all(fits(size, Size) for size in ([normalized_shape] if sizes is None else sizes)):
            raise ConfigError(
                f"{type(self).__name__}: normalized_shape = {normalized_shape!r}, expected an integer"
                " >= 1, or a list of them"
            )
        if not fits(eps, Positive):
            raise ConfigError(f"{type(self).__name__}: eps = {eps!r}, expected a number > 0")
        shape = cast(Any, normalized_shape)
        super().__init__(shape, eps, elementwise_affine, bias, device, dtype)


class PreNorm(_SizedNorm):
    """`x -> r(x, f(LN(x)))`; the stack ends in another LayerNorm.

    Exact. Xiong et al. (2020), "On Layer Normalization in the Transformer Architecture", table 1.

    >>> PreNorm(4).around(torch.zeros(2, 4), lambda x: x, torch.add).shape
    torch.Size([2, 4])
    """

    final_norm = True

    def around(self, x: Tensor, branch: Branch, join: Join) -> Tensor:
        """Return `join(x, branch(LN(x)))`, same shape as `x`."""
        return join(x, branch(self(x)))


class PostNorm(_SizedNorm):
    """`x -> LN(r(x, f(x)))`, the original Transformer.

    Exact. Vaswani et al. (2017), sec. 3.1.

    >>> PostNorm(4).around(torch.zeros(2, 4), lambda x: x, torch.add).shape
    torch.Size([2, 4])
    """

    final_norm = False

    def around(self, x: Tensor, branch: Branch, join: Join) -> Tensor:
        """Return `LN(join(x, branch(x)))`, same shape as `x`."""
        return self(join(x, branch(x)))


class NoNorm(nn.Module):
    """`x -> r(x, f(x))`, without any parameter.

    >>> NoNorm().around(torch.ones(2), lambda x: 2 * x, torch.add)
    tensor([3., 3.])
    """

    final_norm = False

    def around(self, x: Tensor, branch: Branch, join: Join) -> Tensor:
        """Return `join(x, branch(x))`, same shape as `x`."""
        return join(x, branch(x))


class RemovedNorm(nn.Identity):
    """`x -> x`, in place of a LayerNorm.

    `torch.nn.TransformerEncoderLayer` takes its fused path, which reads the weights of both norms,
    only if ``norm1.eps == norm2.eps``. NaN differs from itself, so that path is never taken.

    >>> RemovedNorm()(torch.ones(2)).tolist()
    [1.0, 1.0]
    """

    eps = float("nan")


class DynamicTanh(CheckedModule):
    """`DyT(x) = gamma * tanh(alpha x) + beta` in place of `PreNorm`: `x -> r(x, f(DyT(x)))`.

    Exact. Zhu et al. (2025), "Transformers without Normalization", eq. 1. Each of `width` features
    has its own `gamma`, 1 at the start, and `beta`, 0. One number `alpha` serves all; its shape is
    (1,) because sharding needs a dimension. The paper starts it at 0.5, and lower for wide language
    models. The slope is at most `max |gamma| |alpha|`, so it can be certified. The stack ends in
    another one.

    >>> DynamicTanh(2)(torch.tensor([0.0, 100.0])).tolist()
    [0.0, 1.0]
    """

    final_norm = True

    def __init__(self, width: Size, alpha: float = 0.5) -> None:
        super().__init__()
        self.start = alpha
        self.alpha = nn.Parameter(torch.empty(1))
        self.weight, self.bias = (nn.Parameter(torch.empty(width)) for _ in range(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set alpha to its start value, gamma to 1 and beta to 0."""
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
    lambda config: DynamicTanh(config.hidden_size, DynamicTanhOptions.from_config(config).dyt_alpha)
)


def cross_attention_name(attention: str, cross_attention: str | None = None) -> str:
    """Return the name of the registered cross-attention that goes with a self-attention.

    This is ``cross_attention`` if it is not None, else the self-attention's name if a cross-attention has it.
    Otherwise L2 attentions, which have no Lipschitz cross form, get cosine, and others dot_product.

    Raises:
        NotLipschitzError: ``cross_attention`` is an L2 attention.
        ConfigError: ``cross_attention`` is not registered.

    >>> cross_attention_name("dot_product"), cross_attention_name("l2_tied")
    ('dot_product', 'cosine')
    """
    if cross_attention is not None and cross_attention.startswith("l2"):
        raise NotLipschitzError(
            f"cross_attention: received {cross_attention!r}: L2 attention to another sequence has no"
            f" Lipschitz constant: {l2_attention_refusal(other_sequence_only=True)}; use"
            " cross_attention='cosine', or leave it out, which also gives cosine beside an L2"
            " self-attention"
        )
    if cross_attention is not None:
        CROSS_ATTENTIONS.get(cross_attention)
        return cross_attention
    if attention in CROSS_ATTENTIONS:
        return attention

    return "cosine" if attention.startswith("l2") else "dot_product"


class Block(nn.Module):
    """`x -> P(x, A)`, then `x -> P(x, F)`: attention A, feed-forward F, norm placement P.

    `P(x, f)` is `LN(r(x, f(x)))` with norm `post`, `r(x, f(LN(x)))` with `pre`, and `r(x, f(x))`
    with `none`; r is the residual. The registries supply all four parts, so a new part needs no
    change here.

    Args:
        config: Any object with `attention`, `feedforward`, `residual`, `norm` (registered names,
            else ConfigError), `dropout` (on both branches) and the attributes that the named parts
            read.

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
        # Hugging Face switches gradient checkpointing on by these names.
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
        """Map (batch, tokens, width) to the same shape; keywords as in `ATTENTIONS`."""
        masking = {"key_padding_mask": key_padding_mask, "is_causal": is_causal}
        return self.part("feedforward", self.part("attention", x, **masking, cache=cache))

    def part(self, name: str, x: Tensor, *inputs: Tensor, **reading: Any) -> Tensor:
        """Return `P(x, f)` for the part called `name`, which receives all other arguments.

        Raises `ConfigError` if f overwrites x, which the residual adds.
        """

        def branch(hidden: Tensor) -> Tensor:
            return self.dropout(getattr(self, name)(hidden, *inputs, **reading))

        norm = getattr(self, f"{name}_norm")
        residual = getattr(self, f"{name}_residual")
        writes = writes_to(x)
        joined = norm.around(x, branch, residual)
        check_unwritten(self, name, x, writes)
        return joined


def build_layers(
    config: Any, block: Callable[[Any], Block], count: int
) -> tuple[nn.ModuleList, nn.Module]:
    """Return ``count`` blocks and the norm after them (`x -> x` if the placement needs none)."""
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
    """Return the block's output, recomputed in backward with gradient checkpointing.

    ``inputs`` is `x`, in a decoder also the memory; ``reading`` has the decoder block's keywords.
    """
    call = partial(layer, key_padding_mask=mask, is_causal=is_causal, cache=cache, **reading)
    if layer.gradient_checkpointing and layer.training and torch.is_grad_enabled():
        return layer._gradient_checkpointing_func(once(layer, call), *inputs)
    return call(*inputs)


class DecoderBlock(Block):
    """`x -> P(x, A)`, `x -> P(x, C(., y))`, `x -> P(x, F)`: a `Block` that also reads a memory y.

    Exact. Vaswani et al. (2017), sec. 3.1. P is as in `Block`; each branch has its own residual.

    Args:
        config: See `Block`; optionally with `cross_attention`, a name in `CROSS_ATTENTIONS`.

    Raises:
        ConfigError: A name is not registered.
        NotLipschitzError: `cross_attention` is an L2 attention.

    >>> from types import SimpleNamespace
    >>> config = SimpleNamespace(
    ...     hidden_size=8, num_attention_heads=2, intermediate_size=16, attention="ball", feedforward="maxmin",
    ...     residual="plain", norm="none", qk_norm=False, dropout=0.0, attention_dropout=0.0,
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
        """Map `x` (batch, tokens, width) to the same shape, reading a memory (batch, keys, width).

        Keywords: the first three as in `ATTENTIONS`, the last two as in `CROSS_ATTENTIONS`.
        """
        masking = {"key_padding_mask": key_padding_mask, "is_causal": is_causal}
        x = self.part("attention", x, **masking, cache=cache)
        of_memory = {"key_padding_mask": memory_mask, "cache": memory_cache}
        return self.part("feedforward", self.part("cross_attention", x, memory, **of_memory))
