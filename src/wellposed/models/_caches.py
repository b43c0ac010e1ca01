"""Hugging Face caches as the attentions of `wellposed.nn` want them: one layer at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers import Cache, EncoderDecoderCache


class LayerView:
    """One layer of a Hugging Face cache, as `wellposed.nn.LayerCache` wants it."""

    def __init__(self, cache: Cache, layer_index: int) -> None:
        self.cache = cache
        self.layer_index = layer_index

    def update(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values (batch, heads, tokens, head_dim) and return all of this layer."""
        return self.cache.update(key, value, self.layer_index)


class MemoryView:
    """The memory's keys and values in one layer of an encoder-decoder cache, as
    `wellposed.nn.MemoryCache` wants it."""

    def __init__(self, cache: EncoderDecoderCache, layer_index: int) -> None:
        self.cache = cache
        self.layer_index = layer_index

    def once(self, project: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return what is stored; the first time, call `project` and store what it returns."""
        stored = self.cache.cross_attention_cache
        if not self.cache.is_updated.get(self.layer_index):
            stored.update(*project(), self.layer_index)
            self.cache.is_updated[self.layer_index] = True
        layer: Any = stored.layers[self.layer_index]
        return layer.keys, layer.values
