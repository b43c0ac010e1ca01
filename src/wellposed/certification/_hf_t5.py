"""Rules of the T5 encoder: an RMSNorm in front of every sublayer, logits without 1/sqrt(d) plus a bias of positions."""

from __future__ import annotations

from typing import Any

from wellposed.certification._blocks import function_bound
from wellposed.certification._hf import MODELS, attention, gated_feedforward, named, read, refuse_two_sequences
from wellposed.certification._rules import LayerBound, Site, product_of, register_rule
from wellposed.certification._transformer import sublayer

T5 = f"{MODELS}.t5.modeling_t5"


@register_rule(f"{T5}.T5Block")
def _block(module: Any, site: Site) -> LayerBound:
    if module.is_decoder:
        return site.refuse("a decoder's block is a function of two sequences; certify the encoder")
    read(module, "layer.0", "T5LayerSelfAttention", site)
    read(module, "layer.1", "T5LayerFF", site)
    heads = read(module, "layer.0.SelfAttention", "T5Attention", site)

    def mixed(at: Site) -> LayerBound:
        projections = (heads.q, heads.k, heads.v, heads.o)
        found = attention(
            heads, at, lambda: projections, heads=heads.n_heads, dropout=heads.dropout, position_bias=True
        )
        found = at.record(heads, "layer.0.SelfAttention", found)
        rest = at.at_radius(found.out_radius).chain(named(module, "layer.0.dropout"))
        return product_of([found, rest], radius=rest.out_radius)

    def fed(at: Site) -> LayerBound:
        found = _gated(module, at) if hasattr(module.layer[1].DenseReluDense, "wi_0") else _plain(module, at)
        rest = at.at_radius(found.out_radius).chain(named(module, "layer.1.dropout"))
        return product_of([found, rest], radius=rest.out_radius)

    first = sublayer(site, mixed, before=named(module, "layer.0.layer_norm")[0])
    second = sublayer(site.at_radius(first.out_radius), fed, before=named(module, "layer.1.layer_norm")[0])
    return product_of([first, second], radius=second.out_radius)


def _gated(module: Any, site: Site) -> LayerBound:
    path = "layer.1.DenseReluDense"
    part = read(module, path, "T5DenseGatedActDense", site)
    found = gated_feedforward(site, part.wi_1, part.wi_0, part.wo, part.act)
    found = site.record(part, path, found)
    rest = site.at_radius(found.out_radius).chain(named(module, f"{path}.dropout"))
    return product_of([found, rest], radius=rest.out_radius)


def _plain(module: Any, site: Site) -> LayerBound:
    path = "layer.1.DenseReluDense"
    part = read(module, path, "T5DenseActDense", site)
    up = site.chain(named(module, f"{path}.wi"))
    inner = function_bound(part.act, site.at_radius(up.out_radius), f"{path}.act")
    rest = site.at_radius(inner.out_radius).chain(named(module, f"{path}.dropout", f"{path}.wo"))
    return product_of([up, inner, rest], radius=rest.out_radius)


@register_rule(f"{T5}.T5Stack")
def _stack(module: Any, site: Site) -> LayerBound:
    if module.is_decoder:
        return site.refuse("a decoder is a function of two sequences; certify the encoder")
    blocks = (f"block.{index}" for index in range(len(module.block)))
    return site.chain(named(module, "dropout", *blocks, "final_layer_norm", "dropout"))


@register_rule(f"{T5}.T5EncoderModel")
def _encoder(module: Any, site: Site) -> LayerBound:
    return site.chain(named(module, "encoder"))


for _name in ("T5Model", "T5ForConditionalGeneration", "T5ForSequenceClassification"):
    refuse_two_sequences(f"{T5}.{_name}")
for _name in ("BartModel", "BartForConditionalGeneration", "BartForSequenceClassification"):
    refuse_two_sequences(f"{MODELS}.bart.modeling_bart.{_name}")
