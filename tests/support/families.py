"""Six families of models that nobody here wrote, two layers each, as their libraries initialise
them."""

import torch
import transformers
from torch import nn

from wellposed.certification import certify

from . import hugging_face as hf

WIDTH = 16


def _torch_encoder(*, norm_first):
    layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, hf.LAYERS, enable_nested_tensor=False)


_CONFIGURED = {
    "BERT": (
        hf.bert_config, {"layer_norm_eps": 1e-12}, ["BertModel", "BertForSequenceClassification", "BertForMaskedLM"],
    ),
    "RoBERTa": (hf.roberta_config, {"layer_norm_eps": 1e-5}, ["RobertaModel", "RobertaForSequenceClassification"]),
    "DistilBERT": (hf.distilbert_config, {}, ["DistilBertModel", "DistilBertForSequenceClassification"]),
    "GPT-2": (
        hf.gpt2_config, {"layer_norm_epsilon": 1e-5}, ["GPT2Model", "GPT2LMHeadModel", "GPT2ForSequenceClassification"],
    ),
    "Llama": (hf.llama_config, {"rms_norm_eps": 1e-6}, ["LlamaModel", "LlamaForCausalLM"]),
}  # fmt: skip
"""Family -> configuration, the options of the library's own, and classes."""

FAMILIES = {
    family: {
        name: lambda name=name, config=config, options=options: getattr(transformers, name)(
            config(WIDTH, **options)
        )
        for name in names
    }
    for family, (config, options, names) in _CONFIGURED.items()
} | {
    "torch.nn": {
        "TransformerEncoder, norm_first": lambda: _torch_encoder(norm_first=True),
        "TransformerEncoder": lambda: _torch_encoder(norm_first=False),
        "MultiheadAttention": lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
    }
}


def models():
    """Yield family, class and model, in eval mode, the same at each call."""
    for family, builders in FAMILIES.items():
        for name, build in builders.items():
            torch.manual_seed(0)
            yield family, name, build().eval()


def certificates(model):
    """Return the certificates on all inputs and on the unit ball."""
    everywhere = certify(model, seq_len=hf.MAX_TOKENS, cross_check=False)
    return everywhere, certify(model, seq_len=hf.MAX_TOKENS, radius=1.0, cross_check=False)


def table():
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
