"""Rules of ViT: from patches of pixels on, a LayerNorm in front of every sublayer (theory note
B13)."""

from __future__ import annotations

from typing import Any

from torch import nn

from wellposed.certification._blocks import linear_bound
from wellposed.certification._bounds import LayerBound
from wellposed.certification._hf import (
    MODELS,
    attention,
    feedforward,
    linear_head,
    picked_token,
    read,
)
from wellposed.certification._rules import Site, register_rule
from wellposed.certification._transformer import named, normed, of_one_vector

VIT = f"{MODELS}.vit.modeling_vit"


@register_rule(f"{VIT}.ViTLayer")
def _layer(module: Any, site: Site) -> LayerBound:
    heads = read(module, "attention", "ViTAttention", site)
    read(module, "mlp", "ViTMLP", site)

    def mixed(at: Site) -> LayerBound:
        projections = (heads.q_proj, heads.k_proj, heads.v_proj, heads.o_proj)
        return attention(
            module, "attention", at, lambda: projections, "dropout",
            dropout=heads.attention_dropout,
        )  # fmt: skip

    def fed(at: Site) -> LayerBound:
        return feedforward(module, at, "mlp.fc1", "mlp.activation_fn", "mlp.fc2", "dropout")

    return normed(module, site, ("layernorm_before", mixed), ("layernorm_after", fed), before=True)


@register_rule(f"{VIT}.ViTModel")
def _model(module: Any, site: Site) -> LayerBound:
    """Map patches of pixels, each one token of its channels, rows and columns in this order, to the
    hidden states."""
    embeddings = read(module, "embeddings", "ViTEmbeddings", site)
    patches = read(module, "embeddings.patch_embeddings", "ViTPatchEmbeddings", site)
    if module.pooler is not None:
        # Beside the map: the last hidden state does not pass it.
        site.reads(read(module, "pooler", "ViTPooler", site).activation)
    cut = patches.projection
    site.reads(cut, nn.Conv2d)
    if (cut.stride, cut.padding, cut.dilation, cut.groups) != (cut.kernel_size, (0, 0), (1, 1), 1):
        return site.refuse(
            "its patches overlap or leave pixels out, so they are no tokens of their own"
        )
    # The strides are those of the patches, so the convolution is one linear map of each of them.
    weight = site.remember(patches, "weight", lambda: patches.projection.weight.detach().flatten(1))
    embedded = site.record(
        patches, "embeddings.patch_embeddings", linear_bound(weight, patches.projection.bias, site)
    )  # fmt: skip
    positions = embeddings.position_embeddings.detach().double()[0]
    first = float((embeddings.cls_token.detach().double()[0] + positions[:1]).norm())
    radius = max(first, embedded.out_radius + float(positions.norm(dim=-1).max()))
    # The class token stands beside the patches and does not move.
    inside = site.with_tokens(patches.num_patches + 1).at_radius(radius)
    layers = (f"layers.{index}" for index in range(len(module.layers)))
    rest = inside.chain(named(module, "embeddings.dropout", *layers, "layernorm"))
    return site.product([embedded, rest])


@register_rule(f"{VIT}.ViTForImageClassification")
def _classifier(module: Any, site: Site) -> LayerBound:
    return of_one_vector(
        lambda at: linear_head(module, "classifier", at, picked_token(module, "vit", at)), site
    )
