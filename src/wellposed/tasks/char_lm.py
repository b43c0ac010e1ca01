"""Task ``char_lm``: predict the next character of a text; nats and bits per character."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from wellposed.errors import DataError
from wellposed.options import Ge
from wellposed.tasks.data.splits import SPLITS
from wellposed.tasks.data.texts import TextOptions, load_texts
from wellposed.tasks.kinds.language_model import BlockDataset, LanguageModelTask, LineDataset
from wellposed.tasks.task import register_task
from wellposed.tasks.text.tokenizers import CharacterEncoder

if TYPE_CHECKING:
    from wellposed.tasks.text.tokenizers import Encoded, TextEncoder


@dataclass(frozen=True)
class CharLMOptions(TextOptions):
    """Options of the task `char_lm`."""

    format: Literal["auto", "plain", "spaced"] = "auto"
    """spaced has a space between characters and _ for a space, as in Penn Treebank; auto looks at the first lines."""
    seq_len: int = 256
    """Tokens in a block, of which all but the first are predicted; of lines the most."""
    examples: Literal["blocks", "lines"] = "blocks"
    """blocks of running text, or one line an example after the line feed before it, padded, longer ones in pieces."""
    limit_chars: Annotated[int, Ge(2)] | None = None
    """Keep only the first characters of the train text."""


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
        texts, source = load_texts(options, options.format)
        full = len(texts["train"])
        texts["train"] = texts["train"][: options.limit_chars]
        if options.examples == "lines" and "\n" not in texts["train"]:
            raise DataError(
                f"{options.data}: the train text of {len(texts['train'])} characters has no line"
                " feed, so it is one line; give examples='blocks'"
            )
        super().__init__(
            encoder=CharacterEncoder(set(texts["train"])),
            texts=texts,
            seq_len=options.seq_len,
            described={
                **source,
                "examples": options.examples,
                "characters": {split: len(texts[split]) for split in SPLITS},
                "train_characters_left_out_by_limit_chars": full - len(texts["train"]),
            },
        )

    def _cut(
        self, encoder: TextEncoder, encoded: Encoded, *, seq_len: int, where: str
    ) -> BlockDataset:
        if self.options.examples == "blocks":
            return super()._cut(encoder, encoded, seq_len=seq_len, where=where)
        line_feed = int(encoder.encode(["\n"]).ids.flat[0])
        return LineDataset(encoded.ids.flat, line_feed=line_feed, seq_len=seq_len, where=where)

    def _metrics(self, nats: float) -> dict[str, float]:
        return {"nats_per_char": nats, "bits_per_char": nats / math.log(2)}
