"""Tasks of text: ``language_modeling`` (any tokenizer), ``char_lm`` and ``word_lm``."""

from __future__ import annotations

import itertools
import math
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from wellposed.errors import ConfigError, DataError
from wellposed.lazy import ModuleOnFirstUse
from wellposed.options import Ge, Size
from wellposed_lab.tasks import task
from wellposed_lab.tasks.batches import (
    Example,
    Ragged,
    Rows,
    bucketed_batches,
    pad_examples,
    shuffle_key,
)
from wellposed_lab.tasks.data.splits import Loaded, Split
from wellposed_lab.tasks.data.texts import TextOptions, load_texts
from wellposed_lab.tasks.task import Batch, Kind, Sums, TokenLossTask, register_task
from wellposed_lab.tasks.text import tokenizers
from wellposed_lab.tasks.text.tokenizers import Encoded, TextEncoder

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor
else:
    np = ModuleOnFirstUse("numpy")


class BlockDataset(Rows[Example]):
    """Blocks of ``seq_len`` tokens, each starting with the last token of the one before; or lines.

    A block of n tokens has n - 1 predictions, so tokens 1..N-1 are predicted once. Index ``b``
    below ``len(self)`` is block b at offset 0. A cut at an offset o in 1..seq_len-2 has first a
    block of o + 1 tokens, then full ones. Their `indices(o)` are at least ``len(self)``, so batches
    contain the cut of their epoch. The bytes of each token, if known, are ``label_bytes``.

    With ``line_feed``, the token that ends a line, an example is one line after the line feed
    before it, which is only context. Lines of more than ``seq_len`` tokens become blocks. All
    epochs have the same cut.

    >>> blocks = BlockDataset(np.arange(6), seq_len=3, where="text")
    >>> [block["input_ids"] for block in blocks]
    [[0, 1, 2], [2, 3, 4], [4, 5]]
    >>> [blocks[index]["input_ids"] for index in blocks.indices(1)]
    [[0, 1], [1, 2, 3], [3, 4, 5]]
    >>> tokens = np.array([5, 6, 0, 7, 8, 9, 0])
    >>> [line["input_ids"] for line in BlockDataset(tokens, line_feed=0, seq_len=3, where="text")]
    [[5, 6, 0], [0, 7, 8], [8, 9, 0]]
    """

    def __init__(
        self,
        tokens: NDArray[np.integer],
        *,
        seq_len: int,
        where: str,
        token_bytes: NDArray[np.integer] | None = None,
        line_feed: int | None = None,
    ) -> None:
        if seq_len < 2:
            raise ConfigError(f"seq_len = {seq_len}, expected 2 or more: seq_len - 1 are predicted")
        if len(tokens) < 2:
            raise DataError(f"{where}: {len(tokens)} tokens, expected at least 2: one is context")
        self.tokens = tokens
        self.token_bytes = token_bytes
        self._stride = seq_len - 1
        self._feeds = None if line_feed is None else np.flatnonzero(tokens[:-1] == line_feed)
        self.num_offsets = 1 if self._feeds is not None else min(self._stride, len(tokens) - 1)
        """Number of different cuts."""
        self._cut = -1, list[int]()
        self._slots = len(self) + 1

    def __len__(self) -> int:
        return len(self._starts(0))

    def indices(self, offset: int) -> list[int]:
        """Return the indices of the blocks of one cut, in the order of the text."""
        return [offset * self._slots + block for block in range(len(self._starts(offset)))]

    def sizes(self, offset: int) -> dict[int, int]:
        """Return the tokens of each block of one cut by its index."""
        sides = itertools.pairwise([*self._starts(offset), len(self.tokens) - 1])
        sizes = [last - first + 1 for first, last in sides]
        return dict(zip(self.indices(offset), sizes, strict=True))

    def bounds(self, index: int) -> tuple[int, int]:
        """Return the first token of a block and the one after its last."""
        offset, block = divmod(index, self._slots)
        starts = self._starts(offset) if 0 <= offset < self.num_offsets else []
        if block >= len(starts):
            raise IndexError(f"no block has index {index}")
        is_last = block + 1 == len(starts)
        return starts[block], len(self.tokens) if is_last else starts[block + 1] + 1

    def _starts(self, offset: int) -> list[int]:
        """Return the first token of each block of one cut."""
        if self._cut[0] != offset:
            lines = np.unique(np.append(0, [offset] if self._feeds is None else self._feeds))
            stops = np.append(lines[1:], len(self.tokens) - 1)
            counts = -((lines - stops) // self._stride)
            index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
            self._cut = offset, (np.repeat(lines, counts) + index * self._stride).tolist()
        return self._cut[1]

    def _row(self, index: int) -> Example:
        start, stop = self.bounds(index + len(self) if index < 0 else index)
        block = {"input_ids": self.tokens[start:stop].tolist()}
        if self.token_bytes is None:
            return block
        return {**block, "label_bytes": self.token_bytes[start:stop].tolist()}


class LanguageModelTask(TokenLossTask[BlockDataset]):
    """Prediction of the next token of a text; a subclass defines tokens and loads the texts.

    The metric is the mean of -ln p over all tokens of a split but the first. Train blocks are cut
    at an offset drawn by (seed, epoch), and the context restarts at each block. The reference is
    the entropy of valid's own token frequencies, a lower bound for predictors without context.
    """

    kind: ClassVar[Kind] = "causal_lm"
    noun: ClassVar[str]
    """Name of a token."""

    def __init__(
        self,
        *,
        encoded: Mapping[Split, Encoded],
        seq_len: int,
        described: Mapping[str, Any],
        line_feed: int | None = None,
        **parts: Any,
    ) -> None:
        blocks: dict[Split, BlockDataset] = {}
        for split, text in encoded.items():
            settings: dict[str, Any] = {"token_bytes": text.token_bytes, "line_feed": line_feed}
            where = f"{described['source']} ({split})"
            blocks[split] = BlockDataset(text.ids.flat, seq_len=seq_len, where=where, **settings)
        unknown = {split: text.unknown_description() for split, text in encoded.items()}
        described = {**described, f"unknown_{self.noun}s": unknown}
        super().__init__(examples=blocks, max_length=seq_len, described=described, **parts)

    def lengths(self, split: Split) -> Sequence[int]:
        return list(self._examples[split].sizes(0).values())

    def batches(self, split: Split, batch_size: int, *, seed: int, epoch: int) -> list[list[int]]:
        blocks = self._examples[split]
        key = shuffle_key(split, seed, epoch)
        draw = random.Random(f"offset/{key}").randrange
        offset = draw(blocks.num_offsets) if split == "train" else 0
        return bucketed_batches(blocks.sizes(offset), batch_size, shuffle=key)

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        batch = pad_examples(examples, pad_id=self._encoder.pad_id)
        ids = batch["input_ids"]
        padding = batch["attention_mask"] == 0
        return {**batch, "labels": ids.masked_fill(padding, task.IGNORED_LABEL)}

    def reference(self) -> dict[str, float]:
        entropy = task.frequency_entropy(self._examples["valid"].tokens[1:])
        return self._metrics_on("valid", entropy)

    def train_reference(self, split: Split) -> dict[str, float]:
        train, tokens = (self._examples[name].tokens for name in ("train", split))
        nats = task.unigram_nats(train, tokens[1:], self._encoder.vocab_size)
        return self._metrics_on(split, nats)

    def _metrics_on(self, split: Split, nats: float) -> dict[str, float]:
        del split
        return self._metrics(nats)

    def _describe_examples(self) -> dict[str, Any]:
        return {
            "seq_len": self._max_length,
            "blocks": {split: len(blocks) for split, blocks in self._examples.items()},
            "predicted": (
                f"every {self.noun} of a split but its first, once; context restarts at every block"
            ),
        }


END = "<eos>"
_PIECES = re.compile(r"\w+|[^\w\s]")
_BLANK_LINES = re.compile(r"\n\s*\n")


@dataclass(frozen=True)
class CharacterLimit(TextOptions):
    """Running text, and how much of it is used."""

    limit_chars: Annotated[int, Ge(2)] | None = None
    """Keep only the first characters of the train text."""


def _load(options: CharacterLimit, text_format: str = "plain") -> Loaded[str]:
    texts, source = load_texts(options, text_format)
    full = len(texts["train"])
    texts["train"] = texts["train"][: options.limit_chars]
    return texts, {
        **source,
        "characters": {split: len(text) for split, text in texts.items()},
        "train_characters_left_out_by_limit_chars": full - len(texts["train"]),
    }


@dataclass(frozen=True)
class LanguageModelingOptions(CharacterLimit):
    """Options of the task `language_modeling`."""

    tokenizer: str = "byte"
    """byte, character or hf:NAME_OR_PATH; with --from, the tokenizer of that model."""
    seq_len: int = 256
    """Tokens in a block; all but the first are predicted."""


@register_task(
    "language_modeling",
    LanguageModelingOptions,
    "predict the next token of a text, with any tokenizer (bits per byte)",
)
class LanguageModelingTask(LanguageModelTask):
    """Next-token prediction: each token is predicted once, from the tokens before it in its block.

    The mean of -ln p over all tokens of the split but the first is ``nats_per_token``, its
    exponential ``perplexity``. The sum of -log2 p over the UTF-8 bytes of the predicted text,
    including skipped white space, is ``bits_per_byte``, which compares tokenizers. Status: exact,
    but no code length if the tokenizer loses characters (unknown tokens, which are counted).

    The text has no special tokens. The context restarts at every block, so the numbers are upper
    bounds on those of a longer context. Train blocks are cut at an offset drawn by (seed, epoch).

    >>> from wellposed_lab.tasks.task import build_task
    >>> task = build_task("language_modeling", {"limit_chars": 5000, "seq_len": 100})
    >>> batch = task.collate([task.dataset("train")[0]])
    >>> batch["input_ids"].shape, int(batch["label_bytes"].sum())
    (torch.Size([1, 100]), 100)
    """

    headline: ClassVar[str] = "bits_per_byte"
    noun: ClassVar[str] = "token"
    nats_name: ClassVar[str] = "nats_per_token"

    def __init__(self, options: LanguageModelingOptions) -> None:
        self.options = options
        if options.tokenizer == "word":
            raise ConfigError(
                "language_modeling: tokenizer = 'word', expected byte, character or"
                " hf:NAME_OR_PATH; for words, which do not give the text back, use the task word_lm"
            )

        texts, source = _load(options)
        encoder = tokenizers.build_encoder(options.tokenizer, [texts["train"]], max_words=1)
        super().__init__(
            encoder=encoder,
            encoded={split: encode_with_bytes(encoder, text) for split, text in texts.items()},
            seq_len=options.seq_len,
            described={
                **source,
                "bytes": {split: len(text.encode()) for split, text in texts.items()},
                "bytes_per_token": "by position, from the tokenizer's offsets",
            },
        )

    def metric_sums(self, logits: Tensor, batch: Batch) -> Sums:
        sums = super().metric_sums(logits, batch)
        predicted_bytes = int(batch["label_bytes"][:, 1:].sum())
        bits = sums["nats_per_token"][0] / math.log(2)
        return {**sums, "bits_per_byte": (bits, float(predicted_bytes))}

    def summarize(self, totals: Sums) -> dict[str, float]:
        bits, predicted_bytes = totals["bits_per_byte"]
        return {**super().summarize(totals), "bits_per_byte": bits / max(1.0, predicted_bytes)}

    def _metrics_on(self, split: Split, nats: float) -> dict[str, float]:
        sizes = [size for block in self._examples[split] for size in block["label_bytes"][1:]]
        bits = nats * len(sizes) / math.log(2)
        return {**self._metrics(nats), "bits_per_byte": bits / max(1, sum(sizes))}


PIECE = 1_000_000
"""Characters that are tokenised at once; longer texts are cut at line ends."""


def encode_with_bytes(encoder: TextEncoder, text: str) -> Encoded:
    """Return the tokens of ``text`` without special ones, and the bytes of each, which sum to all.

    A token covers the text from the end of the tokens before it to its own end, with skipped white
    space. Of several in a character the first has its bytes; the last token has the rest. A
    tokenizer without offsets is a `ConfigError`.
    """
    tokenizer: Any = encoder.tokenizer(max_length=PIECE)
    if not tokenizer.is_fast:
        raise ConfigError(
            f"tokenizer {encoder.kind!r} gives no offsets of its tokens, so bytes cannot be counted;"
            " give a folder with tokenizer.json"
        )

    ids: list[NDArray[np.integer]] = []
    sizes: list[NDArray[np.integer]] = []
    for piece in cut_lines(text, PIECE):
        settings = {"add_special_tokens": False, "return_offsets_mapping": True, "verbose": False}
        encoded = tokenizer(piece, **settings)
        offsets = encoded["offset_mapping"]
        ends = np.fromiter((end for _, end in offsets), np.int64, len(offsets))
        ids.append(np.array(encoded["input_ids"], np.int32))
        sizes.append(_bytes_up_to(piece, ends))

    tokens = np.concatenate(ids)
    unknown = tokenizers.count_unknown(tokenizer, tokens)
    return Encoded(Ragged(tokens, [len(tokens)]), [len(tokens)], unknown, np.concatenate(sizes))


def cut_lines(text: str, size: int) -> list[str]:
    """Return parts of ``text`` of about ``size`` characters, cut at line ends.

    >>> cut_lines("one\\ntwo\\nthree", 5)
    ['one\\ntwo\\n', 'three']
    """
    lines = text.splitlines(keepends=True) if len(text) > size else [text]
    starts = itertools.accumulate(map(len, lines), initial=0)
    groups = itertools.groupby(zip(starts, lines, strict=False), key=lambda pair: pair[0] // size)
    return ["".join(line for _, line in group) for _, group in groups]


def _bytes_up_to(text: str, ends: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return the bytes of each token, from the character before which it ends."""
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    widths = 1 + sum((points >= limit).astype(np.int64) for limit in (0x80, 0x800, 0x10000))
    bytes_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(widths)])
    reached = bytes_before[np.maximum.accumulate(ends)]
    reached[-1:] = bytes_before[-1]
    return np.diff(reached, prepend=0).astype(np.int32)


@dataclass(frozen=True)
class CharLMOptions(CharacterLimit):
    """Options of the task `char_lm`."""

    format: Literal["auto", "plain", "spaced"] = "auto"
    """spaced has a space between characters and _ for a space, as in Penn Treebank; auto looks at
    the first lines."""
    seq_len: int = 256
    """Tokens in a block (most tokens of a line); all but the first are predicted."""
    examples: Literal["blocks", "lines"] = "blocks"
    """blocks of running text, or lines: one line per example, padded, long ones in pieces."""


@register_task(
    "char_lm", CharLMOptions, "predict the next character of a text (nats per character)"
)
class CharLMTask(LanguageModelTask):
    """Next-character prediction: each one is predicted once, from those before it in its block.

    The mean of -ln p over all characters of the split but the first is ``nats_per_char``; divided
    by ln 2 it is ``bits_per_char``. The context restarts at every block, so they are upper bounds
    on those of a longer context. Characters that train lacks become the unknown token and are
    counted in the description. Train blocks are cut at an offset drawn by (seed, epoch).

    Published models may carry state over the whole text; compare at a ``seq_len`` of that length.

    With ``examples="lines"`` an example is a line (a sentence of the Penn Treebank, as in kim2021)
    with its own context, in batches of similar length.

    >>> from wellposed_lab.tasks.task import build_task
    >>> task = build_task("char_lm", {"limit_chars": 5000, "seq_len": 100})
    >>> task.collate([task.dataset("train")[0]])["input_ids"].shape
    torch.Size([1, 100])
    """

    headline: ClassVar[str] = "nats_per_char"
    noun: ClassVar[str] = "character"
    nats_name: ClassVar[str] = "nats_per_char"

    def __init__(self, options: CharLMOptions) -> None:
        self.options = options
        texts, source = _load(options, options.format)
        line_feed = None
        encoder = tokenizers.CharacterEncoder(set(texts["train"]))
        if options.examples == "lines":
            if "\n" not in texts["train"]:
                raise DataError(
                    f"{options.data}: the train text of {len(texts['train'])} characters has no"
                    " line feed, so it is one line; give examples='blocks'"
                )
            line_feed = int(encoder.encode(["\n"]).ids.flat[0])

        super().__init__(
            encoder=encoder,
            encoded={split: encoder.encode([text]) for split, text in texts.items()},
            seq_len=options.seq_len,
            described={**source, "examples": options.examples},
            line_feed=line_feed,
        )

    def _metrics(self, nats: float) -> dict[str, float]:
        return {"nats_per_char": nats, "bits_per_char": nats / math.log(2)}


@dataclass(frozen=True)
class WordLMOptions(TextOptions):
    """Options of the task `word_lm`."""

    max_words: Size | None = None
    """Words in the vocabulary, the most frequent of train (default: all; 10000 for builtin)."""
    seq_len: int = 36
    """Tokens in a block, all but the first predicted; 36 predicts 35 words, as in sengupta2023."""
    limit_words: Annotated[int, Ge(2)] | None = None
    """Keep only the first words of the train text."""


@register_task("word_lm", WordLMOptions, "predict the next word of a text (perplexity)")
class WordLMTask(LanguageModelTask):
    """Next-word prediction: each word is predicted once, from the words before it in its block.

    The ``perplexity`` is exp of the mean of -ln p over all words of the split but the first, with
    ``<eos>``, as usual for the Penn Treebank (929589, 73760 and 82430 words). The form of the text
    is that of Mikolov et al. 2010. Words that train lacks become the unknown token and are counted
    in the description. ``<unk>`` in a text is a word. The context restarts at every block, so the
    numbers are upper bounds on those of a longer context.

    >>> from wellposed_lab.tasks.task import build_task
    >>> task = build_task("word_lm", {"limit_words": 2000, "seq_len": 20})
    >>> task.headline, task.collate([task.dataset("train")[0]])["input_ids"].shape
    ('perplexity', torch.Size([1, 20]))
    """

    headline: ClassVar[str] = "perplexity"
    noun: ClassVar[str] = "word"
    nats_name: ClassVar[str] = "nats_per_word"

    def __init__(self, options: WordLMOptions) -> None:
        self.options = options
        texts, source = load_texts(options)
        builtin = options.data == "builtin"
        words: dict[Split, list[str]] = {
            split: _words(text, builtin) for split, text in texts.items()
        }
        full = len(words["train"])
        words["train"] = words["train"][: options.limit_words]
        size = options.max_words or (10_000 if builtin else len(set(words["train"])))
        pattern = f"{END}|{_PIECES.pattern}" if builtin else ""
        joined = [" ".join(words["train"])]
        encoder = tokenizers.WordEncoder.from_texts(joined, max_words=size, pattern=pattern)
        super().__init__(
            encoder=encoder,
            encoded={split: encoder.encode([" ".join(part)]) for split, part in words.items()},
            seq_len=options.seq_len,
            described={
                **source,
                "words": {split: len(part) for split, part in words.items()},
                "split_at": "white space and between words and marks" if builtin else "white space",
                "end_of_line": END,
                "train_words_left_out_by_limit_words": full - len(words["train"]),
            },
        )


def _words(text: str, builtin: bool) -> list[str]:
    """Return the words, with ``<eos>`` after each line (builtin prose: paragraph) that has one."""
    words: list[str] = []
    for line in _BLANK_LINES.split(text) if builtin else text.split("\n"):
        pieces = _PIECES.findall(line) if builtin else tokenizers.split_words(line)
        words += [*pieces, END] if pieces else []
    return words
