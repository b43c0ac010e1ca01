"""Rules of GPT-2, Llama and Phi-3: a norm in front of every sublayer makes a ball (theory note
B13)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from wellposed.certification._bounds import LayerBound, product_of
from wellposed.certification._heads import Slice, slices
from wellposed.certification._hf import (
    MODELS,
    attention,
    feedforward,
    gated_feedforward,
    linear_head,
    picked_token,
    read,
    shifted,
)
from wellposed.certification._rules import Refused, Site, register_rule
from wellposed.certification._transformer import named, normed, of_one_vector

GPT2 = f"{MODELS}.gpt2.modeling_gpt2"
LLAMA = f"{MODELS}.llama.modeling_llama"
PHI3 = f"{MODELS}.phi3.modeling_phi3"
# These only turn queries and keys; others rescale them by position or length.
_ROTATIONS = ("default", "linear", "dynamic", "llama3")


@register_rule(f"{GPT2}.GPT2Block")
def _gpt2_block(module: Any, site: Site) -> LayerBound:
    heads = read(module, "attn", "GPT2Attention", site)
    read(module, "mlp", "GPT2MLP", site)
    if hasattr(module, "crossattention"):
        return site.refuse("with cross-attention it maps two sequences")

    def projections() -> tuple[Slice, Slice, Slice, Slice]:
        rows = heads.c_attn.weight.shape[1]
        if rows != 3 * heads.split_size:
            raise Refused(
                f"its c_attn makes {rows} numbers of a token, and its call cuts them by split_size ="
                f" {heads.split_size}; set split_size to a third of what pruning has left"
            )
        query, key, value = slices(heads.c_attn.weight.mT, heads.c_attn.bias, [rows // 3] * 3)
        return query, key, value, Slice(heads.c_proj.weight.mT, heads.c_proj.bias)

    for path in ("c_attn", "c_proj"):
        read(heads, path, "Conv1D", site, home="transformers.pytorch_utils")

    def mixed(at: Site) -> LayerBound:
        return attention(
            module, "attn", at, projections, "attn.resid_dropout",
            dropout=heads.attn_dropout.p, causal=True,
        )  # fmt: skip

    def fed(at: Site) -> LayerBound:
        return feedforward(module, at, "mlp.c_fc", "mlp.act", "mlp.c_proj", "mlp.dropout")

    return normed(module, site, ("ln_1", mixed), ("ln_2", fed), before=True)


@register_rule(f"{GPT2}.GPT2Model")
def _gpt2(module: Any, site: Site) -> LayerBound:
    # Token types, where given, are rows of the token embedding.
    site = shifted(site, module.wpe, module.wte)
    return site.chain(
        named(module, "drop", *(f"h.{index}" for index in range(len(module.h))), "ln_f")
    )


def _language_model(module: Any, site: Site, body: str) -> LayerBound:
    return linear_head(module, "lm_head", site, [site.chain(named(module, body))])


for _source, _name, _body in ((GPT2, "GPT2LMHeadModel", "transformer"), (LLAMA, "LlamaForCausalLM", "model"),
                              (PHI3, "Phi3ForCausalLM", "model")):  # fmt: skip
    register_rule(f"{_source}.{_name}")(partial(_language_model, body=_body))


@register_rule(f"{GPT2}.GPT2ForSequenceClassification")
def _gpt2_classifier(module: Any, site: Site) -> LayerBound:
    # A linear map of every token, of which the last real one is taken.
    return of_one_vector(
        lambda at: linear_head(module, "score", at, picked_token(module, "transformer", at)), site
    )


@register_rule(f"{LLAMA}.LlamaDecoderLayer")
def _llama_layer(module: Any, site: Site) -> LayerBound:
    heads = read(module, "self_attn", "LlamaAttention", site)
    parts = read(module, "mlp", "LlamaMLP", site)

    def projections() -> tuple[Any, Slice, Slice, Any]:
        key, value = (
            _repeated(part, heads.num_key_value_groups, heads.head_dim)
            for part in (heads.k_proj, heads.v_proj)
        )
        return heads.q_proj, key, value, heads.o_proj

    def fed(at: Site) -> LayerBound:
        gate, up, down = parts.gate_proj, parts.up_proj, parts.down_proj
        return at.record(parts, "mlp", gated_feedforward(at, up, gate, down, parts.act_fn))

    return _rotary_layer(module, site, projections, fed)


@register_rule(f"{PHI3}.Phi3DecoderLayer")
def _phi3_layer(module: Any, site: Site) -> LayerBound:
    heads = read(module, "self_attn", "Phi3Attention", site)
    parts = read(module, "mlp", "Phi3MLP", site)

    def projections() -> tuple[Slice, Slice, Slice, Any]:
        groups, size = heads.num_key_value_groups, heads.head_dim
        keys = heads.num_key_value_heads * size
        query, key, value = slices(
            heads.qkv_proj.weight, heads.qkv_proj.bias, [groups * keys, keys, keys]
        )
        return query, _repeated(key, groups, size), _repeated(value, groups, size), heads.o_proj

    def fed(at: Site) -> LayerBound:
        fused = parts.gate_up_proj
        gate, up = slices(fused.weight, fused.bias, [fused.weight.shape[0] // 2] * 2)
        found = at.record(
            parts, "mlp", gated_feedforward(at, up, gate, parts.down_proj, parts.activation_fn)
        )
        rest = at.at_radius(found.out_radius).chain(named(module, "resid_mlp_dropout"))
        return product_of([found, rest], radius=rest.out_radius)

    return _rotary_layer(module, site, projections, fed, "resid_attn_dropout")


def _rotary_layer(
    module: Any,
    site: Site,
    projections: Callable[[], Any],
    fed: Callable[[Site], LayerBound],
    *rest: str,
) -> LayerBound:
    heads = module.self_attn

    def mixed(at: Site) -> LayerBound:
        return attention(
            module, "self_attn", at, projections, *rest,
            dropout=heads.attention_dropout, causal=True, rotary=True,
        )  # fmt: skip

    return normed(
        module, site, ("input_layernorm", mixed), ("post_attention_layernorm", fed), before=True
    )


def _repeated(part: Any, groups: int, head_dim: int) -> Slice:
    """Queries of one group share a head of keys and values: the projection with that head once for
    each of them."""
    bias = (
        None
        if part.bias is None
        else part.bias.unflatten(0, (-1, head_dim)).repeat_interleave(groups, 0).flatten()
    )
    return Slice(
        part.weight.unflatten(0, (-1, head_dim)).repeat_interleave(groups, 0).flatten(0, 1), bias
    )


def _rotary_model(module: Any, site: Site, *, prefix: str) -> LayerBound:
    turns = read(module, "rotary_emb", f"{prefix}RotaryEmbedding", site)
    if turns.rope_type not in _ROTATIONS or turns.attention_scaling != 1.0:
        return site.refuse(
            f"its positions are of rope_type {turns.rope_type!r}, which rescales queries and keys;"
            " no bound is proved"
        )
    layers = module.layers[: module.config.num_hidden_layers]
    return site.chain(named(module, *(f"layers.{index}" for index in range(len(layers))), "norm"))


register_rule(f"{LLAMA}.LlamaModel")(partial(_rotary_model, prefix="Llama"))
register_rule(f"{PHI3}.Phi3Model")(partial(_rotary_model, prefix="Phi3"))
