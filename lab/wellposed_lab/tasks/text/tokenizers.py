"""Tokenizers of characters, bytes and words, with bulk encoding; and Hugging Face's.

Each encoder puts many texts into one flat array, and builds the equivalent
`PreTrainedTokenizerFast`. A text has no special tokens: ``<|pad|>`` is seven characters.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellposed.errors import CheckpointError, ConfigError, import_extra, is_out_of_memory
from wellposed.lazy import ModuleOnFirstUse
from wellposed.words import split_words
from wellposed_lab.tasks.batches import Ragged

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerFast
else:
    np = ModuleOnFirstUse("numpy")

PAD = "<|pad|>"
UNK = "<|unk|>"
# With a space inside, so that no word of a text is equal to them.
WORD_PAD = "<| pad |>"
WORD_UNK = "<| unk |>"
PAD_ID = 0
UNK_ID = 1
NUM_SPECIAL = 2
MAX_SAMPLES = 10
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "spiece.model")


@dataclass(frozen=True)
class Encoded:
    """Token ids per text, and the pieces that the vocabulary lacks."""

    ids: Ragged
    full_lengths: Sequence[int]
    """Tokens per text before truncation."""
    unknown: Mapping[str, int]
    """Number of times each unknown piece became the unknown token."""
    token_bytes: NDArray[np.integer] | None = None
    """UTF-8 bytes of the text of each token, if they were counted."""

    def unknown_description(self) -> dict[str, Any]:
        """Return the count of unknown pieces and the most frequent ones."""
        frequent = sorted(self.unknown.items(), key=lambda item: (-item[1], item[0]))[:MAX_SAMPLES]
        count = sum(self.unknown.values())
        distinct = len(self.unknown)
        return {"count": count, "distinct": distinct, "most_frequent": dict(frequent)}


class TextEncoder(ABC):
    """A vocabulary with its bulk encoder and its tokenizer."""

    kind: str
    pad_id: int = PAD_ID
    bos_id: int | None = None
    eos_id: int | None = None
    start_id: int = PAD_ID
    """First token that a decoder reads, for encoders of source-target pairs."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids, special tokens included."""

    def encode(self, texts: Sequence[str], *, max_length: int | None = None) -> Encoded:
        """Encode many texts, each cut to ``max_length`` tokens, as the tokenizer encodes one."""
        ids, unknown = self._encode(texts)
        rows = ids if max_length is None else ids.truncated(max_length)
        return Encoded(rows, ids.lengths.tolist(), unknown)

    def encode_targets(self, texts: Sequence[str]) -> Encoded:
        """Encode many texts of the target language; by default with the same vocabulary."""
        return self.encode(texts)

    def _encode(self, texts: Sequence[str]) -> tuple[Ragged, Mapping[str, int]]:
        """Return the ids of uncut texts and the number of each unknown piece."""
        raise NotImplementedError

    @abstractmethod
    def tokenizer(self, *, max_length: int) -> PreTrainedTokenizerFast:
        """Build the tokenizer; ``max_length`` becomes its ``model_max_length``."""

    def description(self) -> dict[str, Any]:
        """Return kind and vocabulary size."""
        return {"kind": self.kind, "vocabulary": self.vocab_size}


class CharacterEncoder(TextEncoder):
    """One token per Unicode code point; ids follow the sorted characters. Decoding is exact."""

    kind = "character"

    def __init__(self, characters: Iterable[str]) -> None:
        self.characters = sorted(set(characters))

    @property
    def vocab_size(self) -> int:
        return NUM_SPECIAL + len(self.characters)

    def _encode(self, texts: Sequence[str]) -> tuple[Ragged, Mapping[str, int]]:
        points = np.frombuffer("".join(texts).encode("utf-32-le"), dtype=np.uint32)
        table = np.full(0x110000, UNK_ID, dtype=np.int32)
        points_known = [ord(character) for character in self.characters]
        table[points_known] = np.arange(NUM_SPECIAL, self.vocab_size)
        flat = table[points]
        missing, counts = np.unique(points[flat == UNK_ID], return_counts=True)
        unknown = {chr(point): int(count) for point, count in zip(missing, counts, strict=True)}
        return Ragged(flat, [len(text) for text in texts]), unknown

    def tokenizer(self, *, max_length: int) -> PreTrainedTokenizerFast:
        inner = symbol_tokenizer(self.characters)
        inner.decoder = tokenizers_library().decoders.Fuse()
        return wrap_tokenizer(inner, max_length)


class ByteEncoder(TextEncoder):
    """One token per UTF-8 byte, id = byte + 2; nothing is unknown. Decoding is exact."""

    kind = "byte"

    @property
    def vocab_size(self) -> int:
        return NUM_SPECIAL + 256

    def _encode(self, texts: Sequence[str]) -> tuple[Ragged, Mapping[str, int]]:
        encoded = [text.encode("utf-8") for text in texts]
        flat = np.frombuffer(b"".join(encoded), dtype=np.uint8).astype(np.int32) + NUM_SPECIAL
        return Ragged(flat, [len(text) for text in encoded]), {}

    def tokenizer(self, *, max_length: int) -> PreTrainedTokenizerFast:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        symbols = bytes_to_unicode()  # the byte-level alphabet of GPT-2
        tokenizers = tokenizers_library()
        inner = symbol_tokenizer(symbols[byte] for byte in range(256))
        before = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        inner.pre_tokenizer = before
        inner.decoder = tokenizers.decoders.ByteLevel()
        return wrap_tokenizer(inner, max_length)


class WordEncoder(TextEncoder):
    """One token per word between white space; decoding joins words by one space. ``drop``
    characters are white space, such as parentheses of ListOps. Its words match ``pattern``, if
    any."""

    kind = "word"

    def __init__(self, words: Sequence[str], *, drop: str = "", pattern: str = "") -> None:
        self.words = list(words)
        self.drop = drop
        self.pattern = pattern
        self._ids = {word: NUM_SPECIAL + index for index, word in enumerate(self.words)}

    @classmethod
    def from_texts(cls, texts: Sequence[str], *, max_words: int, pattern: str = "") -> WordEncoder:
        """Take the ``max_words`` most frequent words, ties in alphabetical order."""
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(split_words(text))
        words = sorted(sorted(counts), key=counts.__getitem__, reverse=True)[:max_words]
        return cls(words, pattern=pattern)

    @property
    def vocab_size(self) -> int:
        return NUM_SPECIAL + len(self.words)

    def _encode(self, texts: Sequence[str]) -> tuple[Ragged, Mapping[str, int]]:
        if self.drop:
            spaces = str.maketrans(dict.fromkeys(self.drop, " "))
            texts = [text.translate(spaces) for text in texts]
        ids = _CountingIds(self._ids)
        rows = [list(map(ids.__getitem__, split_words(text))) for text in texts]
        return Ragged.from_lists(rows), ids.unknown

    def tokenizer(self, *, max_length: int) -> PreTrainedTokenizerFast:
        tokenizers = tokenizers_library()
        inner = tokenizers.Tokenizer(
            tokenizers.models.WordLevel({WORD_PAD: PAD_ID, WORD_UNK: UNK_ID, **self._ids}, WORD_UNK)
        )
        if self.drop:
            pattern = tokenizers.Regex("[" + "".join(f"\\{char}" for char in self.drop) + "]")
            inner.normalizer = tokenizers.normalizers.Replace(pattern, " ")

        before = tokenizers.pre_tokenizers
        inner.pre_tokenizer = before.WhitespaceSplit()
        if self.pattern:  # what is between matches is removed
            pattern = tokenizers.Regex(self.pattern)
            inner.pre_tokenizer = before.Split(pattern, "removed", invert=True)
        return wrap_tokenizer(inner, max_length, pad=WORD_PAD, unk=WORD_UNK)


class _CountingIds(dict[str, int]):
    """Ids by word; other words give the unknown token and are counted."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        super().__init__(ids)
        self.unknown: Counter[str] = Counter()

    def __missing__(self, word: str) -> int:
        self.unknown[word] += 1
        return UNK_ID


HAN = "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_SOUTH_EAST_ASIA = "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u1950-\u19df\u1a20-\u1aaf"
_ISLANDS = "\u1b00-\u1b7f\ua980-\ua9df"
_EAST_ASIA = "\u3040-\u30ff\u3100-\u312f\ua000-\ua48f\uff66-\uff9f"
UNSPACED = f"{HAN}{_SOUTH_EAST_ASIA}{_ISLANDS}{_EAST_ASIA}"
"""Letters of scripts without blanks between words: Han, kana, Bopomofo, Yi, Thai, Lao, Tibetan,
Burmese, Khmer, Tai Le, New Tai Lue, Tai Tham, Balinese, Javanese."""
_LONGEST_WORD = 8


def lacks_blanks(text: str) -> bool:
    """Return whether a text is in a script without blanks, so that its words would be sentences.

    >>> lacks_blanks("this film is good"), lacks_blanks("\u8fd9\u90e8\u7535\u5f71\u975e\u5e38\u597d\u770b\u6781\u4e86")
    (False, True)
    """
    return len(re.findall(f"[{UNSPACED}]", text)) > _LONGEST_WORD * len(split_words(text))


def symbol_tokenizer(symbols: Iterable[str], *, special: Sequence[str] = (PAD, UNK)) -> Any:
    """Return a tokenizer of symbols, numbered after ``special``, whose second is the unknown."""
    library = tokenizers_library()
    vocabulary = {symbol: index for index, symbol in enumerate((*special, *symbols))}
    model = library.models.BPE(vocab=vocabulary, merges=[], unk_token=special[1])
    return library.Tokenizer(model)


def tokenizers_library() -> Any:
    """Return the module `tokenizers`, or raise with the extra that installs it."""
    return import_extra("tokenizers", "hf", "tokenizers")


def wrap_tokenizer(
    inner: Any, max_length: int, *, pad: str = PAD, unk: str = UNK, **options: Any
) -> PreTrainedTokenizerFast:
    """Return a `tokenizers.Tokenizer` as transformers' own; texts have no special tokens."""
    return import_extra("transformers", "hf", "tokenizers").PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token=pad,
        unk_token=unk,
        clean_up_tokenization_spaces=False,
        split_special_tokens=True,
        model_max_length=max_length,
        **options,
    )


def has_tokenizer(folder: Path) -> bool:
    """Return whether ``folder`` has a saved tokenizer."""
    return any((folder / file).is_file() for file in TOKENIZER_FILES)


PAIRS = "text_pairs"
"""Key of a tokenizer's options in models that an earlier version trained on pairs of texts."""


def load_tokenizer(name: str) -> Any:
    """Return the Hugging Face tokenizer of a folder or hub name. One that cannot be loaded, or
    reads no token, is a `CheckpointError`; without transformers it is a `ConfigError`."""
    library = import_extra("transformers", "hf", "Hugging Face tokenizers")
    from wellposed.models import load_pretrained

    tokenizer = load_pretrained(library.AutoTokenizer, name)
    longest = tokenizer.model_max_length
    if not isinstance(longest, int | float) or not 1 <= longest < math.inf:
        raise CheckpointError(
            f"{name}: model_max_length = {longest!r}, expected a number of tokens, 1 or more;"
            " correct its tokenizer_config.json"
        )
    try:
        tokenizer("a", verbose=False)
        tokenizer("a", "b", verbose=False)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in tokenizers is not an Exception
        if is_out_of_memory(error):
            raise
        raise CheckpointError(
            f"{name}: its tokenizer fails on a text: {type(error).__name__}: {str(error)[:200]};"
            " copy tokenizer.json and tokenizer_config.json again from an intact copy"
        ) from error
    return tokenizer


class PretrainedEncoder(TextEncoder):
    """A Hugging Face tokenizer by hub name or folder, with its special tokens around every text."""

    def __init__(self, name: str) -> None:
        self.kind = f"hf:{name}"
        try:
            self._tokenizer: Any = load_tokenizer(name)
        except CheckpointError as error:
            raise ConfigError(
                f"tokenizer 'hf:{name}' cannot be loaded: {error}; "
                "give a folder with tokenizer.json, or a hub name that is cached or reachable"
            ) from error

        self.pad_from_eos = self._tokenizer.pad_token is None
        if self.pad_from_eos:
            if self._tokenizer.eos_token is None:
                raise ConfigError(f"{self.kind}: neither a pad nor an eos token; set pad_token")
            self._tokenizer.pad_token = self._tokenizer.eos_token

        self.pad_id = int(self._tokenizer.pad_token_id)
        self.bos_id = self._tokenizer.bos_token_id
        self.eos_id = self._tokenizer.eos_token_id

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    def encode(self, texts: Sequence[str], *, max_length: int | None = None) -> Encoded:
        """Encode many texts; the tokenizer's own truncation keeps its special tokens."""
        rows = self._rows(texts)
        full_lengths = list(map(len, rows))
        if max_length is not None:
            longer = [index for index, length in enumerate(full_lengths) if length > max_length]
            settings = {"truncation": True, "max_length": max_length}
            cut = self._rows([texts[index] for index in longer], **settings)
            for index, row in zip(longer, cut, strict=True):
                rows[index] = row
        ids = Ragged.from_lists(rows)
        return Encoded(ids, full_lengths, count_unknown(self._tokenizer, ids.flat))

    def _rows(self, texts: Sequence[str], **options: Any) -> list[list[int]]:
        settings = {"verbose": False, **options}
        return list(self._tokenizer(list(texts), **settings)["input_ids"]) if texts else []

    def tokenizer(self, *, max_length: int | None = None) -> PreTrainedTokenizerFast:
        if max_length is not None:
            self._tokenizer.model_max_length = max_length
        return self._tokenizer

    def description(self) -> dict[str, Any]:
        return {**super().description(), "pad_token_is_eos_token": self.pad_from_eos}


def count_unknown(tokenizer: Any, ids: NDArray[np.integer]) -> dict[str, int]:
    """Return how many of ``ids`` are the unknown token, if the tokenizer has one."""
    number = tokenizer.unk_token_id
    count = 0 if number in (None, tokenizer.eos_token_id) else int((ids == number).sum())
    return {tokenizer.unk_token: count} if count else {}


class PretrainedPairEncoder(PretrainedEncoder):
    """Sources through the tokenizer, targets through its ``text_target``, each with its end token.
    The decoder starts with its model's ``decoder_start_token_id``, else bos or padding."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        if self.eos_id is None or self._targets([""])[0][-1:] != [self.eos_id]:
            raise ConfigError(
                f"tokenizer {self.kind!r} puts no end token after a target, so a decoder"
                " would never stop; give the tokenizer of an encoder-decoder such as T5, BART or Marian"
            )
        from wellposed.models import start_config

        start = None
        with suppress(CheckpointError):
            start = getattr(start_config(name), "decoder_start_token_id", None)
        starts = (start, self.bos_id, self.pad_id)
        self.start_id = next(number for number in starts if number is not None)

    def encode_targets(self, texts: Sequence[str]) -> Encoded:
        ids = Ragged.from_lists(self._targets(texts))
        return Encoded(ids, ids.lengths.tolist(), count_unknown(self._tokenizer, ids.flat))

    def description(self) -> dict[str, Any]:
        return {**super().description(), "decoder_start_token_id": self.start_id}

    def _targets(self, texts: Sequence[str]) -> list[list[int]]:
        return self._tokenizer(text_target=list(texts), verbose=False)["input_ids"] if texts else []


def build_encoder(tokenizer: str, train_texts: Sequence[str], *, max_words: int) -> TextEncoder:
    """Build ``byte``, ``character``, ``word`` or ``hf:NAME_OR_PATH``; words are those of train."""
    if tokenizer == "byte":
        return ByteEncoder()
    if tokenizer == "character":
        return CharacterEncoder(set().union(*map(set, train_texts)))
    if tokenizer == "word":
        return WordEncoder.from_texts(train_texts, max_words=max_words)
    if tokenizer.startswith("hf:") and tokenizer != "hf:":
        return PretrainedEncoder(tokenizer.removeprefix("hf:"))
    raise ConfigError(f"tokenizer = {tokenizer!r}, expected byte, character, word or hf:NAME")
