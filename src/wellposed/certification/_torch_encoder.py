"""Rules for the attention and the encoder of `torch.nn` (theory note B5, B13)."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import nn

from wellposed.certification._blocks import GELU, function_bound
from wellposed.certification._bounds import LayerBound, product_of
from wellposed.certification._dot_product import dot_product_ball_bound, on_the_ball
from wellposed.certification._heads import TRAINING_DROPOUT, AttentionWeights, slices
from wellposed.certification._rules import Site, register_rule
from wellposed.certification._transformer import named, normed

# In eval mode torch may run a fused kernel, which goes by this flag of the layer and not by its
# activation.
_FUSED_SLOPES = {0: 0.0, 1: 1.0, 2: GELU}


@register_rule(nn.MultiheadAttention)
def _multihead(module: nn.MultiheadAttention, site: Site) -> LayerBound:
    """Self-attention ``x -> attention(x, x, x)``."""
    if module.training and module.dropout > 0:
        return site.refuse(TRAINING_DROPOUT)
    if not module.batch_first:
        return site.refuse(
            "its inputs are (tokens, batch, width), and a certificate speaks of (batch, tokens,"
            " width); set batch_first = True on it, which changes no weight, and call it with"
            " (batch, tokens, width)"
        )
    if module.in_proj_weight is None:
        return site.refuse(
            "its keys or values have a width of their own (kdim, vdim), so it is no self-attention"
        )
    if module.bias_k is not None or module.add_zero_attn:
        return site.refuse(
            "add_bias_kv and add_zero_attn put in a token of their own, for which no bound is"
            " proved"
        )
    weights = site.remember(module, "AttentionWeights", lambda: _weights(module))
    # A padded query attends to real tokens, so a pattern holds only where the caller says that
    # nothing is padded.
    return on_the_ball(partial(dot_product_ball_bound, weights), weights, site, module.embed_dim)


def _weights(module: nn.MultiheadAttention) -> AttentionWeights:
    query, key, value = slices(module.in_proj_weight, module.in_proj_bias, [module.embed_dim] * 3)
    return AttentionWeights.of(query, key, value, module.out_proj, module.head_dim)


@register_rule(nn.TransformerEncoderLayer)
def _encoder_layer(module: nn.TransformerEncoderLayer, site: Site) -> LayerBound:
    def mixed(at: Site) -> LayerBound:
        return at.chain(named(module, "self_attn", "dropout1"))

    branches = (("norm1", mixed), ("norm2", partial(_feedforward, module)))
    return normed(module, site, *branches, before=module.norm_first)


def _feedforward(module: nn.TransformerEncoderLayer, site: Site) -> LayerBound:
    up = site.child(module.linear1, "linear1")
    fused = _FUSED_SLOPES[module.activation_relu_or_gelu]
    inner = function_bound(module.activation, site.at_radius(up.out_radius))
    inner = replace(
        inner,
        lipschitz=max(inner.lipschitz, fused),
        out_radius=max(inner.out_radius, fused * up.out_radius if fused else 0.0),
    )
    rest = site.at_radius(inner.out_radius).chain(named(module, "dropout", "linear2", "dropout2"))
    return product_of([up, inner, rest], radius=rest.out_radius)


@register_rule(nn.TransformerEncoder)
def _encoder(module: nn.TransformerEncoder, site: Site) -> LayerBound:
    norm = [] if module.norm is None else [("norm", module.norm)]
    return site.chain(
        [*((f"layers.{index}", layer) for index, layer in enumerate(module.layers)), *norm]
    )
