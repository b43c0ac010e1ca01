"""L2 and cosine attention for Hugging Face models, by name of ``attn_implementation``."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.errors import ConfigError, listed, missing_extra, unknown_name
from wellposed.functional import common_shift, l2_vectors, normalized_vectors, unattended
from wellposed.integrations._saved_attention import carry_attention
from wellposed.interrupts import all_or_nothing

try:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
except ImportError as error:
    raise missing_extra("transformers", "hf", "attention implementations") from error

_EPS = 0.01
# Options of a model's attention that these kernels do not have; asking for one is an error.
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
    r"""Register our attention with transformers; ``import wellposed.integrations`` calls it.

    Models with one of the names as ``attn_implementation`` compute, in the terms of
    docs/howto/attention.md,

    - ``wellposed_l2``: `softmax_j(-s |q_i - k_j|^2 + b_ij) v_j` (Kim et al., 2021, eq. 13).
      Lipschitz only under the conditions of docs/theory/l2.md.
    - ``wellposed_cosine``: `softmax_j(sqrt(head_dim) n(q_i) . n(k_j) + b_ij) n(v_j)` with
      `n(a) = a / sqrt(|a|^2 + 0.01)` (Qi et al., 2023). Lipschitz for every mask and a fixed b.

    Status: exact up to rounding. Masks, grouped heads, caches, ``generate`` and dropout are those
    of ``sdpa``. ``config.json`` stores the name; saving warns of adapters and parts that it cannot
    name.

    Returns:
        The two names. Calling it again changes nothing.

    Raises:
        ConfigError: transformers is not installed; in a forward pass, if the model needs attention
            weights, capped logits, sinks or a paged cache, or for L2 scales queries itself (OPT,
            Whisper).

    Cost: `wellposed.functional.l2_attention` or `cosine_attention`, beside sdpa.
    When not to use: pretrained weights without training; XLNet, DeBERTa, which ignore the name.

    >>> register_attention()
    ('wellposed_l2', 'wellposed_cosine')
    """
    for name, forward in _FORWARD.items():
        AttentionInterface.register(name, forward)
        AttentionMaskInterface.register(name, AttentionMaskInterface()["sdpa"])
    carry_attention()
    return tuple(_FORWARD)


def set_attention_(model: nn.Module, name: str) -> None:
    """Set the attention implementation of a built model, or refuse; exact, as `register_attention`.

    Args:
        model: a model of transformers, each part of which may have ``attn_implementation="sdpa"``.
        name: ``"wellposed_l2"`` or ``"wellposed_cosine"``.

    Raises:
        ConfigError: another name or model, or a part that ignores the name. Nothing is changed.

    Cost: none. When not to use: if ``from_pretrained`` takes the name and the family asks for it.

    >>> from transformers import BertConfig, BertModel
    >>> sizes = dict(hidden_size=8, num_attention_heads=2, intermediate_size=8, vocab_size=9)
    >>> model = BertModel(BertConfig(num_hidden_layers=1, **sizes))
    >>> set_attention_(model, "wellposed_cosine")
    >>> model.config._attn_implementation
    'wellposed_cosine'
    """
    if name not in register_attention():
        raise unknown_name("attention implementation", str(name), _FORWARD)
    if not isinstance(model, PreTrainedModel) or type(model).__module__.startswith("wellposed."):
        raise ConfigError(
            "set_attention_: needs a model of transformers whose attention asks"
            " transformers.AttentionInterface for the function that attn_implementation names;"
            f" received {type(model).__name__}; build wellposed's own with attention='l2' or"
            " 'cosine', and put wellposed.nn.L2SelfAttention into one of your own"
        )
    with all_or_nothing() as undo:
        for part in model.modules():
            if isinstance(part, PreTrainedModel):
                undo.later(_restore_attention, part.config, part.config._attn_implementation)
        _set(model, name)


def _restore_attention(config: Any, name: str | None) -> None:
    config._attn_implementation = name


def _set(model: PreTrainedModel, name: str) -> None:
    # A part with an attention of its own keeps its name, so it ignores at least one of two names.
    deaf = {part for tried in ("eager", name) for part in _parts_that_ignore(model, tried)}
    if deaf:
        raise ConfigError(
            f"set_attention_: {name!r} would be ignored by these parts, whose code has an attention"
            " of its own and does not ask transformers.AttentionInterface; take a family that"
            " does, as all do whose attn_implementation may be 'sdpa':\n" + listed(sorted(deaf))
        )

    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if not any(part._supports_sdpa or part._supports_attention_backend for part in parts):
        raise ConfigError(
            f"set_attention_: {type(model).__name__} asks transformers for no attention, so"
            f" {name!r} would change nothing; leave its attention as it is"
        )


def _parts_that_ignore(model: PreTrainedModel, name: str) -> list[str]:
    """Set the attention of every part; return the parts that did not take the name."""
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
    gain: Any = getattr(module, "scaling", None)
    if gain is not None and scaling is not None and (isinstance(gain, Tensor) or gain != scaling):
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
    sdpa = AttentionInterface()["sdpa"]
    tau = math.sqrt(query.shape[-1])
    return sdpa(module, query, key, value, attention_mask, scaling=tau, **kwargs)


_FORWARD = {"wellposed_l2": _l2_forward, "wellposed_cosine": _cosine_forward}


def _unseen(mask: Tensor | None) -> Tensor | None:
    """Return (batch, 1, keys), True if no query sees the key; None if the mask does not tell."""
    if mask is None or mask.dim() != 4:
        return None
    wide = torch.promote_types(mask.dtype, torch.float32)
    closed = ~mask.any(-2) if mask.dtype is torch.bool else unattended(mask, wide)
    return closed.all(-2, keepdim=True)


def _check_options(module: nn.Module, options: dict[str, Any]) -> None:
    set_ones = {name for name, value in options.items() if value is not None and value is not False}
    asked = [f"{name}: {what}" for name, what in _UNSUPPORTED.items() if name in set_ones]
    if asked:
        raise ConfigError(
            f"{type(module).__name__}: L2 and cosine attention cannot do what this model or call"
            " asks for; run it with attn_implementation='eager', or without:\n" + listed(asked)
        )
