"""L2 and cosine attention for models of Hugging Face, under names that ``attn_implementation``
takes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.errors import ConfigError, listed, missing_extra, unknown_name
from wellposed.functional import common_shift, l2_vectors, normalized_vectors
from wellposed.integrations._saved_attention import carry_attention

try:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
except ImportError as error:
    raise missing_extra("transformers", "hf", "attention implementations") from error

_EPS = 0.01
# What a model may ask of its attention beside masks, and these kernels cannot do; never to be
# ignored.
_UNSUPPORTED = {
    "softcap": "a cap on the logits",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "indices": "a choice of keys for each query",
    "block_indices": "a choice of keys for each query",
    "cache": "a paged cache (continuous batching)",
    "output_attentions": "attention weights, which are never made",
}


def register_attention() -> tuple[str, ...]:
    r"""Make ``attn_implementation="wellposed_l2"`` and ``"wellposed_cosine"`` known to
    transformers; ``import wellposed.integrations`` does it.

    Exact up to rounding. A model with such a name computes, for each head, with q, k, v its own
    projections (rotated by position where it does so), ``s`` the factor by which it scales dot
    products (mostly `1 / sqrt(head_dim)`, 1 in T5) and ``b`` its position bias, if any:

    - ``wellposed_l2``: `softmax_j(-s |q_i - k_j|^2 + b_ij) v_j`. Kim, Papamakarios, Mnih (2021),
      eq. 13. Lipschitz only under the conditions of theory notes B1 to B4: self-attention that sees
      itself, one weight for queries and keys, values that read the same subspace, no rotations of
      queries and keys.
    - ``wellposed_cosine``: `softmax_j(sqrt(head_dim) n(q_i) . n(k_j) + b_ij) n(v_j)`,
      `n(a) = a / sqrt(|a|^2 + 0.01)`. Qi et al. (2023), as `wellposed.nn.CosineSelfAttention`
      starts. Lipschitz in q, k and v for every mask (theory note B6; with a fixed b). ``s`` does
      not enter: lengths are taken out, and with them their scale.

    Masks (padding, causal, sliding window, 4d bool or additive), grouped heads, caches,
    ``generate`` and dropout are those of ``sdpa``, which is called on other vectors, so a compiled
    or penalised model stays one. Unlike other implementations the name is written into a saved
    ``config.json``, part by part, whoever saves: ``from_pretrained`` restores it, and refuses the
    name if `wellposed.integrations` is not imported. Saving warns of parts that the file cannot name, and of
    adapters.

    Returns:
        The two names. Calling it again changes nothing.

    Raises:
        ConfigError: transformers is not installed. In a forward pass: the model asks for attention
            weights, a cap on the logits, attention sinks or a paged cache; or, for L2, it scales
            its queries itself (OPT, Whisper).

    Cost: as `wellposed.functional.l2_attention` and `cosine_attention`, beside sdpa.
    When not to use: with pretrained weights and no training, which were learnt with another
    attention; with a family whose code has an attention of its own and ignores the name (XLNet,
    DeBERTa), which `set_attention_` refuses and ``from_pretrained`` does not.

    >>> register_attention()
    ('wellposed_l2', 'wellposed_cosine')
    """
    for name, forward in _FORWARD.items():
        AttentionInterface.register(name, forward)
        AttentionMaskInterface.register(name, AttentionMaskInterface()["sdpa"])
    carry_attention()
    return tuple(_FORWARD)


def set_attention_(model: nn.Module, name: str) -> None:
    """Give every attention of a model that is already built the implementation ``name``, or refuse.

    Exact, as `register_attention`, which it calls: ``model.set_attn_implementation(name)`` that
    raises where transformers only logs that it cannot.

    Args:
        model: a model of transformers, each part of which asks `transformers.AttentionInterface`
            for the function of (query, key, value) that ``config._attn_implementation`` names: the
            families whose ``attn_implementation`` may be ``"sdpa"``.
        name: ``"wellposed_l2"`` or ``"wellposed_cosine"``.

    Raises:
        ConfigError: another name, another kind of model, or a part whose code does not ask
            transformers for its attention. The model is as it was then.

    Cost: none. When not to use: where the name can be given to ``from_pretrained`` and the family
    is known to ask.

    >>> from transformers import BertConfig, BertModel
    >>> sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, vocab_size=9)
    >>> model = BertModel(BertConfig(**sizes))
    >>> set_attention_(model, "wellposed_cosine")
    >>> model.config._attn_implementation
    'wellposed_cosine'
    """
    if name not in register_attention():
        raise unknown_name("attention implementation", name, _FORWARD)
    if not isinstance(model, PreTrainedModel) or type(model).__module__.startswith("wellposed."):
        raise ConfigError(
            "set_attention_: needs a model of transformers whose attention asks"
            " transformers.AttentionInterface for the function that attn_implementation names;"
            f" received {type(model).__name__}; build wellposed's own with attention='l2' or"
            " 'cosine', and put wellposed.nn.L2SelfAttention into one of your own"
        )
    before = model.config._attn_implementation or "eager"
    # A part that has an attention of its own keeps whichever name it had, so one of two does not
    # stick.
    deaf = {part for tried in ("eager", name) for part in _parts_that_ignore(model, tried)}
    if deaf:
        model.set_attn_implementation(before)
        raise ConfigError(
            f"set_attention_: {name!r} would be ignored by these parts, whose code has an attention"
            " of its own and does not ask transformers.AttentionInterface; take a family that"
            " does, as all do whose attn_implementation may be 'sdpa':\n" + listed(sorted(deaf))
        )
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if not any(part._supports_sdpa or part._supports_attention_backend for part in parts):
        model.set_attn_implementation(before)
        raise ConfigError(
            f"set_attention_: {type(model).__name__} asks transformers for no attention, so"
            f" {name!r} would change nothing; leave its attention as it is"
        )


def _parts_that_ignore(model: PreTrainedModel, name: str) -> list[str]:
    """Name the attention of every part, and return the parts that did not take the name."""
    model.set_attn_implementation(name)
    return [
        f"{path}: {type(part).__name__}".lstrip(": ")
        for path, part in model.named_modules()
        if isinstance(part, PreTrainedModel) and part.config._attn_implementation != name
    ]


def _l2_forward(  # noqa: PLR0917
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    _check_options(module, kwargs)
    own: Any = getattr(module, "scaling", None)
    if own is not None and scaling is not None and (isinstance(own, Tensor) or own != scaling):
        raise ConfigError(
            f"{type(module).__name__}: it scales its queries itself (by its `scaling`, while"
            f" attention is told {scaling}), so |q - k| would compare vectors of two scales; use"
            " attn_implementation='wellposed_cosine', which does not depend on lengths"
        )
    scaling = 1 / math.sqrt(query.shape[-1]) if scaling is None else scaling
    value_dim = value.shape[-1]
    shift = common_shift(query, key, _unseen(attention_mask), first=True)
    wide_query, wide_key = l2_vectors(query, key, shift, value_dim=value_dim)
    wide_value = F.pad(value.to(wide_key.dtype), (0, wide_key.shape[-1] - value_dim))
    joined, _ = AttentionInterface()["sdpa"](
        module, wide_query, wide_key, wide_value, attention_mask, scaling=2 * scaling, **kwargs
    )
    return joined[..., :value_dim].contiguous(), None


def _cosine_forward(  # noqa: PLR0917
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,  # noqa: ARG001
    **kwargs: Any,
) -> tuple[Tensor, None]:
    _check_options(module, kwargs)
    query, key, value = (normalized_vectors(tokens, _EPS) for tokens in (query, key, value))
    sdpa, tau = AttentionInterface()["sdpa"], math.sqrt(query.shape[-1])
    return sdpa(module, query, key, value, attention_mask, scaling=tau, **kwargs)


_FORWARD = {"wellposed_l2": _l2_forward, "wellposed_cosine": _cosine_forward}


def _unseen(mask: Tensor | None) -> Tensor | None:
    """Return (batch, 1, keys), True where no query of any head sees the key; None where the mask
    does not say."""
    if mask is None or mask.dim() != 4:
        return None
    allowed = mask if mask.dtype is torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return ~allowed.any(-2).any(-2, keepdim=True)


def _check_options(module: nn.Module, options: dict[str, Any]) -> None:
    given = {name for name, value in options.items() if value is not None and value is not False}
    asked = [f"{name}: {what}" for name, what in _UNSUPPORTED.items() if name in given]
    if asked:
        raise ConfigError(
            f"{type(module).__name__}: L2 and cosine attention cannot do what this model or call"
            " asks for; run it with attn_implementation='eager', or without:\n" + listed(asked)
        )
