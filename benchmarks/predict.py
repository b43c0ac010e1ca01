"""Lines per second of `wellposed predict` on a translation model over a bare `generate` loop.

The bare loop batches lines in their order or (harder) sorted by length, as we do. All tokenise and
decode; ours also checks lengths, restores the order and writes the file. Loading does not count.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.rows import Benchmark, Goal, Row, Setup, ratio_row
from wellposed_lab.cli.load import load_model, load_tokenizer
from wellposed_lab.cli.prediction.lines import line_writer, read_source
from wellposed_lab.cli.prediction.translation import translate_lines
from wellposed_lab.tasks.kinds.seq2seq import Decoding, generate_keywords

BEAMS, SIZE = 4, 32


def bare(
    model: Any, tokenizer: Any, lines: list[str], decoding: Any, *, is_sorted: bool
) -> list[str]:
    lines = sorted(lines, key=len, reverse=True) if is_sorted else lines
    texts: list[str] = []
    for start in range(0, len(lines), SIZE):
        batch = tokenizer(lines[start : start + SIZE], padding=True, return_tensors="pt")
        keywords = generate_keywords(
            model, tokenizer, longest=batch["input_ids"].shape[1], decoding=decoding
        )
        with torch.inference_mode():
            out = model.generate(**batch, **keywords)
        texts += tokenizer.batch_decode(out, skip_special_tokens=True)
    return texts


def rows(setup: Setup) -> Iterator[Row]:
    model, tokenizer = load_model(str(setup.model)), load_tokenizer(str(setup.model))
    lines = Path(str(setup.data)).read_text(encoding="utf-8").split("\n")[: setup.size(256, 4)]
    decoding = Decoding(BEAMS)
    with tempfile.TemporaryDirectory() as folder:

        def ours() -> None:
            source = read_source("\n".join(lines), None)
            with contextlib.redirect_stderr(io.StringIO()):
                texts = translate_lines(model, tokenizer, source, decoding, SIZE)
            with line_writer(Path(folder) / "out.txt") as file:
                file.writelines(f"{line}\n" for line in texts)

        loops = {
            "bare loop": partial(bare, model, tokenizer, lines, decoding, is_sorted=False),
            "bare loop sorted by length": partial(
                bare, model, tokenizer, lines, decoding, is_sorted=True
            ),
        }
        times = setup.interleave({"predict": ours, **loops}, 3)
    for other in loops:
        yield ratio_row(
            f"predict / {other}, {len(lines)} lines, beams {BEAMS}",
            times,
            "predict",
            other,
        )


BENCHMARK = Benchmark(
    "translating lines by predict over a bare generate loop; --model RUN --data LINES.txt",
    "<= 1.1", 10, rows, needs=("model", "data"), goals=(Goal("*", "<= 1.1"),),
)  # fmt: skip
