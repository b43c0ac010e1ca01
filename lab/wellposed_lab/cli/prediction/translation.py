"""``wellposed predict`` for an encoder-decoder: one output line per input line, in order, whatever
the lines hold."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from wellposed.errors import DataError, listed
from wellposed_lab.cli.prediction.lines import counted, line_writer, lines_of, say_blank, say_long
from wellposed_lab.tasks.data.files import TextFile

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from wellposed_lab.tasks.kinds.seq2seq import Decoding, Hypothesis

CHUNK_BATCHES = 16
LongLines = Literal["refuse", "truncate", "split"]
# Where a long line is cut, best first: after a sentence, after a clause, between words.
CUTS = (re.compile(r"(?<=[.!?…。])\s+"), re.compile(r"(?<=[,;:])\s+"), re.compile(r"\s+"))


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

    def pieces(self, line: str, ids: list[int]) -> list[list[int]]:
        """Return what is generated from for one line: nothing if it is blank, its cut or its parts
        if it is long."""
        if not line.strip():
            return []
        if self.limit is None or len(ids) <= self.limit:
            return [ids]
        if self.long == "truncate":
            start = [*ids[: self.limit - 1], ids[-1]]
            return [ids[-self.limit :] if self.kept == "end" else start]
        parts = split_text(line, lambda part: len(self.encode([part])[0]) <= (self.limit or 0))
        return self.encode(parts)

    def translate(self, lines: Sequence[str]) -> list[list[Hypothesis]]:
        """Return the hypotheses of every line, best first; parts of a line are joined by a
        space."""
        from wellposed_lab.tasks.kinds.seq2seq import Hypothesis, generate_texts

        encoded = zip(lines, self.encode(lines), strict=True)
        parts = [self.pieces(line, ids) for line, ids in encoded]
        rows = [row for pieces in parts for row in pieces]
        of = self.model, self.tokenizer, rows, self.decoding
        found = dict(generate_texts(*of, batch_size=self.batch_size))
        numbers = iter(range(len(rows)))
        answers = []
        for pieces in parts:
            mine = [found[next(numbers)] for _ in pieces]
            joined = [Hypothesis(" ".join(best[0].text for best in mine), None)]
            answers.append(mine[0] if len(mine) == 1 else joined)
        return answers


def translate_lines(
    source: TextFile, output: Path | None, translator: Translator, *, n_best: int
) -> None:
    """Translate every line of ``source`` to ``output`` or standard output, which holds as many
    lines in their order.

    With ``n_best`` above 1 a line of the output is ``line number, rank, score, text``, separated by
    tabs.

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
            f" give --long truncate to keep their {translator.kept}, or --long split to translate"
            " them in parts:\n"
            + listed([f"{source.path}:{number}: {n} tokens" for number, n in long_lines.items()])
        )
    number, size = itertools.count(1), CHUNK_BATCHES * translator.batch_size
    chunks = [lines[start : start + size] for start in range(0, len(lines), size)]
    with line_writer(output) as file:
        for chunk in counted(chunks):
            for hypotheses in translator.translate(chunk):
                file.write(_rendered(next(number), hypotheses, n_best))
            file.flush()
    cut = f"cut to their {translator.kept}"
    what = cut if translator.long == "truncate" else "translated in parts"
    say_long(list(long_lines), limit, what)
    say_blank(sum(not line.strip() for line in lines), "left blank in the output")
    written = f", written: {output}" if output else ""
    print(f"{len(lines)} lines translated{written}", file=sys.stderr)


def _rendered(number: int, hypotheses: Sequence[Hypothesis], n_best: int) -> str:
    # A line feed inside an output would shift every line after it.
    texts = [" ".join(re.split("[\r\n]+", each.text.strip("\r\n"))) for each in hypotheses]
    if n_best == 1:
        return texts[0] + "\n"
    rows = []
    for rank, (found, text) in enumerate(zip(hypotheses, texts, strict=True), 1):
        score = "" if found.score is None else f"{found.score:.6f}"
        rows.append(f"{number}\t{rank}\t{score}\t{text.replace(chr(9), ' ')}\n")
    return "".join(rows)


def split_text(text: str, fits: Callable[[str], bool]) -> list[str]:
    """Return parts of ``text`` that each fit, cut near the middle after a sentence, else a clause,
    else a word.

    >>> split_text("one two. three four", lambda part: len(part) <= 10)
    ['one two.', 'three four']
    """
    if fits(text) or len(text) < 2:
        return [text]
    middle = left = right = len(text) // 2
    for pattern in CUTS:
        found = [match.span() for match in pattern.finditer(text)]
        if places := [(start, end) for start, end in found if start and end < len(text)]:
            left, right = min(places, key=lambda place: abs(place[0] - middle))
            break
    return split_text(text[:left], fits) + split_text(text[right:], fits)
