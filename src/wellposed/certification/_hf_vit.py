"""Rules of ViT: from patches of pixels on, a LayerNorm in front of every sublayer (theory note B13)."""

from __future__ import annotations

from functools import partial
from typing import Any

from wellposed.certification._blocks import function_bound, linear_bound
from wellposed.certification._hf import MODELS, attention, named, read
from wellposed.certification._rules import LayerBound, Site, product_of, register_rule
from wellposed.certification._transformer import of_one_vector, one_token, sublayer

VIT = f"{MODELS}.vit.modeling_vit"


@register_rule(f"{VIT}.ViTLayer")
def _layer(module: Any, site: Site) -> LayerBound:
    heads = read(module, "attention", "ViTAttention", site)
    feedforward = read(module, "mlp", "ViTMLP", site)

    def mixed(at: Site) -> LayerBound:
        projections = (heads.q_proj, heads.k_proj, heads.v_proj, heads.o_proj)
        found = attention(
            heads, at, lambda: projections, heads=heads.num_attention_heads, dropout=heads.attention_dropout
        )
        found = at.record(heads, "attention", found)
        rest = at.at_radius(found.out_radius).chain(named(module, "dropout"))
        return product_of([found, rest], radius=rest.out_radius)

    def fed(at: Site) -> LayerBound:
        up = at.chain(named(module, "mlp.fc1"))
        inner = function_bound(feedforward.activation_fn, at.at_radius(up.out_radius), "mlp.activation_fn")
        rest = at.at_radius(inner.out_radius).chain(named(module, "mlp.fc2", "dropout"))
        return product_of([up, inner, rest], radius=rest.out_radius)

    first = sublayer(site, mixed, before=("layernorm_before", module.layernorm_before))
    second = sublayer(site.at_radius(first.out_radius), fed, before=("layernorm_after", module.layernorm_after))
    return product_of([first, second], radius=second.out_radius)


@register_rule(f"{VIT}.ViTModel")
def _model(module: Any, site: Site) -> LayerBound:
    """Map patches of pixels, each one token of its channels, rows and columns in this order, to the hidden states."""
    embeddings = read(module, "embeddings", "ViTEmbeddings", site)
    patches = read(module, "embeddings.patch_embeddings", "ViTPatchEmbeddings", site)
    if module.pooler is not None:
        read(module, "pooler", "ViTPooler", site)
    cut = patches.projection
    if (cut.stride, cut.padding, cut.dilation, cut.groups) != (cut.kernel_size, (0, 0), (1, 1), 1):
        return site.refuse("its patches overlap or leave pixels out, so they are no tokens of their own")
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
    return of_one_vector(partial(_head, module), site)


def _head(module: Any, site: Site) -> LayerBound:
    hidden = site.chain(named(module, "vit"))
    token = site.record(module, "pool", one_token(site.at_radius(hidden.out_radius)))
    before = site.product([hidden, token])
    head = site.at_radius(before.out_radius).chain(named(module, "classifier"))
    if hasattr(module.classifier, "weight"):
        site.set_head(module.classifier.weight, before)
    return site.product([before, head])
