"""``wellposed predict`` for an encoder-decoder: one output line per input line, in order."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from wellposed_lab.cli.prediction.lines import lines_of, say_blank
from wellposed_lab.tasks.data.files import TextFile, refuse

if TYPE_CHECKING:
    from wellposed_lab.tasks.kinds.seq2seq import Decoding


def translate_lines(
    model: Any, tokenizer: Any, source: TextFile, decoding: Decoding, batch_size: int
) -> list[str]:
    """Return the translation of every line of ``source`` in one line; blank lines stay blank. No
    line, or lines longer than the model's positions (all are named), are a `DataError`."""
    from wellposed_lab.tasks.kinds.seq2seq import generate_texts

    lines = lines_of(source)
    filled = [index for index, line in enumerate(lines) if line.strip()]
    texts = [lines[index] for index in filled]
    rows = tokenizer(texts, verbose=False)["input_ids"] if texts else []
    limit = int(getattr(model.config, "max_position_embeddings", 0) or 0)
    refuse(
        f"lines have more tokens than the model has positions, {limit}; cut them",
        [
            f"{source.path}:{index + 1}: {len(row)} tokens"
            for index, row in zip(filled, rows, strict=True)
            if limit and len(row) > limit
        ],
    )
    answers = [""] * len(lines)
    for number, text in generate_texts(model, tokenizer, rows, decoding, batch_size=batch_size):
        # A line feed inside an output would shift every line after it.
        answers[filled[number]] = " ".join(re.split("[\r\n]+", text.strip("\r\n")))
    say_blank(len(lines) - len(filled), "left blank in the output")
    return answers
