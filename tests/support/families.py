"""Ten families of models that nobody here wrote, two layers each, as their libraries initialise
them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import transformers
from torch import nn

from wellposed.certification import Certificate, certify

from . import hugging_face as hf

WIDTH = 16


def _torch_encoder(*, norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, hf.LAYERS, enable_nested_tensor=False)


FAMILIES: dict[str, dict[str, Callable[[], nn.Module]]] = {
    "BERT": {
        "BertModel": lambda: transformers.BertModel(hf.bert_config(WIDTH, layer_norm_eps=1e-12)),
        "BertForSequenceClassification": lambda: transformers.BertForSequenceClassification(
            hf.bert_config(WIDTH, layer_norm_eps=1e-12)
        ),
    },
    "RoBERTa": {
        "RobertaModel": lambda: transformers.RobertaModel(
            hf.roberta_config(WIDTH, layer_norm_eps=1e-5)
        ),
        "RobertaForSequenceClassification": lambda: transformers.RobertaForSequenceClassification(
            hf.roberta_config(WIDTH, layer_norm_eps=1e-5)
        ),
    },
    "DistilBERT": {
        "DistilBertModel": lambda: transformers.DistilBertModel(hf.distilbert_config(WIDTH)),
        "DistilBertForSequenceClassification": lambda: (
            transformers.DistilBertForSequenceClassification(hf.distilbert_config(WIDTH))
        ),
    },
    "GPT-2": {
        "GPT2Model": lambda: transformers.GPT2Model(hf.gpt2_config(WIDTH, layer_norm_epsilon=1e-5)),
        "GPT2LMHeadModel": lambda: transformers.GPT2LMHeadModel(
            hf.gpt2_config(WIDTH, layer_norm_epsilon=1e-5)
        ),
        "GPT2ForSequenceClassification": lambda: transformers.GPT2ForSequenceClassification(
            hf.gpt2_config(WIDTH, layer_norm_epsilon=1e-5)
        ),
    },
    "Llama": {
        "LlamaModel": lambda: transformers.LlamaModel(hf.llama_config(WIDTH, rms_norm_eps=1e-6)),
        "LlamaForCausalLM": lambda: transformers.LlamaForCausalLM(
            hf.llama_config(WIDTH, rms_norm_eps=1e-6)
        ),
    },
    "Phi-3": {
        "Phi3Model": lambda: transformers.Phi3Model(hf.phi3_config(WIDTH, rms_norm_eps=1e-5)),
        "Phi3ForCausalLM": lambda: transformers.Phi3ForCausalLM(
            hf.phi3_config(WIDTH, rms_norm_eps=1e-5)
        ),
    },
    "ViT": {
        "ViTModel": lambda: transformers.ViTModel(hf.vit_config(WIDTH, layer_norm_eps=1e-12)),
        "ViTForImageClassification": lambda: transformers.ViTForImageClassification(
            hf.vit_config(WIDTH, layer_norm_eps=1e-12)
        ),
    },
    "T5": {
        "T5EncoderModel": lambda: transformers.T5EncoderModel(_t5()),
        "T5ForConditionalGeneration": lambda: transformers.T5ForConditionalGeneration(_t5()),
    },
    "BART": {
        "BartEncoder": lambda: transformers.BartModel(hf.bart_config(WIDTH)).get_encoder(),
        "BartForConditionalGeneration": lambda: transformers.BartForConditionalGeneration(
            hf.bart_config(WIDTH)
        ),
    },
    "Marian": {
        "MarianEncoder": lambda: transformers.MarianModel(hf.marian_config(WIDTH)).get_encoder(),
        "MarianMTModel": lambda: transformers.MarianMTModel(hf.marian_config(WIDTH)),
    },
    "torch.nn": {
        "TransformerEncoder, norm_first": lambda: _torch_encoder(norm_first=True),
        "TransformerEncoder": lambda: _torch_encoder(norm_first=False),
        "MultiheadAttention": lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
    },
}


def _t5() -> transformers.T5Config:
    return hf.t5_config(WIDTH, layer_norm_epsilon=1e-6, initializer_factor=1.0)


def models() -> Iterator[tuple[str, str, nn.Module]]:
    """Yield family, class and model, in eval mode, the same at each call."""
    for family, builders in FAMILIES.items():
        for name, build in builders.items():
            torch.manual_seed(0)
            yield family, name, build().eval()


def certificates(model: nn.Module) -> tuple[Certificate, Certificate]:
    """Return the certificates on all inputs and on the unit ball."""
    everywhere = certify(model, seq_len=hf.MAX_TOKENS, cross_check=False)
    return everywhere, certify(model, seq_len=hf.MAX_TOKENS, radius=1.0, cross_check=False)


def table() -> str:
    """Return what `certify` answers for each, as a Markdown table."""
    rows = ["| family | model | `certify` |", "|---|---|---|"]
    for family, name, model in models():
        everywhere, on_a_ball = certificates(model)
        if everywhere.label != "uncertified":
            answer = "bound on all inputs"
        elif on_a_ball.label != "uncertified":
            answer = "bound on a ball: give `radius=`"
        else:
            answer = f"refused: {on_a_ball.uncertified[0].reason}"
        rows.append(f"| {family} | `{name}` | {answer} |")
    return "\n".join(rows)
