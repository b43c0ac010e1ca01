"""Texts as words, each encoded separately, so that a word affects only its own windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wellposed.words import encode_words, split_words, window_options
from wellposed_lab.tasks.batches import Ragged
from wellposed_lab.tasks.text.tokenizers import Encoded, TextEncoder, count_unknown


class WindowEncoder(TextEncoder):
    """A tokenizer that reads words one by one, for a model of windows; lengths count words.

    A window has ``words`` words, a text at most ``max_length``; ``inner`` encodes a word. The
    ``texts`` of train determine the number of tokens that a word is padded to.
    """

    def __init__(
        self, inner: TextEncoder, words: int, texts: Sequence[str], max_length: int
    ) -> None:
        self.inner = inner
        self.kind = inner.kind
        self.pad_id = inner.pad_id
        self.bos_id = inner.bos_id
        self.eos_id = inner.eos_id
        tokenizer = inner.tokenizer(max_length=max_length)
        self.windows = window_options(tokenizer, texts, words, max_length=max_length)
        """Options of the windows for a `wellposed.models.WindowConfig`."""

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    @property
    def longest(self) -> int:
        """Number of tokens in a window."""
        tokens = self.windows["window_words"] * self.windows["word_tokens"]
        return tokens + sum(map(len, self.windows["frame"]))

    def encode(self, texts: Sequence[str], *, max_length: int | None = None) -> Encoded:
        words = [split_words(text) for text in texts]
        lengths = list(map(len, words))
        most = max_length or max(lengths, default=1)
        tokenizer = self.inner.tokenizer(max_length=most)
        rows = [row[:most] for row in words]
        encoded = encode_words(
            tokenizer, rows, self.windows["word_tokens"], self.windows["word_mark"]
        )
        ids = Ragged.from_lists(encoded)
        return Encoded(ids, lengths, count_unknown(tokenizer, ids.flat))

    def tokenizer(self, *, max_length: int) -> Any:
        return self.inner.tokenizer(max_length=max_length)

    def description(self) -> dict[str, Any]:
        windows = {name: self.windows[name] for name in ("window_words", "word_tokens")}
        return {**self.inner.description(), **windows}
