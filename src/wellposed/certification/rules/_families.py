"""Families of Hugging Face: where the parts of their layers, models and heads stand (theory note B13)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from wellposed.certification._walk import LayerBound, RuleContext, register_rule
from wellposed.certification.rules._huggingface import MODELS, Head, Layer, Model
from wellposed.certification.rules._torch_layers import norm_bound

_TWO_SEQUENCES = "with cross-attention it maps two sequences"


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
_register(
    "llama",
    LlamaDecoderLayer=Layer(
        parts={"self_attn": "LlamaAttention", "mlp": "LlamaMLP"},
        attention="self_attn",
        projections="self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj",
        norms="input_layernorm post_attention_layernorm",
        gated="mlp",
        feedforward="mlp.up_proj mlp.gate_proj mlp.down_proj mlp.act_fn",
        dropout="self_attn.attention_dropout",
        before=True,
        causal=True,
        rotary=True,
    ),
    LlamaModel=Model(parts={"rotary_emb": "LlamaRotaryEmbedding"}, chain="layers.* norm"),
    LlamaForCausalLM=Head(body="model", last="lm_head", pooled=False),
    LlamaRMSNorm=_rms_norm,
)
