"""Hugging Face tokenizers as the encoders of tasks, of texts or of source-target pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from wellposed.errors import CheckpointError, ConfigError, import_extra
from wellposed.tasks.batches import Ragged
from wellposed.tasks.text.tokenizers import (
    ByteEncoder,
    CharacterEncoder,
    Encoded,
    TextEncoder,
    WordEncoder,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerFast

PAIRS = "text_pairs"
"""Key of a tokenizer's own options: its model was trained on pairs of texts."""
TOKEN_TYPES = "token_type_ids"


def load_tokenizer(name: str) -> Any:
    """Return the Hugging Face tokenizer of a folder or a name of the hub.

    Raises:
        CheckpointError: it cannot be loaded, or says that a text has fewer tokens than one.
        ConfigError: transformers is not installed.
    """
    library = import_extra("transformers", "hf", "Hugging Face tokenizers")
    from wellposed.models import load_pretrained

    tokenizer = load_pretrained(library.AutoTokenizer, name)
    longest = tokenizer.model_max_length
    if not isinstance(longest, int | float) or not 1 <= longest < math.inf:
        raise CheckpointError(
            f"{name}: model_max_length = {longest!r}, expected a number of tokens, 1 or more;"
            " correct its tokenizer_config.json"
        )
    return tokenizer


class PretrainedEncoder(TextEncoder):
    """A Hugging Face tokenizer by hub name or folder, with its own special tokens around every
    text."""

    def __init__(self, name: str) -> None:
        self.kind = f"hf:{name}"
        try:
            self._tokenizer: Any = load_tokenizer(name)
        except CheckpointError as error:
            raise ConfigError(
                f"tokenizer 'hf:{name}' cannot be loaded: {error}; "
                "give a folder that holds tokenizer.json, or a hub name that is cached or reachable"
            ) from error
        self.pad_from_eos = self._tokenizer.pad_token is None
        if self.pad_from_eos:
            if self._tokenizer.eos_token is None:
                raise ConfigError(
                    f"tokenizer 'hf:{name}' has neither a pad nor an eos token, so it cannot pad a"
                    " batch"
                )
            self._tokenizer.pad_token = self._tokenizer.eos_token
        self.pad_id = int(self._tokenizer.pad_token_id)
        self.bos_id = self._tokenizer.bos_token_id
        self.eos_id = self._tokenizer.eos_token_id

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    def encode(
        self,
        texts: Sequence[str],
        *,
        max_length: int | None = None,
        pairs: Sequence[tuple[str, str]] | None = None,
    ) -> Encoded:
        """Encode many texts, or pairs in the tokenizer's own form, with its token types.

        Truncation is the tokenizer's own, which keeps its special tokens and cuts the longer text
        of a pair first.
        """
        if pairs is not None:
            self._tokenizer.init_kwargs[PAIRS] = True
        rows: Sequence[tuple[str, ...]] = [(text,) for text in texts] if pairs is None else pairs
        encoded = self._columns(rows)
        full_lengths = list(map(len, encoded["input_ids"]))
        if max_length is not None:
            longer = [index for index, length in enumerate(full_lengths) if length > max_length]
            how = {"truncation": True, "max_length": max_length}
            cut = self._columns([rows[index] for index in longer], **how)
            for name, column in encoded.items():
                for index, row in zip(longer, cut[name], strict=True):
                    column[index] = row
        ids = Ragged.from_lists(encoded["input_ids"])
        segments = Ragged.from_lists(encoded[TOKEN_TYPES]) if TOKEN_TYPES in encoded else None
        unknown = count_unknown(self._tokenizer, ids.flat)
        return Encoded(ids, full_lengths, unknown, segments=segments)

    def _columns(
        self, rows: Sequence[tuple[str, ...]], **options: Any
    ) -> dict[str, list[list[int]]]:
        """Return the ids of rows of one text or two, and the token types of pairs where the
        tokenizer gives them."""
        if not rows:
            return {name: [] for name in ("input_ids", TOKEN_TYPES)}
        names = ["input_ids", *([TOKEN_TYPES] if len(rows[0]) == 2 else [])]
        found = self._tokenizer(*map(list, zip(*rows, strict=True)), verbose=False, **options)
        return {name: found[name] for name in names if name in found}

    def _encode(self, texts: Sequence[str]) -> tuple[Ragged, Mapping[str, int]]:
        encoded = self.encode(texts)
        return encoded.ids, encoded.unknown

    def tokenizer(self, *, max_length: int | None = None) -> PreTrainedTokenizerFast:
        if max_length is not None:
            self._tokenizer.model_max_length = max_length
        return self._tokenizer

    def description(self) -> dict[str, Any]:
        return {**super().description(), "pad_token_is_eos_token": self.pad_from_eos}


def count_unknown(tokenizer: Any, ids: NDArray[np.integer]) -> dict[str, int]:
    """Return how many of ``ids`` are the unknown token, where the tokenizer has one of its own."""
    number = tokenizer.unk_token_id
    count = 0 if number in (None, tokenizer.eos_token_id) else int((ids == number).sum())
    return {tokenizer.unk_token: count} if count else {}


class PretrainedPairEncoder(PretrainedEncoder):
    """Sources through the tokenizer, targets through its ``text_target``; every target must end
    with its end token.

    The decoder starts with the ``decoder_start_token_id`` of the model whose folder the tokenizer
    is in; where that names none, with the tokenizer's beginning or else padding token.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        if self.eos_id is None or self._targets([""])[0][-1:] != [self.eos_id]:
            raise ConfigError(
                f"tokenizer {self.kind!r} puts no end token behind a target, so a decoder"
                " would never stop; give that of an encoder-decoder such as T5, BART or Marian"
            )
        starts = (_decoder_start(name), self.bos_id, self.pad_id)
        self.start_id = next(number for number in starts if number is not None)

    def encode_targets(self, texts: Sequence[str]) -> Encoded:
        ids = Ragged.from_lists(self._targets(texts))
        return Encoded(ids, ids.lengths.tolist(), count_unknown(self._tokenizer, ids.flat))

    def description(self) -> dict[str, Any]:
        return {**super().description(), "decoder_start_token_id": self.start_id}

    def _targets(self, texts: Sequence[str]) -> list[list[int]]:
        return self._tokenizer(text_target=list(texts), verbose=False)["input_ids"] if texts else []


def _decoder_start(name: str) -> int | None:
    from wellposed.models import start_config

    try:
        return getattr(start_config(name), "decoder_start_token_id", None)
    except CheckpointError:
        return None


def build_encoder(tokenizer: str, train_texts: Sequence[str], *, max_words: int) -> TextEncoder:
    """Build ``byte``, ``character``, ``word`` or ``hf:NAME_OR_PATH``; vocabularies come from the
    train texts alone."""
    if tokenizer == "byte":
        return ByteEncoder()
    if tokenizer == "character":
        return CharacterEncoder(set().union(*map(set, train_texts)))
    if tokenizer == "word":
        return WordEncoder.from_texts(train_texts, max_words=max_words)
    if tokenizer.startswith("hf:") and tokenizer != "hf:":
        return PretrainedEncoder(tokenizer.removeprefix("hf:"))
    raise ConfigError(
        f"tokenizer = {tokenizer!r}, expected byte, character, word or hf:NAME_OR_PATH"
    )
