"""What the rules of Hugging Face families share; transformers is never imported, its classes are
known by name.

The map that is certified goes from ``inputs_embeds`` (for images from patches of pixels) to the
last hidden state, or
to the logits of a head: theory note B13.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from wellposed.certification._as_called import class_called, home_of, is_class
from wellposed.certification._blocks import (
    GELU_TANH,
    SILU,
    function_bound,
    gated_feedforward_bound,
    linear_bound,
    norm_bound,
    slope_rule,
)
from wellposed.certification._bounds import LayerBound, product_of
from wellposed.certification._dot_product import dot_product_ball_bound, on_the_ball
from wellposed.certification._heads import TRAINING_DROPOUT, Affine, AttentionWeights
from wellposed.certification._rules import Refused, Site, register_rule
from wellposed.certification._transformer import named, one_token
from wellposed.linalg import MaskKind

MODELS = "transformers.models"
_IMPLEMENTATIONS = {
    "eager": None,
    "sdpa": ("transformers.integrations.sdpa_attention", "sdpa_attention_forward"),
}
_ACTIVATIONS = "transformers.activations"
# |g(t)| <= |t| for all of them.
_OWN_ACTIVATIONS = {
    "NewGELUActivation": GELU_TANH, "FastGELUActivation": GELU_TANH, "AccurateGELUActivation": GELU_TANH,
    "QuickGELUActivation": SILU, "SiLUActivation": SILU, "LinearActivation": 1.0,
}  # fmt: skip
_HEAD_DIMS = ("head_dim", "attention_head_size", "key_value_proj_dim")
_GELUS = ("GELUActivation", "GELUTanh")
_GATES = {*_OWN_ACTIVATIONS, *_GELUS, "ReLU", "GELU", "SiLU", "Mish", "Tanh"}


def read(owner: nn.Module, path: str, name: str, site: Site, home: str = "") -> Any:
    """Return a part that the rule of ``owner`` reads by itself: vouched for where it is class
    ``name`` of ``home``.

    The home is the file of transformers that the owner's class is from, where not given.
    """
    part = owner.get_submodule(path)
    home = home or next(
        base.__module__ for base in type(owner).__mro__ if base.__module__.startswith(MODELS)
    )
    if is_class(class_called(part), home, name):
        site.reads(part)
    return part


def shifted(site: Site, *tables: nn.Embedding) -> Site:
    """Return the site behind the sum with one row of each table, which moves no more than its
    input."""

    def longest(table: nn.Embedding) -> float:
        return site.remember(
            table, "longest row", lambda: float(table.weight.detach().double().norm(dim=-1).max())
        )

    return site.at_radius(site.radius + sum(longest(table) for table in tables))


def attention(
    owner: nn.Module,
    path: str,
    site: Site,
    projections: Callable[[], tuple[Affine, Affine, Affine, Affine]],
    *rest: str,
    dropout: float,
    causal: bool = False,
    position_bias: bool = False,
    rotary: bool = False,
) -> LayerBound:
    """Bound the self-attention at ``path``, then the parts ``rest`` of its owner (B5, B13).

    Its logits are ``scaling q . k`` plus what depends on positions alone. ``projections`` are those
    of queries, keys, values and output; ``rotary``: positions turn queries and keys.
    """
    module: Any = owner.get_submodule(path)

    def read_weights() -> AttentionWeights:
        # What the call cuts by: whole heads may have been pruned.
        head_dim = next(getattr(module, name) for name in _HEAD_DIMS if hasattr(module, name))
        weights = AttentionWeights.of(*projections(), head_dim)
        stretch = float(module.scaling) * math.sqrt(weights.head_dim)
        return replace(
            weights, query=weights.query * stretch, query_bias=weights.query_bias * stretch
        )

    def bounded() -> LayerBound:
        _refuse_other_attention(module)
        if module.training and dropout > 0:
            return site.refuse(TRAINING_DROPOUT)
        weights = site.remember(module, "AttentionWeights", read_weights)
        site.under_mask("causal" if causal else "full")
        # Padded queries attend to real tokens, so a pattern holds only where the caller says that
        # nothing is padded.
        mask: MaskKind = "any" if position_bias else site.given_mask or "any"
        bound = functools.partial(dot_product_ball_bound, weights, rotary=rotary)
        return on_the_ball(bound, weights, replace(site, given_mask=mask), weights.query.shape[1])

    def found() -> LayerBound:
        try:
            return bounded()
        except Refused as error:
            return site.refuse(str(error))

    mixed = site.record(module, path, found())
    after = site.at_radius(mixed.out_radius).chain(named(owner, *rest))
    return product_of([mixed, after], radius=after.out_radius)


def feedforward(owner: nn.Module, site: Site, up: str, activation: str, *rest: str) -> LayerBound:
    """Bound a linear map, a nonlinearity, and the parts that follow, each at its path in
    ``owner``."""
    first = site.chain(named(owner, up))
    inner = function_bound(
        attrgetter(activation)(owner), site.at_radius(first.out_radius), activation
    )
    after = site.at_radius(inner.out_radius).chain(named(owner, *rest))
    return product_of([first, inner, after], radius=after.out_radius)


def linear_head(owner: Any, path: str, site: Site, before: list[LayerBound]) -> LayerBound:
    """Bound the last linear map behind bounds in their order, and tell the certificate which it
    is."""
    body = site.product(before)
    if hasattr(owner.get_submodule(path), "weight"):
        site.set_head(owner.get_submodule(path).weight, body)
    return site.product([body, site.at_radius(body.out_radius).chain(named(owner, path))])


def picked_token(owner: nn.Module, body: str, site: Site) -> list[LayerBound]:
    """Bound the model inside a classifier, and the token of its output that is taken."""
    hidden = site.chain(named(owner, body))
    return [hidden, site.record(owner, "pool", one_token(site.at_radius(hidden.out_radius)))]


def _refuse_other_attention(module: Any) -> None:
    """Refuse a call whose attention is not the one of transformers that bounds are proved for."""
    kind = module.config._attn_implementation
    if kind not in _IMPLEMENTATIONS:
        raise Refused(
            f"its attention runs as attn_implementation={kind!r}, and a bound is proved for eager"
            " and sdpa alone; load the model with attn_implementation='sdpa'"
        )
    source = sys.modules[class_called(module).__module__]
    run = source.ALL_ATTENTION_FUNCTIONS.get_interface(kind, source.eager_attention_forward)
    expected = {
        f"{kind} attention": (
            run,
            _IMPLEMENTATIONS[kind] or (source.__name__, "eager_attention_forward"),
        )
    }
    for name in ("apply_rotary_pos_emb", "rotate_half", "repeat_kv"):
        if hasattr(source, name):
            expected[name] = (getattr(source, name), (source.__name__, name))
    for what, (function, home) in expected.items():
        if home_of(function) != home:
            raise Refused(
                f"{'.'.join(home_of(function))} stands where transformers runs {what}; put its own"
                " back"
            )


def gated_feedforward(
    site: Site, up: Affine, gate: Affine, down: Affine, activation: nn.Module
) -> LayerBound:
    """Bound ``x -> W_d (g(W_g x) * W_u x)`` on the ball."""
    name = class_called(activation).__name__
    slope = site.child(activation, "activation")
    if name not in _GATES or not math.isfinite(slope.lipschitz):
        return site.refuse(f"its gate is a {name}, for which |g(t)| <= |t| is not known")
    if math.isinf(site.radius):
        return site.refuse_without_ball(
            "a gate multiplies two maps, so it has no global Lipschitz constant"
        )
    up_bias, gate_bias = (
        0.0 if part.bias is None else float(part.bias.detach().double().abs().max())
        for part in (up, gate)
    )
    bound = gated_feedforward_bound(
        up.weight,
        gate.weight,
        down.weight,
        site,
        slope=slope.lipschitz,
        up_bias=up_bias,
        gate_bias=gate_bias,
    )
    return LayerBound(bound, "gated feed-forward, ball R (B9)")


@register_rule("transformers.pytorch_utils.Conv1D")
def _conv1d(module: Any, site: Site) -> LayerBound:
    """A linear map that keeps its weight transposed."""
    return linear_bound(
        site.remember(module, "weight", lambda: module.weight.detach().mT), module.bias, site
    )


for _name, _slope in _OWN_ACTIVATIONS.items():
    slope_rule(f"{_ACTIVATIONS}.{_name}", _slope)


def _gelu(module: Any, site: Site) -> LayerBound:
    """These keep their function in an attribute, which somebody may have replaced."""
    function = module.act.func if isinstance(module.act, functools.partial) else module.act
    if (
        function is not F.gelu
        and getattr(function, "__func__", None) not in vars(class_called(module)).values()
    ):
        return site.refuse(f"its act is {function!r}, not a GELU")
    return LayerBound(GELU_TANH, "largest slope", out_radius=GELU_TANH * site.radius)


for _name in _GELUS:
    register_rule(f"{_ACTIVATIONS}.{_name}")(_gelu)


def _rms_norm(module: Any, site: Site) -> LayerBound:
    width, eps = module.weight.shape[-1], float(module.variance_epsilon)
    found = norm_bound(module.weight, None, site, eps=eps, width=width, centred=False)
    # It divides in float32, whatever the dtype.
    return replace(found, lipschitz=found.lipschitz * (1 + 8 * torch.finfo(torch.float32).eps))


for _name in (
    "t5.modeling_t5.T5LayerNorm",
    "llama.modeling_llama.LlamaRMSNorm",
    "phi3.modeling_phi3.Phi3RMSNorm",
):
    register_rule(f"{MODELS}.{_name}")(_rms_norm)


def refuse_two_sequences(name: str) -> None:
    """Register the answer for a model that maps two sequences: the bound of its encoder, and why
    there is no other."""

    @register_rule(name)
    def _two(module: Any, site: Site) -> LayerBound:
        encoder = module.get_encoder()
        path = next((path for path, part in module.named_modules() if part is encoder), "")
        site.chain(named(module, path) if path else ())
        return site.refuse(
            "its decoder maps two sequences, the source and the target, and no bound is proved for"
            " cross-attention; the rows of its encoder hold, certify that alone"
            " (model.get_encoder())"
        )
