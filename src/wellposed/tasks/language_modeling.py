"""Task ``language_modeling``: predict the next token, with any tokenizer; bits per byte."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from wellposed.errors import ConfigError
from wellposed.options import CheckedOptions, Ge
from wellposed.tasks.data.splits import SPLITS
from wellposed.tasks.data.texts import load_texts
from wellposed.tasks.kinds.language_model import LanguageModelTask
from wellposed.tasks.task import register_task
from wellposed.tasks.text import build_encoder

if TYPE_CHECKING:
    from torch import Tensor

    from wellposed.tasks.text.tokenizers import Encoded, TextEncoder


@dataclass(frozen=True)
class LanguageModelingOptions(CheckedOptions):
    """Options of the task `language_modeling`."""

    data: str = "builtin"
    """builtin (English prose that ships with Python), a text file (.gz too), a jsonl, json or
    parquet file with a column text, a folder, or hf:name[:config]."""
    valid: str | None = None
    """Text file of the valid split; found beside the train file, or cut from it, where not given."""
    test: str | None = None
    """Text file of the test split; found beside the train file, or cut from it, where not given."""
    tokenizer: str = "byte"
    """byte, character or hf:NAME_OR_PATH; with --from, the tokenizer of that model."""
    seq_len: int = 256
    """Tokens in a block, of which all but the first are predicted."""
    limit_chars: Annotated[int, Ge(2)] | None = None
    """Keep only the first characters of the train text."""


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

    name: ClassVar[str] = "language_modeling"
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
        texts, source = load_texts(options.data, valid=options.valid, test=options.test)
        full = len(texts["train"])
        texts["train"] = texts["train"][: options.limit_chars]
        super().__init__(
            encoder=build_encoder(options.tokenizer, [texts["train"]], max_words=1),
            texts=texts,
            seq_len=options.seq_len,
            source=source,
            details={
                "characters": {split: len(texts[split]) for split in SPLITS},
                "bytes": {split: len(texts[split].encode()) for split in SPLITS},
                "bytes_per_token": "by position, from the tokenizer's offsets",
                "train_characters_left_out_by_limit_chars": full - len(texts["train"]),
            },
        )

    def _encode(self, encoder: TextEncoder, text: str) -> Encoded:
        from wellposed.tasks.text.byte_counts import encode_with_bytes

        return encode_with_bytes(encoder, text)

    def metric_sums(
        self, logits: Tensor, batch: Mapping[str, Tensor]
    ) -> dict[str, tuple[float, float]]:
        sums = super().metric_sums(logits, batch)
        predicted_bytes = int(batch["label_bytes"][:, 1:].sum())
        return {
            **sums,
            "bits_per_byte": (sums["nats_per_token"][0] / math.log(2), float(predicted_bytes)),
        }

    def summarize(self, totals: Mapping[str, tuple[float, float]]) -> dict[str, float]:
        bits, predicted_bytes = totals["bits_per_byte"]
        return {**super().summarize(totals), "bits_per_byte": bits / max(1.0, predicted_bytes)}

    def reference(self) -> dict[str, float]:
        """Return the metrics of the frequencies of valid's own tokens, which no predictor without
        context is below."""
        frequencies = super().reference()
        sizes = [size for block in self._examples["valid"] for size in block["label_bytes"][1:]]
        bits = frequencies["nats_per_token"] * len(sizes) / math.log(2)
        return {**frequencies, "bits_per_byte": bits / max(1, sum(sizes))}

    def _metrics(self, nats: float) -> dict[str, float]:
        from wellposed.tasks.objectives import perplexity

        return {"nats_per_token": nats, "perplexity": perplexity(nats)}


register_task(
    LanguageModelingTask,
    LanguageModelingOptions,
    "predict the next token of a text, with any tokenizer (bits per byte)",
)
