"""Families of Hugging Face: where the parts of their layers, models and heads stand, and the few
whose own parts need a rule of their own (theory note B13)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from wellposed.certification._walk import LayerBound, RuleContext, register_rule
from wellposed.certification.rules._huggingface import MODELS, Head, Layer, Model, read_parts
from wellposed.certification.rules._torch_layers import linear_bound, norm_bound

_TWO_SEQUENCES = "with cross-attention it maps two sequences"
_DECODER = {
    "is_decoder": "a decoder maps two sequences, and no bound is proved for cross-attention"
}
_DRAWS = {
    "training": "it drops layers or values without a module of its own in train mode; call eval()"
}


def _register(family: str, **rules: Any) -> None:
    for name, rule in rules.items():
        register_rule(f"{MODELS}.{family}.modeling_{family}.{name}")(rule)


def _rms_norm(module: Any, context: RuleContext) -> LayerBound:
    width, eps = module.weight.shape[-1], float(module.variance_epsilon)
    found = norm_bound(module.weight, None, context, eps=eps, width=width, centred=False)
    # It divides in float32, whatever the dtype.
    return replace(found, lipschitz=found.lipschitz * (1 + 8 * torch.finfo(torch.float32).eps))


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
        refusals={"add_cross_attention": _TWO_SEQUENCES},
    )
    model = Model(
        parts={path: prefix + path.capitalize() for path in ("embeddings", "encoder", "pooler")},
        tables="embeddings.position_embeddings embeddings.token_type_embeddings",
        chain="embeddings.LayerNorm embeddings.dropout encoder.layer.*",
        beside="pooler",
    )
    last = Head(body=family, **head)
    names = {"Layer": layer, "Model": model, "ForSequenceClassification": last}
    _register(family, **{prefix + name: rule for name, rule in names.items()})


_GUESS = "cls.predictions.transform"
_register(
    "bert",
    # The encoder, and the head that guesses masked tokens.
    BertForMaskedLM=Head(
        body="bert",
        parts={
            "cls": "BertOnlyMLMHead",
            "cls.predictions": "BertLMPredictionHead",
            _GUESS: "BertPredictionHeadTransform",
        },
        between=f"{_GUESS}.dense {_GUESS}.transform_act_fn {_GUESS}.LayerNorm",
        last="cls.predictions.decoder",
        pooled=False,
    ),
)
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
    DistilBertForSequenceClassification=Head(
        body="distilbert", between="pre_classifier dropout", last="classifier"
    ),
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
        refusals=_DRAWS,
    )
    parts = {"embed_tokens": f"{prefix}ScaledWordEmbedding", "embed_positions": positions}
    chain = f"{norms} layers.*"
    encoder = Model(parts=parts, tables="embed_positions", chain=chain, refusals=_DRAWS)
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
        refusals={"crossattention": _TWO_SEQUENCES},
    ),
    # Token types, where given, are rows of the token embedding.
    GPT2Model=Model(tables="wpe wte", chain="drop h.* ln_f"),
    # A linear map of every token, of which the last real one is taken.
    GPT2ForSequenceClassification=Head(body="transformer", last="score"),
    GPT2LMHeadModel=Head(body="transformer", last="lm_head", pooled=False),
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
    model = Model(parts=parts, chain="layers.* norm")
    head = Head(body="model", last="lm_head", pooled=False)
    rules = {"DecoderLayer": layer, "Model": model, "ForCausalLM": head, "RMSNorm": _rms_norm}
    _register(family, **{prefix + name: rule for name, rule in rules.items()})


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
    refusals=_DECODER,
)
_T5_GATED = replace(
    _T5_BLOCK,
    parts={**_T5_PARTS, _FED: "T5DenseGatedActDense"},
    gated=_FED,
    feedforward=f"{_FED}.wi_1 {_FED}.wi_0 {_FED}.wo {_FED}.act",
    fed=f"{_FED}.dropout layer.1.dropout",
)


def _t5_block(module: Any, context: RuleContext) -> LayerBound:
    gated = not module.is_decoder and hasattr(module.layer[1].DenseReluDense, "wi_0")
    return (_T5_GATED if gated else _T5_BLOCK)(module, context)


_register(
    "t5",
    T5Stack=Model(chain="dropout block.* final_layer_norm dropout", refusals=_DECODER),
    T5EncoderModel=Model(chain="encoder"),
    T5Block=_t5_block,
    T5LayerNorm=_rms_norm,
)


def _vit(module: Any, context: RuleContext) -> LayerBound:
    """Map patches of pixels, each one token of its channels, rows and columns in this order, to the
    hidden states."""
    parts = {"embeddings": "ViTEmbeddings", "embeddings.patch_embeddings": "ViTPatchEmbeddings"}
    if module.pooler is not None:
        # Beside the map: the last hidden state does not pass it.
        parts["pooler"] = "ViTPooler"
        context.reads(module.pooler.activation)
    read_parts(module, context, parts)
    embeddings, patches = module.embeddings, module.embeddings.patch_embeddings
    cut = patches.projection
    context.reads(cut, nn.Conv2d)
    if (cut.stride, cut.padding, cut.dilation, cut.groups) != (cut.kernel_size, (0, 0), (1, 1), 1):
        return context.refuse(
            "its patches overlap or leave pixels out, so they are no tokens of their own"
        )
    # The strides are those of the patches, so the convolution is one linear map of each of them.
    weight = context.remember(patches, "weight", lambda: cut.weight.detach().flatten(1))
    found = linear_bound(weight, cut.bias, context)
    embedded = context.record(patches, "embeddings.patch_embeddings", found)
    positions = embeddings.position_embeddings.detach().double()[0]
    first = float((embeddings.cls_token.detach().double()[0] + positions[:1]).norm())
    radius = max(first, embedded.out_radius + float(positions.norm(dim=-1).max()))
    # The class token stands beside the patches and does not move.
    inside = replace(context, seq_len=patches.num_patches + 1, radius=radius)
    rest = inside.chain_of(module, "embeddings.dropout layers.* layernorm")
    return context.product([embedded, rest])


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
    ViTModel=_vit,
    ViTForImageClassification=Head(body="vit", last="classifier"),
)


def _two_sequences(module: Any, context: RuleContext) -> LayerBound:
    """The bound of the encoder of a model that maps two sequences, and why there is no other."""
    encoder = module.get_encoder()
    paths = [path for path, part in module.named_modules() if part is encoder]
    context.chain_of(module, " ".join(paths[:1]))
    return context.refuse(
        "its decoder maps two sequences, the source and the target, and no bound is proved for"
        " cross-attention; the rows of its encoder hold, certify that alone (model.get_encoder())"
    )


for _family, _names in {
    "t5": ("T5Model", "T5ForConditionalGeneration", "T5ForSequenceClassification"),
    "bart": ("BartModel", "BartForConditionalGeneration", "BartForSequenceClassification"),
    "marian": ("MarianModel", "MarianMTModel"),
}.items():
    _register(_family, **dict.fromkeys(_names, _two_sequences))
