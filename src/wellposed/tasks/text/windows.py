"""Texts as windows of words, each encoded by itself, so that a word touches its own window alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from wellposed.errors import ConfigError
from wellposed.tasks.batches import Ragged
from wellposed.tasks.text.tokenizers import Encoded, Pairs, TextEncoder, count_unknown, split_words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_FITTING = 0.999
"""Share of the windows of train that are whole; a longer one is cut to as many tokens."""


def cut_windows(text: str, words: int, most: int) -> list[str]:
    """Return the first ``most`` words between white space, in windows of ``words``.

    >>> cut_windows("a bb  c d e", 2, 4)
    ['a bb', 'c d']
    """
    kept = split_words(text)[:most]
    return [" ".join(kept[start : start + words]) for start in range(0, len(kept), words)]


def encode_windows(tokenizer: Any, texts: Sequence[Sequence[str]], tokens: int) -> list[list[int]]:
    """Return the ids of the windows of each text, one after the other, each cut or padded to
    ``tokens``: a function of each window alone."""
    windows = list(itertools.chain.from_iterable(texts))
    how = {"padding": "max_length", "truncation": True, "max_length": tokens, "verbose": False}
    rows = iter(tokenizer(windows, **how)["input_ids"] if windows else ())
    return [list(itertools.chain(*itertools.islice(rows, len(text)))) for text in texts]


class WindowEncoder(TextEncoder):
    """A tokenizer that reads windows of ``words`` words; lengths are counted in words.

    Args:
        inner: what encodes a window.
        words: between white space, of a window; the last one may hold fewer.
        texts: of train; they say how many tokens a window is padded to.
        max_length: most words of a text.
    """

    def __init__(
        self, inner: TextEncoder, words: int, texts: Sequence[str], max_length: int
    ) -> None:
        self.inner, self.words, self.kind = inner, words, inner.kind
        self.pad_id, self.bos_id, self.eos_id = inner.pad_id, inner.bos_id, inner.eos_id
        windows = [w for text in texts for w in cut_windows(text, words, max_length)]
        sizes = inner.encode(windows).full_lengths
        self.tokens = int(np.quantile(sizes or [1], _FITTING, method="higher"))

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    def encode(
        self, texts: Sequence[str], *, max_length: int | None = None, pairs: Pairs = None
    ) -> Encoded:
        """Encode texts of at most ``max_length`` words.

        Raises:
            ConfigError: pairs, which are no sequence of words.
        """
        if pairs is not None:
            raise ConfigError("certified_windows are for single texts, and the data are pairs")
        lengths = [len(split_words(text)) for text in texts]
        most = max_length or max(lengths, default=1)
        tokenizer = self.inner.tokenizer(max_length=most)
        windows = [cut_windows(text, self.words, most) for text in texts]
        ids = Ragged.from_lists(encode_windows(tokenizer, windows, self.tokens))
        return Encoded(ids, lengths, count_unknown(tokenizer, ids.flat))

    def tokenizer(self, *, max_length: int) -> PreTrainedTokenizerFast:
        return self.inner.tokenizer(max_length=max_length)

    def description(self) -> dict[str, Any]:
        windows = {"window_words": self.words, "window_tokens": self.tokens}
        return {**self.inner.description(), **windows}
