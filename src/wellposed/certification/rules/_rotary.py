"""Llama, Mistral and Qwen2 of transformers around given inputs (notes B5, B22, B23).

Queries and keys are rotated by their positions, so attention has the bound of the ball on which its
tokens lie. Recorded tokens come from a float64 copy whose RMSNorm computes in float64.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from torch import Tensor, nn

from wellposed.certification._as_called import class_called, home_of
from wellposed.certification._layer_bound import LayerBound, Refused
from wellposed.certification._walk import RuleContext
from wellposed.certification.rules._attention_weights import AttentionWeights, Slice
from wellposed.certification.rules._dot_product import on_the_ball, refuse_dropout
from wellposed.certification.rules._huggingface import (
    HeadRule,
    LayerRule,
    ModelRule,
    refuse_other_attention,
    register_family,
)
from wellposed.certification.rules._torch_layers import norm_bound

_ROTATED = 1 + 1e-6
"""Largest norm of a rotation whose sine and cosine are rounded to float32."""
_FIXED_ROTATIONS = ("default", "linear", "llama3")
_FAMILIES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2"}


class _RotaryLayer(LayerRule):
    """A layer whose attention rotates queries and keys, and may share keys between heads."""

    def attended(self, attention: Any, owner: Any, context: RuleContext) -> LayerBound:
        refuse_other_attention(attention)
        if attention.config._attn_implementation != "sdpa":
            raise Refused(
                "its eager attention computes the softmax in float32; load the model with"
                " attn_implementation='sdpa'"
            )
        refuse_dropout(attention, owner.self_attn.attention_dropout)
        source = sys.modules[class_called(attention).__module__]
        for name in ("apply_rotary_pos_emb", "rotate_half", "repeat_kv"):
            _refuse_replaced(getattr(source, name), source.__name__, name)

        def read_weights() -> AttentionWeights:
            return _weights_of(attention)

        weights = context.remember(attention, "AttentionWeights", read_weights)
        return on_the_ball(weights, context.under_mask("causal"), rotary=True)


class _RotaryModel(ModelRule):
    """A model whose layers read one table of rotations."""

    def __call__(self, module: Any, context: RuleContext) -> LayerBound:
        rotations = module.rotary_emb
        kind = rotations.rope_type
        if kind not in _FIXED_ROTATIONS or rotations.attention_scaling != 1.0:
            raise Refused(
                f"its rope_type={kind!r} scales queries and keys by {rotations.attention_scaling:g} or by"
                f" the length; a bound is proved for {', '.join(_FIXED_ROTATIONS)}"
            )
        if module.config.num_hidden_layers != len(module.layers):
            raise Refused(
                f"its config runs {module.config.num_hidden_layers} of {len(module.layers)} layers; set"
                " num_hidden_layers to their number"
            )

        return super().__call__(module, context)


def _refuse_replaced(function: Any, home: str, name: str) -> None:
    if home_of(function) != (home, name):
        raise Refused(
            f"{'.'.join(home_of(function))} stands where transformers runs {name}; put its own back"
        )


def _weights_of(attention: Any) -> AttentionWeights:
    """Return the weights with the keys and values of a group once for each of its heads."""
    head_dim = attention.head_dim
    groups = attention.num_key_value_groups
    parts = [
        attention.q_proj,
        _repeated(attention.k_proj, head_dim, groups),
        _repeated(attention.v_proj, head_dim, groups),
        attention.o_proj,
    ]
    # Queries and keys are each rotated, and scaled by 1 / sqrt(head_dim) unless changed.
    stretch = float(attention.scaling) * math.sqrt(head_dim) * _ROTATED**2
    weights = AttentionWeights.from_projections(*parts, head_dim=head_dim)
    return weights.with_longer_queries(stretch)


def _repeated(layer: nn.Linear, head_dim: int, groups: int) -> Slice:
    def rows(values: Tensor) -> Tensor:
        heads = values.detach().unflatten(0, (-1, head_dim))
        return heads.repeat_interleave(groups, 0).flatten(0, 1)

    return Slice(rows(layer.weight), None if layer.bias is None else rows(layer.bias))


def _rms_norm(module: Any, context: RuleContext) -> LayerBound:
    eps = float(module.variance_epsilon)
    width = module.weight.shape[0]
    return norm_bound(
        module, context, weight=module.weight, bias=None, eps=eps, width=width, centred=False
    )


for _family, _prefix in _FAMILIES.items():
    register_family(
        _family,
        **{
            f"{_prefix}RMSNorm": _rms_norm,
            f"{_prefix}DecoderLayer": _RotaryLayer(
                parts={"self_attn": f"{_prefix}Attention"},
                attention="self_attn",
                projections="",
                norms="input_layernorm post_attention_layernorm",
                feedforward="mlp",
                dropout="",
                before=True,
                is_causal=True,
            ),
            f"{_prefix}Model": _RotaryModel(
                parts={"rotary_emb": f"{_prefix}RotaryEmbedding"}, chain="layers.* norm"
            ),
            f"{_prefix}ForCausalLM": HeadRule(body="model", last="lm_head", pooled=False),
            # A linear map of every token, of which the last one is taken.
            f"{_prefix}ForSequenceClassification": HeadRule(body="model", last="score"),
        },
    )
