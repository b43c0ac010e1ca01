"""Rules of Hugging Face families, each layer and model by the paths of its parts; transformers is
never imported, its classes are known by name.

The map that is certified goes from ``inputs_embeds`` (for images from patches of pixels) to the
last hidden state, or to the logits of a head: theory note B13.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from wellposed.certification._as_called import class_called, home_of, is_class
from wellposed.certification._attention import (
    TRAINING_DROPOUT,
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
    norm_bound,
    normed,
    of_one_vector,
    one_token,
    slope_rule,
)
from wellposed.certification._rules import LayerBound, Refused, Site, product_of, register_rule
from wellposed.linalg import MaskKind

MODELS = "transformers.models"
_ACTIVATIONS = "transformers.activations"
# |g(t)| <= |t| for all of them.
_OWN_ACTIVATIONS = {
    "NewGELUActivation": GELU_TANH, "FastGELUActivation": GELU_TANH, "AccurateGELUActivation": GELU_TANH,
    "QuickGELUActivation": SILU, "SiLUActivation": SILU, "LinearActivation": 1.0,
}  # fmt: skip
_GELUS = ("GELUActivation", "GELUTanh")
_GATES = {*_OWN_ACTIVATIONS, *_GELUS, "ReLU", "GELU", "SiLU", "Mish", "Tanh"}
_HEAD_DIMS = ("head_dim", "attention_head_size", "key_value_proj_dim")
# These only turn queries and keys; others rescale them by position or length.
_ROTATIONS = ("default", "linear", "dynamic", "llama3")
_TWO_SEQUENCES = "with cross-attention it maps two sequences"
_TWO_IN_A_DECODER = "a decoder maps two sequences, and no bound is proved for cross-attention"
_DRAWS = "it drops layers or values without a module of its own in train mode; call eval()"

Refusal = Callable[[Any], str | None]


def _never(module: Any) -> str | None:
    del module
    return None


@dataclass(frozen=True)
class Layer:
    """A layer of one family, by the paths of its parts, several in one text; see `_layer_bound`."""

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
    refusal: Refusal = _never


def _layer_bound(module: Any, site: Site, *, layer: Layer) -> LayerBound:
    for path, name in layer.parts.items():
        read(module, path, name, site)
    reason = layer.refusal(module)
    if reason is not None:
        return site.refuse(reason)

    def mixed(at: Site) -> LayerBound:
        path = layer.attention
        try:
            found = _attention(module.get_submodule(path), module, at, layer)
        except Refused as error:
            found = at.refuse(str(error))
        found = at.record(module.get_submodule(path), path, found)
        return _then(found, module, at, layer.mixed)

    def fed(at: Site) -> LayerBound:
        if layer.gated:
            found = _gated(module, at, layer)
            return _then(
                at.record(module.get_submodule(layer.gated), layer.gated, found),
                module,
                at,
                layer.fed,
            )
        up, activation, *rest = layer.feedforward.split()
        first = at.chain(named(module, up))
        inside = at.at_radius(first.out_radius)
        inner = function_bound(attrgetter(activation)(module), inside, activation)
        return _then(product_of([first, inner]), module, at, " ".join(rest))

    return normed(
        module, site, *zip(layer.norms.split(), (mixed, fed), strict=True), before=layer.before
    )


def _then(first: LayerBound, owner: nn.Module, site: Site, rest: str) -> LayerBound:
    """Bound what was found and the parts behind it."""
    parts = named(owner, *rest.split())
    return product_of([first, site.at_radius(first.out_radius).chain(parts)])


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
    causal = attrgetter(layer.causal)(owner) if isinstance(layer.causal, str) else layer.causal
    site.under_mask("causal" if causal else "full")
    # Padded queries attend to real tokens, so a pattern holds only where the caller says that
    # nothing is padded.
    mask: MaskKind = "any" if layer.positions == "bias" else site.given_mask or "any"
    rotary = layer.positions == "rotary"
    bound = functools.partial(dot_product_ball_bound, weights, rotary=rotary)
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
        rows = fused.weight.shape[1]
        if rows != 3 * module.split_size:
            raise Refused(
                f"its c_attn makes {rows} numbers of a token, and its call cuts them by split_size ="
                f" {module.split_size}; set split_size to a third of what pruning has left"
            )
        cut = slices(fused.weight.mT, fused.bias, [rows // 3] * 3)
        return [*cut, Slice(output.weight.mT, output.bias)]
    if len(parts) == 2:  # Phi-3
        keys = module.num_key_value_heads * head_dim
        queries = module.config.num_attention_heads * head_dim
        rows = parts[0].weight.shape[0]
        if rows != queries + 2 * keys:
            raise Refused(
                f"its qkv_proj makes {rows} numbers of a token, and its call cuts them into"
                f" {queries} of queries and twice {keys}; set num_attention_heads and"
                " num_key_value_heads to what pruning has left"
            )
        parts = [*slices(parts[0].weight, parts[0].bias, [queries, keys, keys]), parts[1]]
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
    refusal: Refusal = _never


def _model_bound(module: Any, site: Site, *, model: Model) -> LayerBound:
    reason = model.refusal(module)
    if reason is not None:
        return site.refuse(reason)
    for path, name in model.parts.items():
        part = attrgetter(path)(module)
        if part is not None:
            read(module, path, name, site)
        if part is not None and path == model.beside:
            site.reads(part.activation)
    longest = sum(_longest_row(attrgetter(path)(module), site) for path in model.tables.split())
    return site.at_radius(site.radius + longest).chain(named(module, *_paths(module, model.chain)))


def _longest_row(table: nn.Embedding, site: Site) -> float:
    """The sum with a row of a table moves no more than its input, and is longer by at most this."""
    return site.remember(
        table, "longest row", lambda: float(table.weight.detach().double().norm(dim=-1).max())
    )


def _paths(module: Any, chain: str) -> list[str]:
    paths: list[str] = []
    for path in chain.split():
        if path.endswith("*"):
            stack: Any = module.get_submodule(path[:-2])
            # Decoders that only turn positions call as many layers as their configuration says.
            called = (
                stack[: module.config.num_hidden_layers] if hasattr(module, "rotary_emb") else stack
            )
            paths += [f"{path[:-1]}{index}" for index in range(len(called))]
        else:
            paths.append(path)
    return paths


def _head_bound(
    module: Any,
    site: Site,
    *,
    body: str,
    last: str,
    between: str = "",
    pooled: bool = True,
) -> LayerBound:
    """Bound a model, the token that is taken where it is ``pooled``, parts of a head and the last
    linear map."""
    hidden = site.chain(named(module, body))
    if pooled:
        token = site.record(module, "pool", one_token(site.at_radius(hidden.out_radius)))
        hidden = product_of([hidden, token])
    before = _then(hidden, module, site, between)
    linear = module.get_submodule(last)
    if hasattr(linear, "weight"):
        site.set_head(linear.weight, before)
    return _then(before, module, site, last)


def _classifier(
    module: Any, site: Site, *, parts: dict[str, str] | None = None, **head: Any
) -> LayerBound:
    for path, name in (parts or {}).items():
        read(module, path, name, site)
    return of_one_vector(functools.partial(_head_bound, module, **head), site)


def _source(family: str) -> str:
    return f"{MODELS}.{family}.modeling_{family}"


def _register(name: str, rule: Callable[..., LayerBound], **options: Any) -> None:
    register_rule(name)(functools.partial(rule, **options))


def _bert(family: str, prefix: str, **head: Any) -> None:
    """BERT and RoBERTa: a LayerNorm on the embeddings and after every sublayer."""
    parts = {
        "attention": "Attention",
        "attention.self": "SelfAttention",
        "attention.output": "SelfOutput",
        "intermediate": "Intermediate",
        "output": "Output",
    }
    layer = Layer(
        parts={path: prefix + name for path, name in parts.items()},
        attention="attention.self",
        projections="attention.self.query attention.self.key attention.self.value"
        " attention.output.dense",
        mixed="attention.output.dropout",
        norms="attention.output.LayerNorm output.LayerNorm",
        feedforward="intermediate.dense intermediate.intermediate_act_fn output.dense output.dropout",
        dropout="attention.self.dropout.p",
        causal="attention.self.is_causal",
        refusal=lambda module: _TWO_SEQUENCES if module.add_cross_attention else None,
    )
    source = _source(family)
    _register(f"{source}.{prefix}Layer", _layer_bound, layer=layer)
    model = Model(
        parts={path: prefix + path.capitalize() for path in ("embeddings", "encoder", "pooler")},
        tables="embeddings.position_embeddings embeddings.token_type_embeddings",
        chain="embeddings.LayerNorm embeddings.dropout encoder.layer.*",
        beside="pooler",
    )
    _register(f"{source}.{prefix}Model", _model_bound, model=model)
    _register(f"{source}.{prefix}ForSequenceClassification", _classifier, body=family, **head)


_bert(
    "bert",
    "Bert",
    parts={"bert.pooler": "BertPooler"},
    between="bert.pooler.dense bert.pooler.activation dropout",
    last="classifier",
)
# Its dropout stands twice, and a tanh of slope 1 between dense and out_proj.
_bert(
    "roberta",
    "Roberta",
    parts={"classifier": "RobertaClassificationHead"},
    between="classifier.dropout classifier.dense classifier.dropout",
    last="classifier.out_proj",
)


DISTILBERT = _source("distilbert")
_DISTILBERT_BLOCK = Layer(
    parts={"attention": "DistilBertSelfAttention", "ffn": "FFN"},
    attention="attention",
    projections="attention.q_lin attention.k_lin attention.v_lin attention.out_lin",
    norms="sa_layer_norm output_layer_norm",
    feedforward="ffn.lin1 ffn.activation ffn.lin2 ffn.dropout",
    dropout="attention.dropout.p",
)
_DISTILBERT = Model(
    parts={"embeddings": "Embeddings", "transformer": "Transformer"},
    tables="embeddings.position_embeddings",
    chain="embeddings.LayerNorm embeddings.dropout transformer.layer.*",
)
_register(f"{DISTILBERT}.TransformerBlock", _layer_bound, layer=_DISTILBERT_BLOCK)
_register(f"{DISTILBERT}.DistilBertModel", _model_bound, model=_DISTILBERT)
# A ReLU, of slope 1, stands between pre_classifier and dropout.
_register(
    f"{DISTILBERT}.DistilBertForSequenceClassification",
    _classifier,
    body="distilbert",
    between="pre_classifier dropout",
    last="classifier",
)


def _bart(family: str, prefix: str, positions: str, norms: str = "") -> None:
    """The encoder of BART or Marian; ``norms`` stand on the sum of embeddings and positions."""
    source = _source(family)
    layer = Layer(
        parts={"self_attn": f"{prefix}Attention"},
        attention="self_attn",
        projections="self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj",
        norms="self_attn_layer_norm final_layer_norm",
        feedforward="fc1 activation_fn fc2",
        dropout="self_attn.dropout",
        refusal=lambda module: _DRAWS if module.training else None,
    )
    _register(f"{source}.{prefix}EncoderLayer", _layer_bound, layer=layer)
    model = Model(
        parts={"embed_tokens": f"{prefix}ScaledWordEmbedding", "embed_positions": positions},
        tables="embed_positions",
        chain=f"{norms} layers.*",
        refusal=layer.refusal,
    )
    _register(f"{source}.{prefix}Encoder", _model_bound, model=model)


_bart("bart", "Bart", "BartLearnedPositionalEmbedding", "layernorm_embedding")
_bart("marian", "Marian", "MarianSinusoidalPositionalEmbedding")


GPT2 = _source("gpt2")
_GPT2_BLOCK = Layer(
    parts={"attn": "GPT2Attention", "mlp": "GPT2MLP"},
    attention="attn",
    projections="attn.c_attn attn.c_proj",
    mixed="attn.resid_dropout",
    norms="ln_1 ln_2",
    feedforward="mlp.c_fc mlp.act mlp.c_proj mlp.dropout",
    dropout="attn.attn_dropout.p",
    before=True,
    causal=True,
    refusal=lambda module: _TWO_SEQUENCES if hasattr(module, "crossattention") else None,
)
# Token types, where given, are rows of the token embedding.
_GPT2 = Model(tables="wpe wte", chain="drop h.* ln_f")
_register(f"{GPT2}.GPT2Block", _layer_bound, layer=_GPT2_BLOCK)
_register(f"{GPT2}.GPT2Model", _model_bound, model=_GPT2)
# A linear map of every token, of which the last real one is taken.
_register(f"{GPT2}.GPT2ForSequenceClassification", _classifier, body="transformer", last="score")


def _turned(module: Any) -> str | None:
    turns = module.rotary_emb
    if turns.rope_type in _ROTATIONS and turns.attention_scaling == 1.0:
        return None
    return (
        f"its positions are of rope_type {turns.rope_type!r}, which rescales queries and keys; no"
        " bound is proved"
    )


def _rotary(family: str, prefix: str, **options: Any) -> None:
    """Llama and Phi-3."""
    layer = Layer(
        parts={"self_attn": f"{prefix}Attention", "mlp": f"{prefix}MLP"},
        attention="self_attn",
        norms="input_layernorm post_attention_layernorm",
        gated="mlp",
        dropout="self_attn.attention_dropout",
        before=True,
        causal=True,
        positions="rotary",
        **options,
    )
    source = _source(family)
    parts = {"rotary_emb": f"{prefix}RotaryEmbedding"}
    model = Model(parts=parts, chain="layers.* norm", refusal=_turned)
    _register(f"{source}.{prefix}DecoderLayer", _layer_bound, layer=layer)
    _register(f"{source}.{prefix}Model", _model_bound, model=model)


_rotary(
    "llama",
    "Llama",
    projections="self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj",
    feedforward="mlp.up_proj mlp.gate_proj mlp.down_proj mlp.act_fn",
)
_rotary(
    "phi3",
    "Phi3",
    projections="self_attn.qkv_proj self_attn.o_proj",
    feedforward="mlp.gate_up_proj mlp.down_proj mlp.activation_fn",
    mixed="resid_attn_dropout",
    fed="resid_mlp_dropout",
)
for _family, _name, _body in (
    ("gpt2", "GPT2LMHeadModel", "transformer"),
    ("llama", "LlamaForCausalLM", "model"),
    ("phi3", "Phi3ForCausalLM", "model"),
):
    _register(f"{_source(_family)}.{_name}", _head_bound, body=_body, last="lm_head", pooled=False)


T5 = _source("t5")
# An RMSNorm in front of every sublayer, logits without 1/sqrt(d) plus a bias of positions.
_HEADS, _FED = "layer.0.SelfAttention", "layer.1.DenseReluDense"
_T5_PARTS = {"layer.0": "T5LayerSelfAttention", "layer.1": "T5LayerFF", _HEADS: "T5Attention"}
_T5_BLOCK = Layer(
    parts={**_T5_PARTS, _FED: "T5DenseActDense"},
    attention=_HEADS,
    projections=f"{_HEADS}.q {_HEADS}.k {_HEADS}.v {_HEADS}.o",
    mixed="layer.0.dropout",
    norms="layer.0.layer_norm layer.1.layer_norm",
    feedforward=f"{_FED}.wi {_FED}.act {_FED}.wo {_FED}.dropout layer.1.dropout",
    dropout=f"{_HEADS}.dropout",
    before=True,
    positions="bias",
    refusal=lambda module: _TWO_IN_A_DECODER if module.is_decoder else None,
)
_T5_GATED = replace(
    _T5_BLOCK,
    parts={**_T5_PARTS, _FED: "T5DenseGatedActDense"},
    gated=_FED,
    feedforward=f"{_FED}.wi_1 {_FED}.wi_0 {_FED}.wo {_FED}.act",
    fed=f"{_FED}.dropout layer.1.dropout",
)
_T5_STACK = Model(chain="dropout block.* final_layer_norm dropout", refusal=_T5_BLOCK.refusal)


@register_rule(f"{T5}.T5Block")
def _t5_block(module: Any, site: Site) -> LayerBound:
    gated = not module.is_decoder and hasattr(module.layer[1].DenseReluDense, "wi_0")
    return _layer_bound(module, site, layer=_T5_GATED if gated else _T5_BLOCK)


_register(f"{T5}.T5Stack", _model_bound, model=_T5_STACK)
_register(f"{T5}.T5EncoderModel", _model_bound, model=Model(chain="encoder"))


VIT = _source("vit")
_VIT_LAYER = Layer(
    parts={"attention": "ViTAttention", "mlp": "ViTMLP"},
    attention="attention",
    projections="attention.q_proj attention.k_proj attention.v_proj attention.o_proj",
    mixed="dropout",
    norms="layernorm_before layernorm_after",
    feedforward="mlp.fc1 mlp.activation_fn mlp.fc2 dropout",
    dropout="attention.attention_dropout",
    before=True,
)
_register(f"{VIT}.ViTLayer", _layer_bound, layer=_VIT_LAYER)
_register(f"{VIT}.ViTForImageClassification", _classifier, body="vit", last="classifier")


@register_rule(f"{VIT}.ViTModel")
def _vit(module: Any, site: Site) -> LayerBound:
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
    weight = site.remember(patches, "weight", lambda: cut.weight.detach().flatten(1))
    found = linear_bound(weight, cut.bias, site)
    embedded = site.record(patches, "embeddings.patch_embeddings", found)
    positions = embeddings.position_embeddings.detach().double()[0]
    first = float((embeddings.cls_token.detach().double()[0] + positions[:1]).norm())
    radius = max(first, embedded.out_radius + float(positions.norm(dim=-1).max()))
    # The class token stands beside the patches and does not move.
    inside = replace(site, seq_len=patches.num_patches + 1, radius=radius)
    paths = _paths(module, "embeddings.dropout layers.* layernorm")
    return product_of([embedded, inside.chain(named(module, *paths))])


@register_rule("transformers.pytorch_utils.Conv1D")
def _conv1d(module: Any, site: Site) -> LayerBound:
    """A linear map that keeps its weight transposed."""
    weight = site.remember(module, "weight", lambda: module.weight.detach().mT)
    return linear_bound(weight, module.bias, site)


for _name, _slope in _OWN_ACTIVATIONS.items():
    slope_rule(f"{_ACTIVATIONS}.{_name}", _slope)


def _gelu(module: Any, site: Site) -> LayerBound:
    """These keep their function in an attribute, which somebody may have replaced."""
    function = module.act.func if isinstance(module.act, functools.partial) else module.act
    own = vars(class_called(module)).values()
    if function is not F.gelu and getattr(function, "__func__", None) not in own:
        return site.refuse(f"its act is {function!r}, not a GELU")
    return LayerBound(GELU_TANH, "largest slope", out_radius=GELU_TANH * site.radius)


for _name in _GELUS:
    register_rule(f"{_ACTIVATIONS}.{_name}")(_gelu)


def _rms_norm(module: Any, site: Site) -> LayerBound:
    width, eps = module.weight.shape[-1], float(module.variance_epsilon)
    found = norm_bound(module.weight, None, site, eps=eps, width=width, centred=False)
    # It divides in float32, whatever the dtype.
    return replace(found, lipschitz=found.lipschitz * (1 + 8 * torch.finfo(torch.float32).eps))


for _family, _name in (("t5", "T5LayerNorm"), ("llama", "LlamaRMSNorm"), ("phi3", "Phi3RMSNorm")):
    register_rule(f"{_source(_family)}.{_name}")(_rms_norm)


def _two_sequences(module: Any, site: Site) -> LayerBound:
    """The bound of the encoder of a model that maps two sequences, and why there is no other."""
    encoder = module.get_encoder()
    path = next((path for path, part in module.named_modules() if part is encoder), "")
    site.chain(named(module, path) if path else ())
    return site.refuse(
        "its decoder maps two sequences, the source and the target, and no bound is proved for"
        " cross-attention; the rows of its encoder hold, certify that alone (model.get_encoder())"
    )


for _family, _names in {
    "t5": ("T5Model", "T5ForConditionalGeneration", "T5ForSequenceClassification"),
    "bart": ("BartModel", "BartForConditionalGeneration", "BartForSequenceClassification"),
    "marian": ("MarianModel", "MarianMTModel"),
}.items():
    for _name in _names:
        register_rule(f"{_source(_family)}.{_name}")(_two_sequences)
