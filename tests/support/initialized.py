"""Tiny models of every family that the initialisers promise to handle."""

from __future__ import annotations

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers as hf
from torch import Tensor, nn

from wellposed.models import (
    WellposedConfig,
    WellposedForCausalLM,
    WellposedForSeq2SeqLM,
    WellposedForSequenceClassification,
)

D, F, V, HEADS = 16, 24, 30, 4
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PLAIN = {"hidden_size": D, "num_attention_heads": HEADS, "intermediate_size": F, "vocab_size": V}


def bert(layers: int = 2) -> nn.Module:
    return hf.BertModel(
        hf.BertConfig(num_hidden_layers=layers, max_position_embeddings=32, **PLAIN)
    )


def bert_masked(layers: int = 2) -> nn.Module:
    return hf.BertForMaskedLM(
        hf.BertConfig(num_hidden_layers=layers, max_position_embeddings=32, **PLAIN)
    )


def gpt2(layers: int = 2) -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=V,
        n_embd=D,
        n_layer=layers,
        n_head=HEADS,
        n_positions=32,
        bos_token_id=1,
        eos_token_id=2,
    )
    return hf.GPT2LMHeadModel(config)


def sizes(encoder: int, decoder: int) -> dict[str, object]:
    return {
        "vocab_size": V, "d_model": D, "encoder_layers": encoder, "decoder_layers": decoder,
        "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS, "encoder_ffn_dim": F,
        "decoder_ffn_dim": F, "max_position_embeddings": 32, "decoder_start_token_id": 2,
        "forced_eos_token_id": None, **SPECIAL,
    }  # fmt: skip


def bart(encoder: int = 2, decoder: int = 3) -> nn.Module:
    return hf.BartForConditionalGeneration(hf.BartConfig(**sizes(encoder, decoder)))


def marian(encoder: int = 2, decoder: int = 3) -> nn.Module:
    return hf.MarianMTModel(hf.MarianConfig(**sizes(encoder, decoder)))


def t5(encoder: int = 2, decoder: int = 3) -> nn.Module:
    """T5 with plain feed-forward layers, and with heads that are together wider than a token."""
    config = hf.T5Config(
        vocab_size=V, d_model=D, d_kv=8, d_ff=F, num_layers=encoder, num_decoder_layers=decoder, num_heads=HEADS,
        feed_forward_proj="relu", decoder_start_token_id=0, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def ours(layers: int = 2, **options: object) -> WellposedForCausalLM:
    return WellposedForCausalLM(WellposedConfig(num_hidden_layers=layers, **{**PLAIN, **options}))


def seq2seq(encoder: int = 2, decoder: int = 3, **options: object) -> WellposedForSeq2SeqLM:
    depths = {
        "num_hidden_layers": encoder,
        "num_decoder_layers": decoder,
        "max_position_embeddings": 32,
    }
    return WellposedForSeq2SeqLM(WellposedConfig(**{**PLAIN, **SPECIAL, **depths, **options}))


def classifier(layers: int = 2) -> nn.Module:
    return WellposedForSequenceClassification(WellposedConfig(num_hidden_layers=layers, **PLAIN))


ENCODER_ONLY = {
    "bert": bert,
    "bert_masked": bert_masked,
    "gpt2": gpt2,
    "ours": ours,
    "classifier": classifier,
}
ENCODER_DECODER = {"bart": bart, "marian": marian, "t5": t5, "seq2seq": seq2seq}
ALL = {**ENCODER_ONLY, **ENCODER_DECODER}


def batch_for(model: nn.Module) -> dict[str, Tensor]:
    ids = torch.randint(3, V, (2, 6))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if getattr(model.config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = torch.randint(3, V, (2, 5))
    return batch
