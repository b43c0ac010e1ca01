"""Learning rates of sengupta2023 at mini scale: each model at each rate, chosen on validation.

    python benchmarks/sengupta2023_rates.py --data FOLDER --out runs/rates [--studies ag_news imdb]
    [--jobs 2]

Each model trains once per rate, with the sizes of the recipe and a seed that recipes do not report.
The best rate on valid goes into `recipes/sengupta2023/studies.py`. A second call continues, and
reuses finished runs.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path

# Math libraries read it when torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from wellposed_lab.tasks.task import Task, build_task
from wellposed_studies.recipe import Request
from wellposed_studies.sengupta2023.trained import (
    VARIANTS,
    Study,
    arena_study,
    text_study,
    train_study,
    words_study,
)

RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
SEED = 1000
ARENA = ("listops", "text", "retrieval", "pathfinder", "image")
STUDIES = ("imdb", "ag_news", *(f"lra-{name}" for name in ARENA), "ptb-words")


def study_of(request: Request, name: str) -> Study:
    if name == "ptb-words":
        return words_study(request)
    if name.startswith("lra-"):
        return arena_study(request, name.removeprefix("lra-"))
    return text_study(request, name)


@functools.cache
def task_of(name: str, options: str) -> Task:
    return build_task(name, json.loads(options))


def valid_metric(job: tuple[str, str, float, str, Path]) -> tuple[str, str, float, float]:
    """Train one model at one rate; return accuracy (or minus perplexity of words) on valid."""
    name, variant, rate, data, out = job
    request = Request("mini", out / f"{rate:g}", data)
    study = study_of(request, name)
    study = replace(study, sizes=replace(study.sizes, learning_rate=rate, rates={}))
    task = task_of(study.task, json.dumps(study.options(request)))
    _, (run,) = train_study(request, study, variants=(variant,), seeds=(SEED,), task=task)
    value = -run.metric("perplexity,valid") if name == "ptb-words" else run.metric("accuracy,valid")
    print(f"{name:15s} {variant:17s} {rate:<6g} {abs(value):.4f}", flush=True)
    return name, variant, rate, value


def main() -> None:
    """Train, and print one table per study with the best rate of each model marked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=list(STUDIES))
    parser.add_argument("--rates", nargs="+", type=float, default=list(RATES))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    grid = itertools.product(options.studies, options.variants, options.rates)
    jobs = [(*point, options.data, options.out) for point in grid]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        metrics = {
            (name, variant, rate): value
            for name, variant, rate, value in pool.imap(valid_metric, jobs)
        }
    for name in options.studies:
        print(f"\n| {name} | " + " | ".join(f"{rate:g}" for rate in options.rates) + " |")
        print("| --- " * (len(options.rates) + 1) + "|")
        for variant in options.variants:
            values = [metrics[name, variant, rate] for rate in options.rates]
            best = max(value for value in values if value == value)
            cells = [
                f"**{abs(value):.4g}**" if value == best else f"{abs(value):.4g}"
                for value in values
            ]
            print(f"| {variant} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
