"""Tasks ``language_modeling``, ``char_lm`` and ``word_lm``: predict the next token of any tokenizer,
the next character, or the next word."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from wellposed.errors import ConfigError, DataError
from wellposed.options import Ge, Size
from wellposed.tasks.batches import Ragged
from wellposed.tasks.data.splits import Described, Split
from wellposed.tasks.data.texts import TextOptions, load_texts
from wellposed.tasks.kinds.language_model import BlockDataset, LanguageModelTask, LineDataset
from wellposed.tasks.task import Batch, Sums, register_task
from wellposed.tasks.text.tokenizers import (
    CharacterEncoder,
    Encoded,
    TextEncoder,
    WordEncoder,
    build_encoder,
    count_unknown,
    split_words,
)

if TYPE_CHECKING:
    from torch import Tensor

END = "<eos>"
_PIECES = re.compile(r"\w+|[^\w\s]")
_BLANK_LINES = re.compile(r"\n\s*\n")


@dataclass(frozen=True)
class CharacterLimit(TextOptions):
    """Where running text is, and how much of it is taken."""

    limit_chars: Annotated[int, Ge(2)] | None = None
    """Keep only the first characters of the train text."""


def _load(
    options: CharacterLimit, text_format: str = "plain"
) -> tuple[dict[Split, str], Described]:
    """Return the texts, of train the characters within the limit, and what was read."""
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
    """Tokens in a block, of which all but the first are predicted."""


@register_task(
    "language_modeling",
    LanguageModelingOptions,
    "predict the next token of a text, with any tokenizer (bits per byte)",
)
class LanguageModelingTask(LanguageModelTask):
    """Next-token prediction, each token of a split predicted once from the tokens before it in its
    block.

    ``nats_per_token`` is the mean of -ln p over all tokens but the first of the split,
    ``perplexity`` its exponential. ``bits_per_byte`` is the sum of -log2 p over the UTF-8 bytes of
    the predicted text, so that models with different tokenizers can be compared. Status: exact;
    bytes are counted by position, from the tokenizer's offsets, white space that it skips included.
    Of a tokenizer that loses what it cannot encode (unknown tokens, counted in the description) it
    is no code length.

    The text is cut without special tokens and the context restarts at every block, so the numbers
    are upper bounds on those of a longer context. Train blocks are cut at an offset drawn by (seed,
    epoch).

    >>> from wellposed.tasks import build_task
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
        encoder = build_encoder(options.tokenizer, [texts["train"]], max_words=1)
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
        return {
            **sums,
            "bits_per_byte": (sums["nats_per_token"][0] / math.log(2), float(predicted_bytes)),
        }

    def summarize(self, totals: Sums) -> dict[str, float]:
        bits, predicted_bytes = totals["bits_per_byte"]
        return {**super().summarize(totals), "bits_per_byte": bits / max(1.0, predicted_bytes)}

    def reference(self) -> dict[str, float]:
        """Return the metrics of the frequencies of valid's own tokens, which no predictor without
        context is below."""
        frequencies = super().reference()
        sizes = [size for block in self._examples["valid"] for size in block["label_bytes"][1:]]
        bits = frequencies["nats_per_token"] * len(sizes) / math.log(2)
        return {**frequencies, "bits_per_byte": bits / max(1, sum(sizes))}


PIECE = 1_000_000
"""Characters that are cut into tokens at once; a longer text is cut at line ends."""


def encode_with_bytes(encoder: TextEncoder, text: str) -> Encoded:
    """Return the tokens of ``text`` without special ones, and bytes per token that sum to those of
    the text.

    A token stands for what lies between the end of the tokens before it and its own end, white
    space that the tokenizer skips included; of the tokens of one character the first stands for all
    its bytes, the last token for the rest of the text.

    Raises:
        ConfigError: the tokenizer does not say where in a text its tokens are.
    """
    tokenizer: Any = encoder.tokenizer(max_length=PIECE)
    if not tokenizer.is_fast:
        raise ConfigError(
            f"tokenizer {encoder.kind!r} does not say where in a text its tokens are, so bytes"
            " cannot be counted; give a folder that holds tokenizer.json"
        )
    ids: list[NDArray[np.integer]] = []
    sizes: list[NDArray[np.integer]] = []
    for piece in cut_lines(text, PIECE):
        found = tokenizer(
            piece, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        ends = np.fromiter(
            (end for _, end in found["offset_mapping"]), np.int64, len(found["input_ids"])
        )
        ids.append(np.array(found["input_ids"], np.int32))
        sizes.append(_bytes_up_to(piece, ends))
    tokens = np.concatenate(ids)
    unknown = count_unknown(tokenizer, tokens)
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
    """Return bytes per token from the character that each token ends before."""
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
    """spaced has a space between characters and _ for a space, as in Penn Treebank; auto looks at the first lines."""
    seq_len: int = 256
    """Tokens in a block, of which all but the first are predicted; of lines the most."""
    examples: Literal["blocks", "lines"] = "blocks"
    """blocks of running text, or one line an example after the line feed before it, padded, longer ones in pieces."""


@register_task(
    "char_lm", CharLMOptions, "predict the next character of a text (nats per character)"
)
class CharLMTask(LanguageModelTask):
    """Next-character prediction, each character of a split predicted once from the characters
    before it in its block.

    ``nats_per_char`` is the mean of -ln p over all characters but the first of the split;
    ``bits_per_char`` is that over ln 2. The context restarts at every block, so the numbers are
    upper bounds on those of a longer context. A character that train does not hold becomes the
    unknown token, is predicted like any other and is counted in the description. Train blocks are
    cut at an offset drawn by (seed, epoch).

    Not for comparing with published numbers of models that carry their state over the whole text:
    give those a context as long as theirs with ``seq_len``.

    With ``examples="lines"`` an example is a line of the text (a sentence of the Penn Treebank, as
    in kim2021), the context restarts at every line, batches hold lines of about one length, and
    padding has no loss.

    >>> from wellposed.tasks import build_task
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
        cut, encoder = BlockDataset, CharacterEncoder(set(texts["train"]))
        if options.examples == "lines":
            if "\n" not in texts["train"]:
                raise DataError(
                    f"{options.data}: the train text of {len(texts['train'])} characters has no"
                    " line feed, so it is one line; give examples='blocks'"
                )
            cut = partial(LineDataset, line_feed=int(encoder.encode(["\n"]).ids.flat[0]))
        super().__init__(
            encoder=encoder,
            encoded={split: encoder.encode([text]) for split, text in texts.items()},
            seq_len=options.seq_len,
            described={**source, "examples": options.examples},
            cut=cut,
        )

    def _metrics(self, nats: float) -> dict[str, float]:
        return {"nats_per_char": nats, "bits_per_char": nats / math.log(2)}


@dataclass(frozen=True)
class WordLMOptions(TextOptions):
    """Options of the task `word_lm`."""

    words: Literal["auto", "space", "pieces"] = "auto"
    """space: between white space, as in Penn Treebank; pieces: words and marks apart; auto: pieces for builtin."""
    eos: bool = True
    """Put the word <eos> at the end of every line that holds a word (of every paragraph, for builtin)."""
    max_words: Size | None = None
    """Words in the vocabulary, the most frequent of train; all where not given (10000 for builtin)."""
    seq_len: int = 36
    """Tokens in a block, of which all but the first are predicted; 36 predicts 35 words, as in sengupta2023."""
    limit_words: Annotated[int, Ge(2)] | None = None
    """Keep only the first words of the train text."""


@register_task("word_lm", WordLMOptions, "predict the next word of a text (perplexity)")
class WordLMTask(LanguageModelTask):
    """Next-word prediction, each word of a split predicted once from the words before it in its
    block.

    ``perplexity`` is exp of the mean of -ln p over all words but the first of the split, ``<eos>``
    included, as usual for the Penn Treebank (929589, 73760 and 82430 words). The vocabulary is that
    of train; a word it does not hold becomes the unknown token, is predicted like any other and is
    counted in the description. ``<unk>`` written in a text is a word. The context restarts at every
    block, so numbers are upper bounds on those of a longer context.

    Source: Mikolov et al. 2010 for the form of the text.

    >>> from wellposed.tasks import build_task
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
        pieces = options.words == "pieces" or (options.words == "auto" and builtin)
        words: dict[Split, list[str]] = {
            split: _words(text, pieces=pieces, paragraphs=builtin, eos=options.eos)
            for split, text in texts.items()
        }
        full = len(words["train"])
        words["train"] = words["train"][: options.limit_words]
        size = options.max_words or (10_000 if builtin else len(set(words["train"])))
        encoder = WordEncoder.from_texts([" ".join(words["train"])], max_words=size)
        super().__init__(
            encoder=encoder,
            encoded={split: encoder.encode([" ".join(held)]) for split, held in words.items()},
            seq_len=options.seq_len,
            described={
                **source,
                "words": {split: len(held) for split, held in words.items()},
                "split_at": "white space and between words and marks" if pieces else "white space",
                "end_of_line": END if options.eos else None,
                "train_words_left_out_by_limit_words": full - len(words["train"]),
            },
        )


def _words(text: str, *, pieces: bool, paragraphs: bool, eos: bool) -> list[str]:
    """Return the words of a text, with ``<eos>`` after every line that holds one."""
    lines = _BLANK_LINES.split(text) if paragraphs else text.split("\n")
    words: list[str] = []
    for line in lines:
        found = _PIECES.findall(line) if pieces else split_words(line)
        words += [*found, END] if eos and found else found
    return words
