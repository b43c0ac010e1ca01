"""Configurations of small models of transformers."""

import transformers

from .sample import MAX_TOKENS

LAYERS = 2


def _sizes(width, **options):
    return {
        "hidden_size": width, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "intermediate_size": 2 * width,
        "vocab_size": 11, "num_labels": 3, "max_position_embeddings": MAX_TOKENS, "pad_token_id": 0,
        "bos_token_id": 1, "eos_token_id": 2, **options,
    }  # fmt: skip


def _configured(kind, **defaults):
    return lambda width, **options: kind(**_sizes(width, **{**defaults, **options}))


bert_config = _configured(transformers.BertConfig, layer_norm_eps=0.1)
llama_config = _configured(transformers.LlamaConfig, num_key_value_heads=1, rms_norm_eps=0.1)


def t5_config(width, **options):
    return transformers.T5Config(**{
        "d_model": width, "d_kv": width // 2, "d_ff": 2 * width, "num_layers": LAYERS, "num_heads": 2, "vocab_size": 11,
        "layer_norm_epsilon": 0.1, "initializer_factor": 0.3, "num_labels": 3, **options,
    })  # fmt: skip


def bart_config(width, **options):
    sizes = {f"{side}_{name}": value for side in ("encoder", "decoder")
             for name, value in (("layers", LAYERS), ("attention_heads", 2), ("ffn_dim", 2 * width))}  # fmt: skip
    sizes |= {"d_model": width, "vocab_size": 11, "max_position_embeddings": MAX_TOKENS}
    return transformers.BartConfig(**{**sizes, **options})
