"""How layers, models and heads of Hugging Face are bounded, each described by the paths of its parts;
transformers is never imported, its classes are known by name.

The map that is certified goes from ``inputs_embeds`` to the last hidden state, or to the logits of a
head: theory note B13.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from wellposed.certification._as_called import class_called, home_of, is_class
from wellposed.certification._walk import LayerBound, Refused, RuleContext, register_rule
from wellposed.certification.rules._blocks import of_one_vector, one_token
from wellposed.certification.rules._dot_product import (
    AttentionWeights,
    Slice,
    on_the_ball,
    refuse_dropout,
    slices,
)
from wellposed.certification.rules._torch_layers import (
    GELU_TANH,
    SILU,
    function_bound,
    gated_feedforward_bound,
    linear_bound,
    slope_rule,
)
from wellposed.linalg import MaskKind

MODELS = "transformers.models"
# |g(t)| <= |t| for all of them.
_OWN_ACTIVATIONS = {
    "NewGELUActivation": GELU_TANH, "FastGELUActivation": GELU_TANH, "AccurateGELUActivation": GELU_TANH,
    "QuickGELUActivation": SILU, "SiLUActivation": SILU, "LinearActivation": 1.0,
}  # fmt: skip
_GELUS = ("GELUActivation", "GELUTanh")
_GATES = {*_OWN_ACTIVATIONS, *_GELUS, "ReLU", "GELU", "SiLU", "Mish", "Tanh"}
_HEAD_DIMS = ("head_dim", "attention_head_size")
# These only turn queries and keys; others rescale them by position or length.
_ROTATIONS = ("default", "linear", "dynamic", "llama3")


@dataclass(frozen=True, eq=False)
class Layer:
    """The rule of a layer of one family, by the paths of its parts, several in one text."""

    parts: Mapping[str, str]
    """Modules of transformers' own that the rule reads by itself, and their classes."""
    attention: str
    projections: str
    """Queries, keys, values and output."""
    norms: str
    feedforward: str
    """A linear map, a nonlinearity, and what follows; or of a gated one: up, gate, down,
    nonlinearity."""
    dropout: str
    """Where the dropout of the attention weights stands."""
    mixed: str = ""
    """Parts behind the attention."""
    gated: str = ""
    """Path of the gated feed-forward."""
    before: bool = False
    """Whether norms stand in front of their sublayers."""
    causal: bool | str = False
    """Or where it is said."""
    rotary: bool = False
    """Whether positions turn queries and keys."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Why there is no bound, by an attribute that is true then."""

    def __call__(self, module: Any, context: RuleContext) -> LayerBound:
        read_parts(module, context, self.parts, self.refusals)
        mixed, fed = (functools.partial(branch, module) for branch in (self._mixed, self._fed))
        branches = zip(self.norms.split(), (mixed, fed), strict=True)
        return context.layer(module, *branches, before=self.before)

    def _mixed(self, module: Any, context: RuleContext) -> LayerBound:
        attention = module.get_submodule(self.attention)
        try:
            found = _attention(attention, module, context, self)
        except Refused as error:
            found = context.refuse(str(error))
        found = context.record(attention, self.attention, found)
        return context.then(found, module, self.mixed)

    def _fed(self, module: Any, context: RuleContext) -> LayerBound:
        if self.gated:
            found = _gated(module, context, self.feedforward)
            return context.record(module.get_submodule(self.gated), self.gated, found)
        up, activation, *rest = self.feedforward.split()
        first = context.chain_of(module, up)
        inside = context.at_radius(first.out_radius)
        inner = function_bound(attrgetter(activation)(module), inside, activation)
        return context.then(context.product([first, inner]), module, " ".join(rest))


@dataclass(frozen=True, eq=False)
class Model:
    """The rule of a model without its head: tables whose rows are added, then parts one after the
    other."""

    chain: str
    """Paths; one that ends in a star stands for all layers of a list."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """As those of `Layer`."""
    tables: str = ""
    beside: str = ""
    """A pooler that the last hidden state does not pass."""

    def __call__(self, module: Any, context: RuleContext) -> LayerBound:
        parts = self.parts.items()
        there = {path: name for path, name in parts if attrgetter(path)(module) is not None}
        read_parts(module, context, there)
        if self.beside in there:
            context.reads(attrgetter(self.beside)(module).activation)
        most = None
        if turns := getattr(module, "rotary_emb", None):
            # Decoders that only turn positions call as many layers as their configuration says.
            most = module.config.num_hidden_layers
            if turns.rope_type not in _ROTATIONS or turns.attention_scaling != 1.0:
                raise Refused(
                    f"its positions are of rope_type {turns.rope_type!r}, which rescales queries"
                    " and keys; no bound is proved"
                )
        # The sum with a row of a table moves no more than its input, and is longer by at most this.
        tables = [attrgetter(path)(module) for path in self.tables.split()]
        rows = [context.remember(each, "row", functools.partial(_longest, each)) for each in tables]
        inside = context.at_radius(context.radius + sum(rows))
        return inside.chain_of(module, self.chain, most=most)


def _longest(table: nn.Embedding) -> float:
    return float(table.weight.detach().double().norm(dim=-1).max())


@dataclass(frozen=True, eq=False)
class Head:
    """The rule of a model with its head: the body, one token of it where it is ``pooled``, parts of
    the head and the last linear map."""

    body: str
    last: str
    between: str = ""
    parts: Mapping[str, str] = field(default_factory=dict)
    """As those of `Layer`."""
    pooled: bool = True

    def __call__(self, module: Any, context: RuleContext) -> LayerBound:
        read_parts(module, context, self.parts)
        route = functools.partial(self._route, module)
        return of_one_vector(route, context) if self.pooled else route(context)

    def _route(self, module: Any, context: RuleContext) -> LayerBound:
        hidden = context.chain_of(module, self.body)
        if self.pooled:
            token = context.record(module, "pool", one_token(context.at_radius(hidden.out_radius)))
            hidden = context.product([hidden, token])
        before = context.then(hidden, module, self.between)
        context.set_head(module.get_submodule(self.last), before)
        return context.then(before, module, self.last)


def read_parts(
    owner: Any, context: RuleContext, parts: Mapping[str, str], refusals: Mapping[str, str] = {}
) -> None:
    """Vouch for parts that the rule of ``owner`` reads by itself, where each is of this class of the
    file of transformers that the owner's class is from."""
    for attribute, reason in refusals.items():
        if getattr(owner, attribute, False):
            raise Refused(reason)
    lineage = type(owner).__mro__
    home = next(base.__module__ for base in lineage if base.__module__.startswith(MODELS))
    for path, name in parts.items():
        part = owner.get_submodule(path)
        if is_class(class_called(part), home, name):
            context.reads(part)


def _attention(module: Any, owner: Any, context: RuleContext, layer: Layer) -> LayerBound:
    """Bound self-attention with logits ``scaling q . k`` plus a mask (B5, B13)."""
    _refuse_other_attention(module)
    refuse_dropout(module, attrgetter(layer.dropout)(owner))

    def read_weights() -> AttentionWeights:
        # What the call cuts by: whole heads may have been pruned.
        head_dim = next(getattr(module, name) for name in _HEAD_DIMS if hasattr(module, name))
        q, k, v, o = _projections(module, owner, layer.projections, head_dim, context)
        weights = AttentionWeights.of(q, k, v, o, head_dim)
        stretch = float(module.scaling) * math.sqrt(head_dim)
        query, bias = weights.query * stretch, weights.query_bias * stretch
        return replace(weights, query=query, query_bias=bias)

    weights = context.remember(module, "AttentionWeights", read_weights)
    causal, unsure = layer.causal, False
    if isinstance(causal, str):
        causal = attrgetter(causal)(owner)
        # The mask is made by the configuration, which may have been edited since.
        unsure = module.config.is_decoder != causal
    context.under_mask("causal" if causal else "full")
    # Padded queries attend to real tokens, so a pattern holds only where the caller says that
    # nothing is padded.
    mask: MaskKind = "any" if unsure else context.given_mask or "any"
    given = replace(context, given_mask=mask)
    return on_the_ball(weights, given, rotary=layer.rotary)


def _projections(
    module: Any, owner: nn.Module, paths: str, head_dim: int, context: RuleContext
) -> list[Any]:
    """Return the maps of queries, keys, values and output: apart, or cut out of one weight."""
    parts: list[Any] = [owner.get_submodule(path) for path in paths.split()]
    groups = getattr(module, "num_key_value_groups", 1)
    if len(parts) == 2 and hasattr(module, "split_size"):  # GPT-2
        for part in parts:
            if not is_class(class_called(part), "transformers.pytorch_utils", "Conv1D"):
                raise Refused(f"it reads a {type(part).__name__} where GPT-2 has a Conv1D")
            context.reads(part)
        fused, output = parts
        sizes = [module.split_size] * 3
        # The call cuts its output so, which pruning may have changed.
        if fused.weight.shape[1] != sum(sizes):
            raise Refused(
                f"its c_attn makes {fused.weight.shape[1]} numbers of a token, and its call cuts them"
                f" into {sizes}; set split_size so that these sum to {fused.weight.shape[1]}"
            )
        cut = slices(fused.weight.mT, fused.bias, sizes)
        return [*cut, Slice(output.weight.mT, output.bias)]
    if groups > 1:
        parts[1:3] = [_repeated(part, groups, head_dim) for part in parts[1:3]]
    return parts


def _repeated(part: Any, groups: int, head_dim: int) -> Slice:
    """Queries of one group share a head of keys and values: the projection with that head once for
    each of them."""

    def repeat(rows: torch.Tensor) -> torch.Tensor:
        return rows.unflatten(0, (-1, head_dim)).repeat_interleave(groups, 0).flatten(0, 1)

    return Slice(repeat(part.weight), None if part.bias is None else repeat(part.bias))


def _refuse_other_attention(module: Any) -> None:
    """Refuse a call whose attention is not the one of transformers that bounds are proved for."""
    kind = module.config._attn_implementation
    source = sys.modules[class_called(module).__module__]
    homes = {
        "eager": (source.__name__, "eager_attention_forward"),
        "sdpa": ("transformers.integrations.sdpa_attention", "sdpa_attention_forward"),
    }
    if kind not in homes:
        raise Refused(
            f"its attention runs as attn_implementation={kind!r}, and a bound is proved for eager"
            " and sdpa alone; load the model with attn_implementation='sdpa'"
        )
    run = source.ALL_ATTENTION_FUNCTIONS.get_interface(kind, source.eager_attention_forward)
    functions = [(f"{kind} attention", run, homes[kind])]
    called = sys.modules[homes[kind][0]]
    if hasattr(called, "repeat_kv"):
        functions.append(("repeat_kv", called.repeat_kv, (called.__name__, "repeat_kv")))
    helpers = {"apply_chunking_to_forward": "transformers.pytorch_utils"}
    helpers |= dict.fromkeys(("apply_rotary_pos_emb", "rotate_half", "repeat_kv"), source.__name__)
    functions += [
        (name, getattr(source, name), (place, name))
        for name, place in helpers.items()
        if hasattr(source, name)
    ]
    for what, function, home in functions:
        if home_of(function) != home:
            raise Refused(
                f"{'.'.join(home_of(function))} stands where transformers runs {what}; put its own"
                " back"
            )


def _gated(module: Any, context: RuleContext, paths: str) -> LayerBound:
    """Bound ``x -> W_d (g(W_g x) * W_u x)`` on the ball."""
    *maps, path = paths.split()
    parts: list[Any] = [module.get_submodule(part) for part in maps]
    up, gate, down = parts
    activation = attrgetter(path)(module)
    name = class_called(activation).__name__
    entering = linear_bound(gate.weight, gate.bias, context).out_radius
    slope = context.child(activation, path, radius=entering)
    if name not in _GATES or not math.isfinite(slope.lipschitz):
        return context.refuse(f"its gate is a {name}, for which |g(t)| <= |t| is not known")
    if math.isinf(context.radius):
        return context.refuse_without_ball(
            "a gate multiplies two maps, so it has no global Lipschitz constant"
        )
    up_bias, gate_bias = (
        0.0 if part.bias is None else float(part.bias.detach().double().abs().max())
        for part in (up, gate)
    )
    biases = {"up_bias": up_bias, "gate_bias": gate_bias}
    weights = (up.weight, gate.weight, down.weight)
    bound = gated_feedforward_bound(*weights, context, slope=slope.lipschitz, **biases)
    return LayerBound(bound, "gated feed-forward, ball R (B9)")


@register_rule("transformers.pytorch_utils.Conv1D")
def _conv1d(module: Any, context: RuleContext) -> LayerBound:
    """A linear map that keeps its weight transposed."""
    weight = context.remember(module, "weight", lambda: module.weight.detach().mT)
    return linear_bound(weight, module.bias, context)


def _gelu(module: Any, context: RuleContext) -> LayerBound:
    """These keep their function in an attribute, which somebody may have replaced."""
    function = module.act.func if isinstance(module.act, functools.partial) else module.act
    own = vars(class_called(module)).values()
    if function is not F.gelu and getattr(function, "__func__", None) not in own:
        return context.refuse(f"its act is {function!r}, not a GELU")
    return LayerBound(GELU_TANH, "largest slope", out_radius=GELU_TANH * context.radius)


for _name in _GELUS:
    register_rule(f"transformers.activations.{_name}")(_gelu)
for _name, _slope in _OWN_ACTIVATIONS.items():
    slope_rule(f"transformers.activations.{_name}", _slope)
