"""Lines per second of `wellposed predict` on a translation model against a bare `generate` loop over the same lines.

    python benchmarks/predict.py MODEL INPUT [--lines 256] [--batch-size 32] [--beams 4] [--threads 1]

The bare loop takes the lines in batches as they come; the harder one, beside it, sorts them by length first, as we do.
Both tokenise and decode; ours also checks the lengths, restores the order, counts lines and writes the file. All three
run in one process, turn by turn, in processor time where there is one thread. Loading the model is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from wellposed.cli.load import load_model, load_tokenizer
from wellposed.cli.prediction.lines import LineSource
from wellposed.cli.prediction.translation import Translator, build_decoding, translate_lines
from wellposed.tasks.kinds.generate import generate_keywords

ROUNDS = 3


def bare(model: Any, tokenizer: Any, lines: list[str], size: int, decoding: Any, *, ordered: bool) -> list[str]:
    """Translate as a tutorial would write it."""
    lines = sorted(lines, key=len, reverse=True) if ordered else lines
    texts: list[str] = []
    for start in range(0, len(lines), size):
        batch = tokenizer(lines[start : start + size], padding=True, return_tensors="pt")
        keywords = generate_keywords(model, tokenizer, longest=batch["input_ids"].shape[1], decoding=decoding)
        with torch.inference_mode():
            out = model.generate(**batch, **keywords)
        texts += tokenizer.batch_decode(out.sequences, skip_special_tokens=True)
    return texts


def main() -> None:
    """Print the row for RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("input", type=Path)
    parser.add_argument("--lines", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--beams", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock, unit = (time.process_time, "processor") if arguments.threads == 1 else (time.perf_counter, "clock")
    model, tokenizer = load_model(arguments.model), load_tokenizer(arguments.model)
    lines = arguments.input.read_text(encoding="utf-8").split("\n")[: arguments.lines]
    decoding = build_decoding(beams=arguments.beams, length_penalty=1.0, gnmt=False, n_best=1, max_new_tokens=None)
    translator = Translator(model, tokenizer, decoding, arguments.batch_size, "refuse")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.txt"

        def ours() -> None:
            with contextlib.redirect_stderr(io.StringIO()):
                translate_lines(LineSource(text="\n".join(lines), path=None), out, translator, n_best=1)

        size = arguments.batch_size
        sides: list[Callable[[], Any]] = [
            ours,
            lambda: bare(model, tokenizer, lines, size, decoding, ordered=False),
            lambda: bare(model, tokenizer, lines, size, decoding, ordered=True),
        ]
        seconds: list[list[float]] = [[] for _ in sides]
        for round_ in range(ROUNDS):
            for side in ((round_ + shift) % len(sides) for shift in range(len(sides))):
                began = clock()
                sides[side]()
                seconds[side].append(clock() - began)
    mine, loop, sorted_loop = (statistics.median(times) for times in seconds)
    print(
        f"| predict / bare generate loop, {len(lines)} lines, beams {arguments.beams} | fp32, CPU threads: "
        f"{arguments.threads}, torch {torch.__version__}, {unit} time | {mine / loop:.3f} (loop sorted by length "
        f"{mine / sorted_loop:.3f}); {len(lines) / mine:.1f} lines/s | <= 1.1 |"
    )


if __name__ == "__main__":
    main()
