"""Small models of transformers, and the parts of them that `certify` has rules for, with random
weights."""

import transformers
from transformers import activations, pytorch_utils
from transformers.models.bert import modeling_bert as bert
from transformers.models.distilbert import modeling_distilbert as distilbert
from transformers.models.gpt2 import modeling_gpt2 as gpt2
from transformers.models.llama import modeling_llama as llama
from transformers.models.roberta import modeling_roberta as roberta

from .sample import MAX_TOKENS, Sample, awake

LAYERS = 2


def _sizes(width, **options):
    return {
        "hidden_size": width, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "intermediate_size": 2 * width,
        "vocab_size": 11, "num_labels": 3, "max_position_embeddings": MAX_TOKENS, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, **options,
    }  # fmt: skip


def _configured(kind, **own):
    return lambda width, **options: kind(**_sizes(width, **{**own, **options}))


bert_config = _configured(transformers.BertConfig, layer_norm_eps=0.1)
behind = {"max_position_embeddings": MAX_TOKENS + 1}  # its positions start behind the padding id
roberta_config = _configured(transformers.RobertaConfig, layer_norm_eps=0.1, **behind)
llama_config = _configured(transformers.LlamaConfig, num_key_value_heads=1, rms_norm_eps=0.1)


def distilbert_config(width, **options):
    return transformers.DistilBertConfig(**{
        "dim": width, "n_layers": LAYERS, "n_heads": 2, "hidden_dim": 2 * width, "vocab_size": 11, "num_labels": 3,
        "max_position_embeddings": MAX_TOKENS, **options,
    })  # fmt: skip


def gpt2_config(width, **options):
    return transformers.GPT2Config(**{
        "n_embd": width, "n_layer": LAYERS, "n_head": 2, "n_positions": MAX_TOKENS, "vocab_size": 11, "num_labels": 3,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "layer_norm_epsilon": 0.1, **options,
    })  # fmt: skip


def t5_config(width, **options):
    return transformers.T5Config(**{
        "d_model": width, "d_kv": width // 2, "d_ff": 2 * width, "num_layers": LAYERS, "num_heads": 2, "vocab_size": 11,
        "layer_norm_epsilon": 0.1, "initializer_factor": 0.3, "num_labels": 3, **options,
    })  # fmt: skip


def vit_config(width, **options):
    """Five patches side by side, of as many numbers as a token has (8: 2 channels of 2 x 2
    pixels)."""
    return transformers.ViTConfig(**{
        "hidden_size": width, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "intermediate_size": 2 * width,
        "image_size": (2, 10), "patch_size": (2, 2), "num_channels": width // 4, "num_labels": 3,
        "layer_norm_eps": 0.1, **options,
    })  # fmt: skip


def bart_config(width, **options):
    sizes = {f"{side}_{name}": value for side in ("encoder", "decoder")
             for name, value in (("layers", LAYERS), ("attention_heads", 2), ("ffn_dim", 2 * width))}  # fmt: skip
    sizes |= {"d_model": width, "vocab_size": 11, "max_position_embeddings": MAX_TOKENS}
    return transformers.BartConfig(**{**sizes, **options})


def like(kind, config, **options):
    """Return a configuration of another family with the sizes of ``config``."""
    sizes = {name: value for name, value in config.to_diff_dict().items() if name != "model_type"}
    return kind(**{**sizes, **options})


def _model(kind, config, **how):
    options = how.pop("options", {})
    asked = {"takes_mask": "tokens" not in how, "in_float32": config is llama_config, **how}
    asked = {"keeps_width": False, **asked}
    return Sample(lambda width: awake(kind(config(width, **options))), **asked)


def _layer(kind, config, path, **how):
    """A part of a model, whose configuration only the model completes."""
    asked = {"keeps_width": False, "in_float32": config is llama_config, **how}
    return Sample(lambda width: awake(kind(config(width))).get_submodule(path), **asked)


HUGGING_FACE = {
    bert.BertModel: [_model(bert.BertModel, bert_config, options={"hidden_act": "gelu_new"})],
    bert.BertForSequenceClassification: [_model(bert.BertForSequenceClassification, bert_config)],
    bert.BertForMaskedLM: [_model(bert.BertForMaskedLM, bert_config)],
    bert.BertLayer: [_layer(bert.BertModel, bert_config, "encoder.layer.0", needs_ball=True, keeps_width=True)],
    roberta.RobertaModel: [_model(roberta.RobertaModel, roberta_config)],
    roberta.RobertaForSequenceClassification: [_model(roberta.RobertaForSequenceClassification, roberta_config)],
    roberta.RobertaLayer: [_layer(roberta.RobertaModel, roberta_config, "encoder.layer.1", needs_ball=True)],
    distilbert.DistilBertModel: [_model(distilbert.DistilBertModel, distilbert_config)],
    distilbert.DistilBertForSequenceClassification: [
        _model(distilbert.DistilBertForSequenceClassification, distilbert_config)
    ],
    distilbert.TransformerBlock: [
        _layer(distilbert.DistilBertModel, distilbert_config, "transformer.layer.0", needs_ball=True)
    ],
    gpt2.GPT2Model: [_model(gpt2.GPT2Model, gpt2_config, options={"scale_attn_by_inverse_layer_idx": True})],
    gpt2.GPT2LMHeadModel: [_model(gpt2.GPT2LMHeadModel, gpt2_config)],
    gpt2.GPT2ForSequenceClassification: [_model(gpt2.GPT2ForSequenceClassification, gpt2_config)],
    gpt2.GPT2Block: [_layer(gpt2.GPT2Model, gpt2_config, "h.0", keeps_width=True)],
    llama.LlamaModel: [_model(llama.LlamaModel, llama_config, options={"attention_bias": True, "mlp_bias": True})],
    llama.LlamaForCausalLM: [_model(llama.LlamaForCausalLM, llama_config)],
    llama.LlamaDecoderLayer: [_layer(llama.LlamaModel, llama_config, "layers.0", runs_alone=False)],
    llama.LlamaRMSNorm: [Sample(lambda width: awake(llama.LlamaRMSNorm(width, eps=0.1)), in_float32=True)],
    pytorch_utils.Conv1D: [
        Sample(lambda width: awake(pytorch_utils.Conv1D(width, width))),
        Sample(lambda width: awake(pytorch_utils.Conv1D(3, width)), keeps_width=False),
    ],
    **{type(activations.ACT2FN[name]): [Sample(lambda width, name=name: activations.ACT2FN[name].eval())]
       for name in ("gelu", "gelu_new", "gelu_fast", "gelu_accurate", "gelu_pytorch_tanh", "quick_gelu", "silu",
                    "linear")},
}  # fmt: skip
