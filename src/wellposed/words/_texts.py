"""Texts as words between white space, each encoded by itself for windows; free of torch."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from wellposed.errors import import_extra

# str.split() also splits at these; the tokenizers library, which follows Unicode White_Space, does
# not.
_PYTHON_ONLY_SPACES = "\x1c\x1d\x1e\x1f"
_FITTING = 0.999
"""Share of the words of train that are whole in windows; a longer one is cut to as many tokens."""


def split_words(text: str) -> list[str]:
    """Split at runs of Unicode white space, exactly as
    ``tokenizers.pre_tokenizers.WhitespaceSplit``."""
    if not any(character in text for character in _PYTHON_ONLY_SPACES):
        return text.split()
    splitter = import_extra("tokenizers", "hf", "words").pre_tokenizers.WhitespaceSplit()
    return [word for word, _ in splitter.pre_tokenize_str(text)]


def encode_words(tokenizer: Any, texts: Sequence[Sequence[str]], tokens: int) -> list[list[int]]:
    """Return the ids of the words of each text, one after the other, each cut or padded to
    ``tokens``: a function of each word alone, without special tokens around it."""
    distinct = {word: place for place, word in enumerate(dict.fromkeys(itertools.chain(*texts)))}
    how = {"padding": "max_length", "truncation": True, "max_length": tokens, "verbose": False}
    # The blank before a word is part of the first token of some vocabularies.
    spaced = [f" {word}" for word in distinct]
    rows = tokenizer(spaced, add_special_tokens=False, **how)["input_ids"] if spaced else []
    return [[n for word in text for n in rows[distinct[word]]] for text in texts]


def window_options(
    tokenizer: Any, texts: Iterable[str], words: int, *, max_length: int | None = None
) -> dict[str, Any]:
    """Return what a `wellposed.models.WindowConfig` says of windows of ``words`` words.

    Args:
        tokenizer: of the model.
        texts: of train; their words say to how many tokens a word is padded.
        words: of a window.
        max_length: words of a text that are read; all if None.
    """
    import numpy as np

    read = partial(tokenizer, verbose=False)
    (whole,) = read([" a"])["input_ids"]
    (bare,) = read([" a"], add_special_tokens=False)["input_ids"]
    start = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
    counts = Counter(f" {w}" for text in texts for w in split_words(text)[:max_length])
    ids = read(list(counts) or [" a"], add_special_tokens=False)["input_ids"]
    sizes = np.repeat(list(map(len, ids)), list(counts.values()) or [1])
    tokens = max(1, int(np.quantile(sizes, _FITTING, method="higher")))
    frame = [whole[:start], whole[start + len(bare) :]]
    return {"window_words": words, "word_tokens": tokens, "frame": frame}
