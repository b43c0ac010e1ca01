"""Rules of GPT-2, Llama and Phi-3: a norm in front of every sublayer makes a ball (theory note B13)."""

from __future__ import annotations

from functools import partial
from typing import Any

from wellposed.certification._blocks import function_bound
from wellposed.certification._heads import Slice, slices
from wellposed.certification._hf import MODELS, attention, gated_feedforward, longest_row, named, read
from wellposed.certification._rules import LayerBound, Site, product_of, register_rule
from wellposed.certification._transformer import of_one_vector, one_token, sublayer

GPT2 = f"{MODELS}.gpt2.modeling_gpt2"
LLAMA = f"{MODELS}.llama.modeling_llama"
PHI3 = f"{MODELS}.phi3.modeling_phi3"
# These only turn queries and keys; others rescale them by position or length.
_ROTATIONS = ("default", "linear", "dynamic", "llama3")


@register_rule(f"{GPT2}.GPT2Block")
def _gpt2_block(module: Any, site: Site) -> LayerBound:
    heads = read(module, "attn", "GPT2Attention", site)
    feedforward = read(module, "mlp", "GPT2MLP", site)
    if hasattr(module, "crossattention"):
        return site.refuse("with cross-attention it maps two sequences")

    def projections() -> tuple[Slice, Slice, Slice, Slice]:
        query, key, value = slices(heads.c_attn.weight.mT, heads.c_attn.bias, [heads.embed_dim] * 3)
        return query, key, value, Slice(heads.c_proj.weight.mT, heads.c_proj.bias)

    def mixed(at: Site) -> LayerBound:
        for path in ("c_attn", "c_proj"):
            read(heads, path, "Conv1D", at, home="transformers.pytorch_utils")
        dropout = heads.attn_dropout.p
        found = attention(heads, at, projections, heads=heads.num_heads, dropout=dropout, causal=True)
        found = at.record(heads, "attn", found)
        rest = at.at_radius(found.out_radius).chain(named(module, "attn.resid_dropout"))
        return product_of([found, rest], radius=rest.out_radius)

    def fed(at: Site) -> LayerBound:
        up = at.chain(named(module, "mlp.c_fc"))
        inner = function_bound(feedforward.act, at.at_radius(up.out_radius), "mlp.act")
        rest = at.at_radius(inner.out_radius).chain(named(module, "mlp.c_proj", "mlp.dropout"))
        return product_of([up, inner, rest], radius=rest.out_radius)

    return _pre_normed(module, site, ("ln_1", mixed), ("ln_2", fed))


def _pre_normed(module: Any, site: Site, first: tuple[str, Any], second: tuple[str, Any]) -> LayerBound:
    bounds: list[LayerBound] = []
    for norm, branch in (first, second):
        bounds.append(sublayer(site, branch, before=(norm, getattr(module, norm))))
        site = site.at_radius(bounds[-1].out_radius)
    return product_of(bounds, radius=site.radius)


@register_rule(f"{GPT2}.GPT2Model")
def _gpt2(module: Any, site: Site) -> LayerBound:
    # Token types, where given, are rows of the token embedding.
    site = site.at_radius(site.radius + longest_row(module.wpe, module.wte))
    return site.chain(named(module, "drop", *(f"h.{index}" for index in range(len(module.h))), "ln_f"))


def _language_model(module: Any, site: Site, body: str) -> LayerBound:
    before = site.chain(named(module, body))
    head = site.at_radius(before.out_radius).chain(named(module, "lm_head"))
    site.set_head(module.lm_head.weight, before)
    return site.product([before, head])


def _last_token(module: Any, body: str, site: Site) -> LayerBound:
    """A linear map of every token, of which one is taken."""
    hidden = site.chain(named(module, body))
    token = site.record(module, "pool", one_token(site.at_radius(hidden.out_radius)))
    before = site.product([hidden, token])
    site.set_head(module.score.weight, before)
    return site.product([before, site.at_radius(before.out_radius).chain(named(module, "score"))])


for _source, _name, _body in ((GPT2, "GPT2LMHeadModel", "transformer"), (LLAMA, "LlamaForCausalLM", "model"),
                              (PHI3, "Phi3ForCausalLM", "model")):  # fmt: skip
    register_rule(f"{_source}.{_name}")(partial(_language_model, body=_body))


@register_rule(f"{GPT2}.GPT2ForSequenceClassification")
def _gpt2_classifier(module: Any, site: Site) -> LayerBound:
    return of_one_vector(partial(_last_token, module, "transformer"), site)


@register_rule(f"{LLAMA}.LlamaDecoderLayer")
def _llama_layer(module: Any, site: Site) -> LayerBound:
    heads = read(module, "self_attn", "LlamaAttention", site)
    feedforward = read(module, "mlp", "LlamaMLP", site)

    def mixed(at: Site) -> LayerBound:
        groups = heads.num_key_value_groups
        return _rotary(heads, at, lambda: (
            heads.q_proj, *(_repeated(part, groups, heads.head_dim) for part in (heads.k_proj, heads.v_proj)),
            heads.o_proj))  # fmt: skip

    def fed(at: Site) -> LayerBound:
        gate, up, down = feedforward.gate_proj, feedforward.up_proj, feedforward.down_proj
        found = gated_feedforward(at, up, gate, down, feedforward.act_fn)
        return at.record(feedforward, "mlp", found)

    return _pre_normed(module, site, ("input_layernorm", mixed), ("post_attention_layernorm", fed))


@register_rule(f"{PHI3}.Phi3DecoderLayer")
def _phi3_layer(module: Any, site: Site) -> LayerBound:
    heads = read(module, "self_attn", "Phi3Attention", site)
    feedforward = read(module, "mlp", "Phi3MLP", site)

    def projections() -> tuple[Slice, Slice, Slice, Any]:
        groups, size = heads.num_key_value_groups, heads.head_dim
        keys = heads.num_key_value_heads * size
        query, key, value = slices(heads.qkv_proj.weight, heads.qkv_proj.bias, [groups * keys, keys, keys])
        return query, _repeated(key, groups, size), _repeated(value, groups, size), heads.o_proj

    def mixed(at: Site) -> LayerBound:
        found = _rotary(heads, at, projections)
        rest = at.at_radius(found.out_radius).chain(named(module, "resid_attn_dropout"))
        return product_of([found, rest], radius=rest.out_radius)

    def fed(at: Site) -> LayerBound:
        gate, up = slices(feedforward.gate_up_proj.weight, feedforward.gate_up_proj.bias,
                          [feedforward.gate_up_proj.weight.shape[0] // 2] * 2)  # fmt: skip
        found = gated_feedforward(at, up, gate, feedforward.down_proj, feedforward.activation_fn)
        found = at.record(feedforward, "mlp", found)
        rest = at.at_radius(found.out_radius).chain(named(module, "resid_mlp_dropout"))
        return product_of([found, rest], radius=rest.out_radius)

    return _pre_normed(module, site, ("input_layernorm", mixed), ("post_attention_layernorm", fed))


def _rotary(heads: Any, site: Site, projections: Any) -> LayerBound:
    count = heads.config.num_attention_heads
    found = attention(heads, site, projections, heads=count, dropout=heads.attention_dropout, causal=True, rotary=True)
    return site.record(heads, "self_attn", found)


def _repeated(part: Any, groups: int, head_dim: int) -> Slice:
    """Queries of one group share a head of keys and values: the projection with that head once for each of them."""
    bias = None if part.bias is None else part.bias.unflatten(0, (-1, head_dim)).repeat_interleave(groups, 0).flatten()
    return Slice(part.weight.unflatten(0, (-1, head_dim)).repeat_interleave(groups, 0).flatten(0, 1), bias)


def _rotary_model(module: Any, site: Site, *, prefix: str) -> LayerBound:
    turns = read(module, "rotary_emb", f"{prefix}RotaryEmbedding", site)
    if turns.rope_type not in _ROTATIONS or turns.attention_scaling != 1.0:
        return site.refuse(
            f"its positions are of rope_type {turns.rope_type!r}, which rescales queries and keys; no bound is proved"
        )
    layers = module.layers[: module.config.num_hidden_layers]
    return site.chain(named(module, *(f"layers.{index}" for index in range(len(layers))), "norm"))


register_rule(f"{LLAMA}.LlamaModel")(partial(_rotary_model, prefix="Llama"))
register_rule(f"{PHI3}.Phi3Model")(partial(_rotary_model, prefix="Phi3"))
