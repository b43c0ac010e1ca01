"""How a layer, a model and a head of Hugging Face are bounded, each described by the paths of its
parts; transformers is never imported, its classes are known by name.

The map that is certified goes from ``inputs_embeds`` (for images from patches of pixels) to the
last hidden state, or to the logits of a head: theory note B13.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from wellposed.certification._as_called import class_called, home_of, is_class
from wellposed.certification._attention import (
    TRAINING_DROPOUT,
    Affine,
    AttentionWeights,
    Slice,
    dot_product_ball_bound,
    on_the_ball,
    slices,
)
from wellposed.certification._blocks import (
    GELU_TANH,
    SILU,
    function_bound,
    gated_feedforward_bound,
    linear_bound,
    named,
    normed,
    of_one_vector,
    one_token,
)
from wellposed.certification._rules import LayerBound, Refused, Site, product_of
from wellposed.linalg import MaskKind

MODELS = "transformers.models"
# |g(t)| <= |t| for all of them.
OWN_ACTIVATIONS = {
    "NewGELUActivation": GELU_TANH, "FastGELUActivation": GELU_TANH, "AccurateGELUActivation": GELU_TANH,
    "QuickGELUActivation": SILU, "SiLUActivation": SILU, "LinearActivation": 1.0,
}  # fmt: skip
GELUS = ("GELUActivation", "GELUTanh")
_GATES = {*OWN_ACTIVATIONS, *GELUS, "ReLU", "GELU", "SiLU", "Mish", "Tanh"}
_HEAD_DIMS = ("head_dim", "attention_head_size", "key_value_proj_dim")

Refusal = Callable[[Any], str | None]


@dataclass(frozen=True)
class Layer:
    """A layer of one family, by the paths of its parts, several in one text; see `layer_bound`."""

    parts: dict[str, str]
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
    fed: str = ""
    """Parts behind a gated feed-forward."""
    gated: str = ""
    """Path of the gated feed-forward."""
    before: bool = False
    """Whether norms stand in front of their sublayers."""
    causal: bool | str = False
    """Or where it is said."""
    positions: str = ""
    """``"rotary"``: they turn queries and keys; ``"bias"``: they are added to the logits."""
    refusal: Refusal | None = None
    """Why a module has no bound, where it has none."""


def layer_bound(module: Any, site: Site, *, layer: Layer) -> LayerBound:
    for path, name in layer.parts.items():
        read(module, path, name, site)
    if layer.refusal and (reason := layer.refusal(module)):
        return site.refuse(reason)

    def mixed(at: Site) -> LayerBound:
        path = layer.attention
        try:
            found = _attention(module.get_submodule(path), module, at, layer)
        except Refused as error:
            found = at.refuse(str(error))
        found = at.record(module.get_submodule(path), path, found)
        return followed_by(found, module, at, layer.mixed)

    def fed(at: Site) -> LayerBound:
        if layer.gated:
            found = _gated(module, at, layer)
            return followed_by(
                at.record(module.get_submodule(layer.gated), layer.gated, found),
                module,
                at,
                layer.fed,
            )
        up, activation, *rest = layer.feedforward.split()
        first = at.chain(named(module, up))
        inside = at.at_radius(first.out_radius)
        inner = function_bound(attrgetter(activation)(module), inside, activation)
        return followed_by(product_of([first, inner]), module, at, " ".join(rest))

    branches = zip(layer.norms.split(), (mixed, fed), strict=True)
    return normed(module, site, *branches, before=layer.before)


def followed_by(first: LayerBound, owner: nn.Module, site: Site, rest: str) -> LayerBound:
    """Multiply a bound by those of the parts ``rest`` of ``owner``, applied after it in this order."""
    parts = named(owner, *rest.split())
    return product_of([first, site.at_radius(first.out_radius).chain(parts)])


def read(owner: nn.Module, path: str, name: str, site: Site) -> Any:
    """Return a part that the rule of ``owner`` reads by itself: vouched for where it is class
    ``name`` of the file of transformers that the owner's class is from."""
    part, lineage = owner.get_submodule(path), type(owner).__mro__
    home = next(base.__module__ for base in lineage if base.__module__.startswith(MODELS))
    if is_class(class_called(part), home, name):
        site.reads(part)
    return part


def _attention(module: Any, owner: Any, site: Site, layer: Layer) -> LayerBound:
    """Bound self-attention with logits ``scaling q . k`` plus what depends on positions alone (B5,
    B13)."""
    _refuse_other_attention(module)
    if module.training and attrgetter(layer.dropout)(owner) > 0:
        return site.refuse(TRAINING_DROPOUT)

    def read_weights() -> AttentionWeights:
        # What the call cuts by: whole heads may have been pruned.
        head_dim = next(getattr(module, name) for name in _HEAD_DIMS if hasattr(module, name))
        q, k, v, o = _projections(module, owner, layer.projections, head_dim, site)
        weights = AttentionWeights.of(q, k, v, o, head_dim)
        stretch = float(module.scaling) * math.sqrt(head_dim)
        query, bias = weights.query * stretch, weights.query_bias * stretch
        return replace(weights, query=query, query_bias=bias)

    weights = site.remember(module, "AttentionWeights", read_weights)
    causal, unsure = layer.causal, layer.positions == "bias"
    if isinstance(causal, str):
        causal = attrgetter(causal)(owner)
        # The mask is made by the configuration, which may have been edited since.
        unsure = module.config.is_decoder != causal
    site.under_mask("causal" if causal else "full")
    # Padded queries attend to real tokens, so a pattern holds only where the caller says that
    # nothing is padded.
    mask: MaskKind = "any" if unsure else site.given_mask or "any"
    rotary = layer.positions == "rotary"
    bound = partial(dot_product_ball_bound, weights, rotary=rotary)
    return on_the_ball(bound, weights, replace(site, given_mask=mask), weights.query.shape[1])


def _projections(module: Any, owner: nn.Module, paths: str, head_dim: int, site: Site) -> list[Any]:
    """Return the maps of queries, keys, values and output: apart, or cut out of one weight."""
    parts: list[Any] = [owner.get_submodule(path) for path in paths.split()]
    groups = getattr(module, "num_key_value_groups", 1)
    if len(parts) == 2 and hasattr(module, "split_size"):  # GPT-2
        for part in parts:
            if not is_class(class_called(part), "transformers.pytorch_utils", "Conv1D"):
                raise Refused(f"it reads a {type(part).__name__} where GPT-2 has a Conv1D")
            site.reads(part)
        fused, output = parts
        sizes = [module.split_size] * 3
        cut = _cut(Slice(fused.weight.mT, fused.bias), sizes, "its c_attn", "split_size")
        return [*cut, Slice(output.weight.mT, output.bias)]
    if len(parts) == 2:  # Phi-3
        keys = module.num_key_value_heads * head_dim
        queries = module.config.num_attention_heads * head_dim
        counts = "num_attention_heads and num_key_value_heads"
        parts = [*_cut(parts[0], [queries, keys, keys], "its qkv_proj", counts), parts[1]]
    if groups > 1:
        parts[1:3] = [_repeated(part, groups, head_dim) for part in parts[1:3]]
    return parts


def _cut(fused: Affine, sizes: list[int], name: str, told_by: str) -> list[Slice]:
    """Cut one weight as the call cuts its output, which pruning may have changed."""
    if len(fused.weight) != sum(sizes):
        raise Refused(
            f"{name} makes {len(fused.weight)} numbers of a token, and its call cuts them into"
            f" {sizes}; set {told_by} so that these sum to"
            f" {len(fused.weight)}"
        )
    return slices(fused.weight, fused.bias, sizes)


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


def _gated(module: Any, site: Site, layer: Layer) -> LayerBound:
    """Bound ``x -> W_d (g(W_g x) * W_u x)`` on the ball."""
    *maps, path = layer.feedforward.split()
    parts: list[Any] = [module.get_submodule(part) for part in maps]
    if len(parts) == 2:  # gate and up in one weight
        fused, down = parts
        gate, up = slices(fused.weight, fused.bias, [fused.weight.shape[0] // 2] * 2)
    else:
        up, gate, down = parts
    activation = attrgetter(path)(module)
    name = class_called(activation).__name__
    entering = linear_bound(gate.weight, gate.bias, site).out_radius
    slope = site.child(activation, path, radius=entering)
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
    biases = {"up_bias": up_bias, "gate_bias": gate_bias}
    weights = (up.weight, gate.weight, down.weight)
    bound = gated_feedforward_bound(*weights, site, slope=slope.lipschitz, **biases)
    return LayerBound(bound, "gated feed-forward, ball R (B9)")


@dataclass(frozen=True)
class Model:
    """A model without its head: tables whose rows are added, then parts one after the other."""

    chain: str
    """Paths; one that ends in a star stands for all layers of a list."""
    parts: dict[str, str] = field(default_factory=dict)
    """As those of `Layer`."""
    tables: str = ""
    beside: str = ""
    """A pooler that the last hidden state does not pass."""
    refusal: Refusal | None = None


def model_bound(module: Any, site: Site, *, model: Model) -> LayerBound:
    if model.refusal and (reason := model.refusal(module)):
        return site.refuse(reason)
    for path, name in model.parts.items():
        part = attrgetter(path)(module)
        if part is not None:
            read(module, path, name, site)
        if part is not None and path == model.beside:
            site.reads(part.activation)
    # The sum with a row of a table moves no more than its input, and is longer by at most this.
    tables = [attrgetter(path)(module) for path in model.tables.split()]
    longest = sum(site.remember(table, "longest row", partial(_longest, table)) for table in tables)
    parts = named(module, *paths_of(module, model.chain))
    return site.at_radius(site.radius + longest).chain(parts)


def _longest(table: nn.Embedding) -> float:
    return float(table.weight.detach().double().norm(dim=-1).max())


def paths_of(module: Any, chain: str) -> list[str]:
    paths: list[str] = []
    for path in chain.split():
        if path.endswith("*"):
            stack: Any = module.get_submodule(path[:-2])
            # Decoders that only turn positions call as many layers as their configuration says.
            turns = hasattr(module, "rotary_emb")
            called = stack[: module.config.num_hidden_layers] if turns else stack
            paths += [f"{path[:-1]}{index}" for index in range(len(called))]
        else:
            paths.append(path)
    return paths


def head_bound(
    module: Any, site: Site, *, body: str, last: str, between: str = "", pooled: bool = True
) -> LayerBound:
    """Bound a model, the token that is taken where it is ``pooled``, parts of a head and the last
    linear map."""
    hidden = site.chain(named(module, body))
    if pooled:
        token = site.record(module, "pool", one_token(site.at_radius(hidden.out_radius)))
        hidden = product_of([hidden, token])
    before = followed_by(hidden, module, site, between)
    site.set_head(module.get_submodule(last), before)
    return followed_by(before, module, site, last)


def classifier(
    module: Any, site: Site, *, parts: dict[str, str] | None = None, **head: Any
) -> LayerBound:
    for path, name in (parts or {}).items():
        read(module, path, name, site)
    return of_one_vector(partial(head_bound, module, **head), site)
