"""Texts as words between white space, encoded one by one for windows; works without torch."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from wellposed.errors import ConfigError, import_extra

# str.split() splits at these too; Unicode White_Space, which tokenizers follows, has none of them.
_PYTHON_ONLY_SPACES = "\x1c\x1d\x1e\x1f"
_FITTING = 0.999
"""Share of train words that windows read whole; longer ones are cut to as many tokens."""
_USUAL = 0.95
_MOST_TIMES = 4
"""A word has at most this many times the tokens of the longest of so many train words: every word
is padded to that length, and one web address would set it for all."""
logger = logging.getLogger("wellposed.words")


def split_words(text: str) -> list[str]:
    """Split at Unicode white space, exactly as ``tokenizers.pre_tokenizers.WhitespaceSplit``."""
    if not any(character in text for character in _PYTHON_ONLY_SPACES):
        return text.split()
    splitter = import_extra("tokenizers", "hf", "words").pre_tokenizers.WhitespaceSplit()
    return [word for word, _ in splitter.pre_tokenize_str(text)]


def require_tokenizer(call: str, tokenizer: Any) -> None:
    """Raise `ConfigError` unless ``tokenizer`` is one of transformers (not its name)."""
    needed = ("pad_token_id", "get_vocab", "num_special_tokens_to_add", "model_max_length")
    lacks = [name for name in needed if not hasattr(tokenizer, name)]
    if isinstance(tokenizer, type) or not callable(tokenizer) or lacks:
        kind = tokenizer.__name__ if isinstance(tokenizer, type) else type(tokenizer).__name__
        raise ConfigError(
            f"{call}: tokenizer: expected a tokenizer of transformers, received {kind}; load it with"
            " transformers.AutoTokenizer.from_pretrained"
        )


def encode_words(
    tokenizer: Any, texts: Sequence[Sequence[str]], tokens: int, mark: int | None = None
) -> list[list[int]]:
    """Return the ids of each text's words, each encoded alone and cut or padded to ``tokens``.

    Args:
        tokenizer: Of the model.
        texts: The words of each text.
        tokens: ``word_tokens`` of the model's `WindowConfig`.
        mark: ``word_mark`` of the model's `WindowConfig`: precedes the ids of each word.
    """
    distinct = {word: index for index, word in enumerate(dict.fromkeys(itertools.chain(*texts)))}
    options = {"padding": "max_length", "truncation": True, "max_length": tokens, "verbose": False}
    # In some vocabularies the blank before a word is part of its first token.
    spaced = [f" {word}" for word in distinct]
    rows = tokenizer(spaced, add_special_tokens=False, **options)["input_ids"] if spaced else []
    if mark is not None:
        rows = [[mark, *row] for row in rows]
    return [[n for word in text for n in rows[distinct[word]]] for text in texts]


def window_options(
    tokenizer: Any, texts: Iterable[str], words: int, *, max_length: int | None = None
) -> dict[str, Any]:
    """Return options of a `wellposed.models.WindowConfig`; arguments as of `read_in_windows`."""
    import numpy as np

    if isinstance(texts, str):
        raise ConfigError("texts: received one str; expected a list of texts")
    read = partial(tokenizer, verbose=False)
    (framed,) = read([" a"])["input_ids"]
    (bare,) = read([" a"], add_special_tokens=False)["input_ids"]
    starts = (i for i in range(len(framed)) if framed[i : i + len(bare)] == bare)
    start = next(starts, None)
    if start is None:
        raise ConfigError(
            "windows of words: this tokenizer reads 'a' otherwise between its special tokens, so words"
            " cannot be framed one by one; use another tokenizer"
        )
    counts = Counter(f" {w}" for text in texts for w in split_words(text)[:max_length])
    ids = read(list(counts) or [" a"], add_special_tokens=False)["input_ids"]
    sizes = np.repeat(list(map(len, ids)), list(counts.values()) or [1])
    fitting = int(np.quantile(sizes, _FITTING, method="higher"))
    usual = int(np.quantile(sizes, _USUAL, method="lower"))
    tokens = max(1, min(fitting, _MOST_TIMES * max(1, usual)))
    _log_cut_words(list(counts), sizes, list(map(len, ids)), tokens)
    frame = [framed[:start], framed[start + len(bare) :]]
    # No tokenizer gives a negative id, and windows of other words have another mark.
    options = {"window_words": words, "word_tokens": tokens, "word_mark": -(tokens + 1)}
    return {**options, "frame": frame}


def _log_cut_words(words: Sequence[str], sizes: Any, lengths: Sequence[int], tokens: int) -> None:
    """Log how many words of train are cut, and the longest of them."""
    cut = int((sizes > tokens).sum())
    if cut:
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        logger.warning(
            "windows of words read the first %d tokens of a word: %d of %d train words are longer and"
            " are cut, the longest has %d (%.40r)",
            tokens,
            cut,
            len(sizes),
            lengths[longest],
            words[longest].strip(),
        )
