"""The L2 attentions that a model's configuration can name."""

from __future__ import annotations

from typing import Any

from wellposed.errors import ConfigError
from wellposed.nn._options import reads
from wellposed.nn._registry import ATTENTIONS
from wellposed.nn.attention.l2 import L2SelfAttention


def _build(config: Any, **options: Any) -> L2SelfAttention:
    if getattr(config, "qk_norm", False):
        raise ConfigError(
            f"attention {config.attention!r} with qk_norm=True: normalised queries and keys are no longer z, of which "
            "the values are made; set qk_norm=False, or take attention='cosine'"
        )
    return L2SelfAttention(
        config.hidden_size,
        config.num_attention_heads,
        dropout=config.attention_dropout,
        init_scale=getattr(config, "l2_init_scale", None),
        query_width=getattr(config, "query_width", 1),
        **options,
    )


@ATTENTIONS.register("l2")
@reads("query_width", "l2_init_scale")
def build_l2(config: Any, layer_index: int) -> L2SelfAttention:
    """Build untied L2 attention: for comparison, no Lipschitz constant."""
    del layer_index
    return _build(config, tied=False)


@ATTENTIONS.register("l2_tied")
@reads("query_width", "l2_init_scale")
def build_l2_tied(config: Any, layer_index: int) -> L2SelfAttention:
    """Build tied L2 attention with the paper's values: globally Lipschitz."""
    del layer_index
    return _build(config)


@ATTENTIONS.register("l2_contractive")
@reads("contractive", "lipschitz_norm", "query_width", "l2_init_scale")
def build_l2_contractive(config: Any, layer_index: int) -> L2SelfAttention:
    """Build tied L2 attention divided by its bound for `max_position_embeddings` tokens.

    Read besides, where present: `contractive` (0.9) and `lipschitz_norm` ("tok").
    """
    del layer_index
    bound = getattr(config, "contractive", None)
    norm = getattr(config, "lipschitz_norm", "tok")
    return _build(
        config,
        contractive=0.9 if bound is None else bound,
        norm=2 if norm == "2" else norm,
        max_tokens=config.max_position_embeddings,
    )
