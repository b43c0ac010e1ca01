"""Texts as words, each encoded by itself, so that a word touches the windows it stands in alone."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from wellposed.errors import ConfigError
from wellposed.tasks.batches import Ragged
from wellposed.tasks.text.tokenizers import Encoded, Pairs, TextEncoder, count_unknown, split_words

_FITTING = 0.999
"""Share of the words of train that are whole in windows; a longer one is cut to as many tokens."""


def encode_words(tokenizer: Any, texts: Sequence[Sequence[str]], tokens: int) -> list[list[int]]:
    """Return the ids of the words of each text, one after the other, each cut or padded to
    ``tokens``: a function of each word alone, without special tokens around it."""
    distinct = {word: place for place, word in enumerate(dict.fromkeys(itertools.chain(*texts)))}
    how = {"padding": "max_length", "truncation": True, "max_length": tokens, "verbose": False}
    # The blank before a word is part of the first token of some vocabularies.
    spaced = [f" {word}" for word in distinct]
    rows = tokenizer(spaced, add_special_tokens=False, **how)["input_ids"] if spaced else []
    return [[n for word in text for n in rows[distinct[word]]] for text in texts]


class WindowEncoder(TextEncoder):
    """A tokenizer that reads words one by one, for a model of windows; lengths are counted in words.

    Args:
        inner: what encodes a word.
        words: of a window.
        texts: of train; they say how many tokens a word is padded to.
        max_length: most words of a text.
    """

    def __init__(
        self, inner: TextEncoder, words: int, texts: Sequence[str], max_length: int
    ) -> None:
        self.inner, self.words, self.kind = inner, words, inner.kind
        self.pad_id, self.bos_id, self.eos_id = inner.pad_id, inner.bos_id, inner.eos_id
        tokenizer = partial(inner.tokenizer(max_length=max_length), verbose=False)
        (whole,) = tokenizer([" a"])["input_ids"]
        (bare,) = tokenizer([" a"], add_special_tokens=False)["input_ids"]
        start = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
        self.frame = [whole[:start], whole[start + len(bare) :]]
        counts = Counter(f" {w}" for text in texts for w in split_words(text)[:max_length])
        found = tokenizer(list(counts) or [" a"], add_special_tokens=False)
        sizes = np.repeat(list(map(len, found["input_ids"])), list(counts.values()) or [1])
        self.tokens = max(1, int(np.quantile(sizes, _FITTING, method="higher")))

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    @property
    def windows(self) -> dict[str, Any]:
        """What a `wellposed.models.WindowConfig` says of them."""
        return {"window_words": self.words, "word_tokens": self.tokens, "frame": self.frame}

    @property
    def longest(self) -> int:
        """Tokens of a window."""
        return self.words * self.tokens + sum(map(len, self.frame))

    def encode(
        self, texts: Sequence[str], *, max_length: int | None = None, pairs: Pairs = None
    ) -> Encoded:
        """Encode texts of at most ``max_length`` words.

        Raises:
            ConfigError: pairs, which are no sequence of words.
        """
        if pairs is not None:
            raise ConfigError("certified_windows are for single texts, and the data are pairs")
        words = [split_words(text) for text in texts]
        lengths = list(map(len, words))
        most = max_length or max(lengths, default=1)
        tokenizer = self.inner.tokenizer(max_length=most)
        kept = [each[:most] for each in words]
        ids = Ragged.from_lists(encode_words(tokenizer, kept, self.tokens))
        return Encoded(ids, lengths, count_unknown(tokenizer, ids.flat))

    def tokenizer(self, *, max_length: int) -> Any:
        return self.inner.tokenizer(max_length=max_length)

    def description(self) -> dict[str, Any]:
        windows = {"window_words": self.words, "word_tokens": self.tokens}
        return {**self.inner.description(), **windows}
