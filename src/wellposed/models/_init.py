"""Initial weights by name, and how a classifier pools tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.nn import L2SelfAttention
from wellposed.registry import Registry


@dataclass(frozen=True)
class Initializer:
    """How a fresh model gets its weights; weights loaded from a checkpoint are never changed.

    Use only functions of `torch.nn.init`: during loading they leave loaded weights unchanged.
    """

    module: Callable[[nn.Module, Any], None]
    """`module(module, config)`, called on each submodule, children first."""
    model: Callable[[nn.Module], None] | None = None
    """`model(model)`, called once on a fresh model after all its modules; never during loading."""


INITS = Registry[Initializer]("init", entry_points="wellposed.inits")
"""Initialisations by the name in `config.init`."""


def xavier_(module: nn.Module, config: Any) -> None:
    """Set linear weights to U(-b, b), b^2 = 6 / (fan_in + fan_out), biases 0, embeddings to N(0,
    1/D).

    Exact in distribution. Glorot and Bengio (2010), eq. 16, on each of the four attention
    projections. Embeddings have standard deviation D^-1/2 (Vaswani et al. 2017 and its public
    code): a tied output layer then gives normalised states logits of variance about one. Other
    modules get their defaults.

    >>> layer = nn.Linear(4, 2)
    >>> xavier_(layer, config=None)
    >>> bool(layer.weight.abs().max() <= 1.0), layer.bias.tolist()
    (True, [0.0, 0.0])
    """
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=1.0 / math.sqrt(config.hidden_size))
    else:
        reset_(module)


def reset_(module: nn.Module) -> None:
    """Reset a module that has parameters or buffers outside its children to its defaults."""
    state = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    reset = getattr(module, "reset_parameters", None)
    if state and callable(reset):
        reset()


INITS.register("xavier")(Initializer(module=xavier_))


def t_fixup_model_(model: Any) -> None:
    """Draw T-Fixup's weights on a model without norms (Huang et al. 2020); see
    `wellposed.t_fixup_`.

    Norms of queries and keys stay, as they are not in the residual sum; others are a `ConfigError`.
    """
    from wellposed.initialize import t_fixup_

    norms = ("*.q_norm", "*.k_norm") if model.config.qk_norm else ()
    # Queries and keys are Xavier already; drawing them again would change all later random numbers.
    t_fixup_(model, remove_norms=False, exclude=("query", "key", *norms))


INITS.register("t_fixup")(Initializer(module=xavier_, model=t_fixup_model_))


def mimetic_model_(model: Any) -> None:
    """Draw self-attention near multiples of the identity; see `wellposed.initialize.mimetic_`."""
    from wellposed.initialize import mimetic_

    mimetic_(model)


INITS.register("mimetic")(Initializer(module=xavier_, model=mimetic_model_))


_KIM2021_SCALE = 2.0**-4


def kim2021_model_(model: Any) -> None:
    """Set every weight of L2 attention to U(-s, s) / sqrt(D), s = `config.l2_init_scale` or 2^-4.

    Exact in distribution; other weights are unchanged. Kim, Papamakarios, Mnih (2021), appendix I,
    who tune s and take 2^-4 at D = 512.
    """
    scale = model.config.l2_init_scale or _KIM2021_SCALE
    for module in model.modules():
        if isinstance(module, L2SelfAttention):
            module.init_scale = scale
            module.reset_parameters()


INITS.register("kim2021")(Initializer(module=xavier_, model=kim2021_model_))


POOLINGS = Registry[Callable[[Tensor, Tensor | None], Tensor]]("pooling")
"""`pool(hidden, key_padding_mask)`: (batch, tokens, width) to (batch, width); True = padding."""


@POOLINGS.register("mean")
def mean_pool(hidden: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Return `1/n sum_i x_i` over the n real tokens; 0 for a row without any.

    >>> mean_pool(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([[False, False, True]]))
    tensor([[2.]])
    """
    if key_padding_mask is None:
        return hidden.mean(dim=1)
    count = (~key_padding_mask).sum(dim=1, keepdim=True).clamp(min=1)
    return hidden.masked_fill(key_padding_mask[..., None], 0.0).sum(dim=1) / count


@POOLINGS.register("first")
def first_pool(hidden: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Return the vector of the first real token; 0 for a row without any."""
    if key_padding_mask is None:
        return hidden[:, 0]
    index = (~key_padding_mask).int().argmax(dim=1)
    first = hidden[torch.arange(hidden.shape[0], device=hidden.device), index]
    return first.masked_fill(key_padding_mask.all(dim=1, keepdim=True), 0.0)


@POOLINGS.register("max")
def max_pool(hidden: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Return the largest value of each coordinate over the real tokens; 0 for a row without any."""
    if key_padding_mask is None:
        return hidden.amax(dim=1)
    largest = hidden.masked_fill(key_padding_mask[..., None], float("-inf")).amax(dim=1)
    return largest.masked_fill(key_padding_mask.all(dim=1, keepdim=True), 0.0)
