"""Tiny models of every family that the initialisers promise to handle."""

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
import transformers as hf
from tests.support.zoo import HEADS, SEQ2SEQ, SPECIAL, D, F, V

from wellposed.models import (
    WellposedConfig,
    WellposedForCausalLM,
    WellposedForSeq2SeqLM,
    WellposedForSequenceClassification,
)

PLAIN = {"hidden_size": D, "num_attention_heads": HEADS, "intermediate_size": F, "vocab_size": V}


def bert(layers=2, kind=hf.BertModel):
    return kind(hf.BertConfig(num_hidden_layers=layers, max_position_embeddings=32, **PLAIN))


def bert_masked(layers=2):
    return bert(layers, hf.BertForMaskedLM)


def gpt2(layers=2):
    sizes = {"vocab_size": V, "n_embd": D, "n_layer": layers, "n_head": HEADS, "n_positions": 32}
    return hf.GPT2LMHeadModel(hf.GPT2Config(bos_token_id=1, eos_token_id=2, **sizes))


def bart(encoder=2, decoder=3):
    layers = {"encoder_layers": encoder, "decoder_layers": decoder}
    return hf.BartForConditionalGeneration(hf.BartConfig(**{**SEQ2SEQ, **layers}))


def marian(encoder=2, decoder=3):
    layers = {"encoder_layers": encoder, "decoder_layers": decoder}
    return hf.MarianMTModel(hf.MarianConfig(**{**SEQ2SEQ, **layers}))


def t5(encoder=2, decoder=3):
    """T5 with plain feed-forward layers, and with heads that are together wider than a token."""
    config = hf.T5Config(
        vocab_size=V, d_model=D, d_kv=8, d_ff=F, num_layers=encoder, num_decoder_layers=decoder, num_heads=HEADS,
        feed_forward_proj="relu", decoder_start_token_id=0, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def ours(layers=2, **options):
    return WellposedForCausalLM(WellposedConfig(num_hidden_layers=layers, **{**PLAIN, **options}))


def seq2seq(encoder=2, decoder=3, **options):
    depths = {"num_hidden_layers": encoder, "num_decoder_layers": decoder}
    sizes = {**PLAIN, **SPECIAL, **depths, "max_position_embeddings": 32, **options}
    return WellposedForSeq2SeqLM(WellposedConfig(**sizes))


def classifier(layers=2):
    return WellposedForSequenceClassification(WellposedConfig(num_hidden_layers=layers, **PLAIN))


ENCODER_ONLY = {build.__name__: build for build in (bert, bert_masked, gpt2, ours, classifier)}
ENCODER_DECODER = {build.__name__: build for build in (bart, marian, t5, seq2seq)}
ALL = {**ENCODER_ONLY, **ENCODER_DECODER}


def batch_for(model):
    ids = torch.randint(3, V, (2, 6))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if getattr(model.config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = torch.randint(3, V, (2, 5))
    return batch
