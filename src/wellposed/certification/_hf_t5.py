"""Rules of the T5 encoder: an RMSNorm in front of every sublayer, logits without 1/sqrt(d) plus a
bias of positions."""

from __future__ import annotations

from typing import Any

from wellposed.certification._bounds import LayerBound, product_of
from wellposed.certification._hf import (
    MODELS,
    attention,
    feedforward,
    gated_feedforward,
    read,
    refuse_two_sequences,
)
from wellposed.certification._rules import Site, register_rule
from wellposed.certification._transformer import named, normed

T5 = f"{MODELS}.t5.modeling_t5"
_FEEDFORWARD = "layer.1.DenseReluDense"


@register_rule(f"{T5}.T5Block")
def _block(module: Any, site: Site) -> LayerBound:
    if module.is_decoder:
        return site.refuse(
            "a decoder's block maps two sequences, and no bound is proved for cross-attention"
        )
    read(module, "layer.0", "T5LayerSelfAttention", site)
    read(module, "layer.1", "T5LayerFF", site)
    heads = read(module, "layer.0.SelfAttention", "T5Attention", site)

    def mixed(at: Site) -> LayerBound:
        projections = (heads.q, heads.k, heads.v, heads.o)
        return attention(
            module, "layer.0.SelfAttention", at, lambda: projections, "layer.0.dropout",
            dropout=heads.dropout, position_bias=True,
        )  # fmt: skip

    def fed(at: Site) -> LayerBound:
        found = (
            _gated(module, at)
            if hasattr(module.layer[1].DenseReluDense, "wi_0")
            else _plain(module, at)
        )
        rest = at.at_radius(found.out_radius).chain(
            named(module, f"{_FEEDFORWARD}.dropout", "layer.1.dropout")
        )
        return product_of([found, rest], radius=rest.out_radius)

    return normed(
        module, site, ("layer.0.layer_norm", mixed), ("layer.1.layer_norm", fed), before=True
    )


def _gated(module: Any, site: Site) -> LayerBound:
    part = read(module, _FEEDFORWARD, "T5DenseGatedActDense", site)
    return site.record(
        part, _FEEDFORWARD, gated_feedforward(site, part.wi_1, part.wi_0, part.wo, part.act)
    )


def _plain(module: Any, site: Site) -> LayerBound:
    read(module, _FEEDFORWARD, "T5DenseActDense", site)
    return feedforward(
        module, site, f"{_FEEDFORWARD}.wi", f"{_FEEDFORWARD}.act", f"{_FEEDFORWARD}.wo"
    )


@register_rule(f"{T5}.T5Stack")
def _stack(module: Any, site: Site) -> LayerBound:
    if module.is_decoder:
        return site.refuse(
            "a decoder maps two sequences, and no bound is proved for cross-attention"
        )
    blocks = (f"block.{index}" for index in range(len(module.block)))
    return site.chain(named(module, "dropout", *blocks, "final_layer_norm", "dropout"))


@register_rule(f"{T5}.T5EncoderModel")
def _encoder(module: Any, site: Site) -> LayerBound:
    return site.chain(named(module, "encoder"))


for _name in ("T5Model", "T5ForConditionalGeneration", "T5ForSequenceClassification"):
    refuse_two_sequences(f"{T5}.{_name}")
for _name in ("BartModel", "BartForConditionalGeneration", "BartForSequenceClassification"):
    refuse_two_sequences(f"{MODELS}.bart.modeling_bart.{_name}")
for _name in ("MarianModel", "MarianMTModel"):
    refuse_two_sequences(f"{MODELS}.marian.modeling_marian.{_name}")
