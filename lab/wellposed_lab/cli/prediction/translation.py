"""``wellposed predict`` for an encoder-decoder: one output line per input line, in order, whatever
the lines hold."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from wellposed.errors import DataError, listed
from wellposed_lab.cli.prediction.lines import counted, line_writer, lines_of, say_blank, say_long
from wellposed_lab.tasks.data.files import TextFile

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from wellposed_lab.tasks.kinds.seq2seq import Decoding

CHUNK_BATCHES = 16
LongLines = Literal["refuse", "truncate"]


@dataclass(frozen=True)
class Translator:
    """Model, tokenizer and search of one call."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    decoding: Decoding
    batch_size: int
    long: LongLines

    @property
    def limit(self) -> int | None:
        """Most tokens of a source, or None where the model has no positions to run out of."""
        return int(getattr(self.model.config, "max_position_embeddings", 0) or 0) or None

    @property
    def kept(self) -> Literal["start", "end"]:
        """What is kept of a line that is cut: what was kept in training."""
        return "end" if self.tokenizer.truncation_side == "left" else "start"

    def encode(self, lines: Sequence[str]) -> list[list[int]]:
        """Return the ids of lines, ends included, with no truncation and no warning about
        length."""
        return self.tokenizer(list(lines), verbose=False)["input_ids"] if lines else []  # type: ignore[return-value]

    def cut(self, ids: list[int]) -> list[int]:
        """Return what is generated from for one line: its start or its end if it is long."""
        if self.limit is None or len(ids) <= self.limit:
            return ids
        return ids[-self.limit :] if self.kept == "end" else [*ids[: self.limit - 1], ids[-1]]

    def translate(self, lines: Sequence[str]) -> list[str]:
        """Return the translation of every line, in one line; of a blank one nothing."""
        from wellposed_lab.tasks.kinds.seq2seq import generate_texts

        filled = [place for place, line in enumerate(lines) if line.strip()]
        rows = [self.cut(ids) for ids in self.encode([lines[place] for place in filled])]
        of = self.model, self.tokenizer, rows, self.decoding
        answers = [""] * len(lines)
        for number, (best, *_) in generate_texts(*of, batch_size=self.batch_size):
            # A line feed inside an output would shift every line after it.
            answers[filled[number]] = " ".join(re.split("[\r\n]+", best.text.strip("\r\n")))
        return answers


def translate_lines(source: TextFile, output: Path | None, translator: Translator) -> None:
    """Translate every line of ``source`` to ``output`` or standard output, which holds as many
    lines in their order.

    Raises:
        DataError: lines longer than the positions where they are refused, all of them named; no line.
    """
    lines, limit = lines_of(source), translator.limit
    # A token is at least a character, but for the end token: short lines need not be cut into
    # tokens.
    most = len(source.text) + 2 if limit is None else limit
    suspects = [number for number, line in enumerate(lines, 1) if len(line.encode()) >= most - 2]
    rows = translator.encode([lines[number - 1] for number in suspects])
    long_lines = {n: len(row) for n, row in zip(suspects, rows, strict=True) if len(row) > most}
    if long_lines and translator.long == "refuse":
        raise DataError(
            f"{len(long_lines)} lines have more tokens than the positions of the model, {limit};"
            f" give --long truncate to keep their {translator.kept}:\n"
            + listed([f"{source.path}:{number}: {n} tokens" for number, n in long_lines.items()])
        )
    size = CHUNK_BATCHES * translator.batch_size
    chunks = [lines[start : start + size] for start in range(0, len(lines), size)]
    with line_writer(output) as file:
        for chunk in counted(chunks):
            file.writelines(f"{line}\n" for line in translator.translate(chunk))
            file.flush()
    say_long(list(long_lines), limit, f"cut to their {translator.kept}")
    say_blank(sum(not line.strip() for line in lines), "left blank in the output")
    written = f", written: {output}" if output else ""
    print(f"{len(lines)} lines translated{written}", file=sys.stderr)
