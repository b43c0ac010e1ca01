"""The encoder-decoders with random weights whose signal and updates are looked at."""

from __future__ import annotations

from typing import Any

import torch

from wellposed.models import build_model


def random_model(depth: int, width: int, seed: int, *, heads: int = 4, **options: Any) -> Any:
    """Return one in float64, of ``depth`` layers on each side."""
    torch.manual_seed(seed)
    return build_model(
        "wellposed",
        "seq2seq_lm",
        vocab_size=100,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        intermediate_size=2 * width,
        max_position_embeddings=32,
        activation="relu",
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
        decoder_start_token_id=2,
        **options,
    ).double()
