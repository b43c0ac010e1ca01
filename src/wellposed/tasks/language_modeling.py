"""Task ``language_modeling``: predict the next token, with any tokenizer; bits per byte."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from wellposed.errors import ConfigError
from wellposed.options import Ge
from wellposed.tasks.batches import Ragged
from wellposed.tasks.data.splits import SPLITS
from wellposed.tasks.data.texts import TextOptions, load_texts
from wellposed.tasks.kinds.language_model import LanguageModelTask
from wellposed.tasks.task import Batch, Sums, register_task
from wellposed.tasks.text.pretrained import build_encoder, count_unknown
from wellposed.tasks.text.tokenizers import Encoded, TextEncoder

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LanguageModelingOptions(TextOptions):
    """Options of the task `language_modeling`."""

    tokenizer: str = "byte"
    """byte, character or hf:NAME_OR_PATH; with --from, the tokenizer of that model."""
    seq_len: int = 256
    """Tokens in a block, of which all but the first are predicted."""
    limit_chars: Annotated[int, Ge(2)] | None = None
    """Keep only the first characters of the train text."""


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
        texts, source = load_texts(options)
        full = len(texts["train"])
        texts["train"] = texts["train"][: options.limit_chars]
        super().__init__(
            encoder=build_encoder(options.tokenizer, [texts["train"]], max_words=1),
            texts=texts,
            seq_len=options.seq_len,
            described={
                **source,
                "characters": {split: len(texts[split]) for split in SPLITS},
                "bytes": {split: len(texts[split].encode()) for split in SPLITS},
                "bytes_per_token": "by position, from the tokenizer's offsets",
                "train_characters_left_out_by_limit_chars": full - len(texts["train"]),
            },
        )

    def _encode(self, encoder: TextEncoder, text: str) -> Encoded:
        return encode_with_bytes(encoder, text)

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
