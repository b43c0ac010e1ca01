"""The attentions of Kim et al. (2021) that the built-in names do not cover: importing this module registers them.

``init_scale`` s: weights start from ``U(-s, s) / sqrt(D)`` (appendix I). The paper divides by its bound of the
inf-norm; we divide by ours, which is never larger, in the same norm.
"""

from __future__ import annotations

from typing import Any

from wellposed.errors import ConfigError
from wellposed.nn import ATTENTIONS, L2SelfAttention

INIT_SCALE = 2.0**-4


def _build(config: Any, **options: Any) -> L2SelfAttention:
    if getattr(config, "qk_norm", False):
        raise ConfigError(f"attention {config.attention!r} with qk_norm=True: L2 attention takes none; set it to False")
    return L2SelfAttention(config.hidden_size, config.num_attention_heads, dropout=config.attention_dropout, **options)


@ATTENTIONS.register("kim2021_l2")
def build_untied(config: Any, layer_index: int) -> L2SelfAttention:
    """Build untied L2 attention with the paper's initial scale."""
    del layer_index
    return _build(config, tied=False, init_scale=INIT_SCALE)


@ATTENTIONS.register("kim2021_l2_tied")
def build_tied(config: Any, layer_index: int) -> L2SelfAttention:
    """Build tied L2 attention with the paper's initial scale."""
    del layer_index
    return _build(config, init_scale=INIT_SCALE)


@ATTENTIONS.register("kim2021_l2_tied_wide")
def build_tied_wide(config: Any, layer_index: int) -> L2SelfAttention:
    """Build tied L2 attention with twice the query columns: as many parameters as the untied one (appendix M)."""
    del layer_index
    return _build(config, query_width=2, init_scale=INIT_SCALE)


@ATTENTIONS.register("kim2021_l2_contractive")
def build_contractive(config: Any, layer_index: int) -> L2SelfAttention:
    """Build tied L2 attention divided by its bound in the inf-norm (section 4.2)."""
    del layer_index
    return _build(
        config,
        contractive=0.999,
        norm="inf",
        max_tokens=config.max_position_embeddings,
        init_scale=INIT_SCALE,
    )
