"""A batch for a model of transformers, from its configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

_TOKENS = 8


def own_batch(model: nn.Module) -> dict[str, Tensor] | None:
    """Return a small batch for a model of transformers that reads tokens or images, from its
    configuration; None for other models."""
    config: Any = getattr(model, "config", None)
    name = getattr(model, "main_input_name", None)
    if config is None or name is None:
        return None
    config = config.get_text_config() if name == "input_ids" else config
    if name == "input_ids":
        vocabulary = getattr(config, "vocab_size", 2)
        positions = getattr(config, "max_position_embeddings", None) or 0
        length = positions if 0 < positions < _TOKENS else _TOKENS
        length = getattr(config, "word_tokens", length)  # of one word, where windows of words vote
        # Small ids are often padding, of which transformers warns at either end.
        batch = {name: torch.arange(length).roll(length // 2)[None] % vocabulary}
    elif name == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        size = (getattr(config, "num_channels", 3), config.image_size, config.image_size)
        batch = {name: torch.linspace(-1, 1, size[0] * size[1] ** 2).reshape(1, *size)}
    else:
        return None
    if type(model).__name__.endswith("PairClassification"):
        batch["input_ids_pair"] = batch["input_ids"]
    if getattr(config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = torch.arange(_TOKENS)[None] % getattr(config, "vocab_size", 2)
    dtypes = (each.dtype for each in model.parameters() if each.is_floating_point())
    dtype = next(dtypes, torch.float32)
    return {key: x.to(dtype) if x.is_floating_point() else x for key, x in batch.items()}
