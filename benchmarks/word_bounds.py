"""Certified words of runs of `lipschitz`, by products of norms and by the smaller bounds of today.

For each run folder, as `wellposed reproduce frontier/words` leaves them: the total of its certificate
in norm sum and the certified share of texts of *test* after any k replaced words, without
multipliers (theory notes B18, B19) and with them. Prints a table of benchmarks/HISTORY.md.

Run: OMP_NUM_THREADS=1 python -m benchmarks.word_bounds runs/.../onelipschitzblock-* (a minute a run)
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import torch

from wellposed.certification import certify
from wellposed.certification.bounds import NO_BOUND
from wellposed.words import WordCertificate
from wellposed_lab.tasks.task import build_task
from wellposed_lab.training.certified.run import first_batches
from wellposed_lab.training.folder.run_folder import read_config
from wellposed_lab.training.loop.build import load_run_model

COUNTS = (0, 1, 2, 3, 5)
MULTIPLIERS = "wellposed.certification._walk.tightest_bound"


def shares(model: Any, task: Any, examples: int) -> Mapping[int, float]:
    """Return the certified share of texts by the number of replaced words."""
    certificate = WordCertificate(model, task.tokenizer)
    texts = certificate.hold(first_batches(task, "test", examples), max(COUNTS))
    return {k: fmean(text.replaceable >= k for text in texts) for k in COUNTS}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="folders of finished runs")
    parser.add_argument("--examples", type=int, default=1000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    columns = ("run", "bounds", "total", *(f"{k} words" for k in COUNTS))
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    for folder in arguments.runs:
        config = read_config(folder)
        task = build_task(config.task, config.task_options)
        model, _ = load_run_model(folder)
        for name, without in {"norms": True, "multipliers": False}.items():
            with patch(MULTIPLIERS, lambda *_: NO_BOUND) if without else nullcontext():
                total = certify(model, seq_len=48, norm="sum", cross_check=False).total
                by_count = shares(model, task, arguments.examples)
            cells = (folder.name, name, f"{total:.4f}", *(f"{by_count[k]:.3f}" for k in COUNTS))
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
