"""Families of Hugging Face: where the parts of their layers, models and heads stand, and how their
own parts are bounded (theory note B13)."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from wellposed.certification._as_called import class_called
from wellposed.certification._blocks import GELU_TANH, linear_bound, named, norm_bound, slope_rule
from wellposed.certification._hf_rules import (
    GELUS,
    MODELS,
    OWN_ACTIVATIONS,
    Layer,
    Model,
    classifier,
    head_bound,
    layer_bound,
    model_bound,
    paths_of,
    read,
)
from wellposed.certification._rules import LayerBound, Site, product_of, register_rule

_ACTIVATIONS = "transformers.activations"
# These only turn queries and keys; others rescale them by position or length.
_ROTATIONS = ("default", "linear", "dynamic", "llama3")
_TWO_SEQUENCES = "with cross-attention it maps two sequences"
_TWO_IN_A_DECODER = "a decoder maps two sequences, and no bound is proved for cross-attention"
_DRAWS = "it drops layers or values without a module of its own in train mode; call eval()"


def _source(family: str) -> str:
    return f"{MODELS}.{family}.modeling_{family}"


def _register(family: str, **classes: Layer | Model | dict[str, Any]) -> None:
    """Register classes of a family: a layer, a model without its head, or what `classifier` is told
    of a head."""
    for name, what in classes.items():
        if isinstance(what, dict):
            rule = functools.partial(classifier, **what)
        elif isinstance(what, Layer):
            rule = functools.partial(layer_bound, layer=what)
        else:
            rule = functools.partial(model_bound, model=what)
        register_rule(f"{_source(family)}.{name}")(rule)


def _bert(family: str, prefix: str, **head: Any) -> None:
    """BERT and RoBERTa: a LayerNorm on the embeddings and after every sublayer."""
    names = {
        "attention": "Attention",
        "attention.self": "SelfAttention",
        "attention.output": "SelfOutput",
        "intermediate": "Intermediate",
        "output": "Output",
    }
    layer = Layer(
        parts={path: prefix + name for path, name in names.items()},
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
    model = Model(
        parts={path: prefix + path.capitalize() for path in ("embeddings", "encoder", "pooler")},
        tables="embeddings.position_embeddings embeddings.token_type_embeddings",
        chain="embeddings.LayerNorm embeddings.dropout encoder.layer.*",
        beside="pooler",
    )
    last = {f"{prefix}ForSequenceClassification": {"body": family, **head}}
    _register(family, **{f"{prefix}Layer": layer, f"{prefix}Model": model, **last})


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
_register(
    "distilbert",
    TransformerBlock=Layer(
        parts={"attention": "DistilBertSelfAttention", "ffn": "FFN"},
        attention="attention",
        projections="attention.q_lin attention.k_lin attention.v_lin attention.out_lin",
        norms="sa_layer_norm output_layer_norm",
        feedforward="ffn.lin1 ffn.activation ffn.lin2 ffn.dropout",
        dropout="attention.dropout.p",
    ),
    DistilBertModel=Model(
        parts={"embeddings": "Embeddings", "transformer": "Transformer"},
        tables="embeddings.position_embeddings",
        chain="embeddings.LayerNorm embeddings.dropout transformer.layer.*",
    ),
    # A ReLU, of slope 1, stands between pre_classifier and dropout.
    DistilBertForSequenceClassification={
        "body": "distilbert",
        "between": "pre_classifier dropout",
        "last": "classifier",
    },
)


def _bart(family: str, prefix: str, positions: str, norms: str = "") -> None:
    """The encoder of BART or Marian; ``norms`` stand on the sum of embeddings and positions."""
    layer = Layer(
        parts={"self_attn": f"{prefix}Attention"},
        attention="self_attn",
        projections="self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj",
        norms="self_attn_layer_norm final_layer_norm",
        feedforward="fc1 activation_fn fc2",
        dropout="self_attn.dropout",
        refusal=lambda module: _DRAWS if module.training else None,
    )
    parts = {"embed_tokens": f"{prefix}ScaledWordEmbedding", "embed_positions": positions}
    chain, refusal = f"{norms} layers.*", layer.refusal
    encoder = Model(parts=parts, tables="embed_positions", chain=chain, refusal=refusal)
    _register(family, **{f"{prefix}EncoderLayer": layer, f"{prefix}Encoder": encoder})


_bart("bart", "Bart", "BartLearnedPositionalEmbedding", "layernorm_embedding")
_bart("marian", "Marian", "MarianSinusoidalPositionalEmbedding")
_register(
    "gpt2",
    GPT2Block=Layer(
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
    ),
    # Token types, where given, are rows of the token embedding.
    GPT2Model=Model(tables="wpe wte", chain="drop h.* ln_f"),
    # A linear map of every token, of which the last real one is taken.
    GPT2ForSequenceClassification={"body": "transformer", "last": "score"},
)


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
    parts = {"rotary_emb": f"{prefix}RotaryEmbedding"}
    model = Model(parts=parts, chain="layers.* norm", refusal=_turned)
    _register(family, **{f"{prefix}DecoderLayer": layer, f"{prefix}Model": model})


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
    _rule = functools.partial(head_bound, body=_body, last="lm_head", pooled=False)
    register_rule(f"{_source(_family)}.{_name}")(_rule)


@register_rule(f"{_source('bert')}.BertForMaskedLM")
def _masked_lm(module: Any, site: Site) -> LayerBound:
    """The encoder, and the head that guesses masked tokens."""
    inside = "cls.predictions.transform"
    parts = {"cls": "OnlyMLMHead", "cls.predictions": "LMPredictionHead"}
    for path, name in (*parts.items(), (inside, "PredictionHeadTransform")):
        read(module, path, f"Bert{name}", site)
    between = f"{inside}.dense {inside}.transform_act_fn {inside}.LayerNorm"
    last = "cls.predictions.decoder"
    return head_bound(module, site, body="bert", between=between, last=last, pooled=False)


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
_T5_CHAIN = "dropout block.* final_layer_norm dropout"
_register(
    "t5",
    T5Stack=Model(chain=_T5_CHAIN, refusal=_T5_BLOCK.refusal),
    T5EncoderModel=Model(chain="encoder"),
)


@register_rule(f"{_source('t5')}.T5Block")
def _t5_block(module: Any, site: Site) -> LayerBound:
    gated = not module.is_decoder and hasattr(module.layer[1].DenseReluDense, "wi_0")
    return layer_bound(module, site, layer=_T5_GATED if gated else _T5_BLOCK)


_register(
    "vit",
    ViTLayer=Layer(
        parts={"attention": "ViTAttention", "mlp": "ViTMLP"},
        attention="attention",
        projections="attention.q_proj attention.k_proj attention.v_proj attention.o_proj",
        mixed="dropout",
        norms="layernorm_before layernorm_after",
        feedforward="mlp.fc1 mlp.activation_fn mlp.fc2 dropout",
        dropout="attention.attention_dropout",
        before=True,
    ),
    ViTForImageClassification={"body": "vit", "last": "classifier"},
)


@register_rule(f"{_source('vit')}.ViTModel")
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
    paths = paths_of(module, "embeddings.dropout layers.* layernorm")
    return product_of([embedded, inside.chain(named(module, *paths))])


@register_rule("transformers.pytorch_utils.Conv1D")
def _conv1d(module: Any, site: Site) -> LayerBound:
    """A linear map that keeps its weight transposed."""
    weight = site.remember(module, "weight", lambda: module.weight.detach().mT)
    return linear_bound(weight, module.bias, site)


for _name, _slope in OWN_ACTIVATIONS.items():
    slope_rule(f"{_ACTIVATIONS}.{_name}", _slope)


def _gelu(module: Any, site: Site) -> LayerBound:
    """These keep their function in an attribute, which somebody may have replaced."""
    function = module.act.func if isinstance(module.act, functools.partial) else module.act
    own = vars(class_called(module)).values()
    if function is not F.gelu and getattr(function, "__func__", None) not in own:
        return site.refuse(f"its act is {function!r}, not a GELU")
    return LayerBound(GELU_TANH, "largest slope", out_radius=GELU_TANH * site.radius)


for _name in GELUS:
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
