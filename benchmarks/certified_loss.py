"""Variant `lipschitz` with the certified bound as a loss: is it better at equal clean accuracy?

`weight * log(certified_bound(model))` is added to the loss at steps 5, 10, ... (in `wellposed train`
at 1, 6, ...), five times as strong.
For each weight: accuracy on *test*, the certified bound, certified accuracy at 0.1 of a token, and
the median certified radius of right answers. They are means and standard errors over seeds, at equal
rates, steps and batches. `--margin-radius` of `wellposed train` trades accuracy against radius too, so it
is beside it. Below each table: paired t-tests over seeds against weight 0 of the same budget,
Holm-corrected. A weight is better if certified accuracy is, and accuracy is not lower by more than
0.005. Prints the tables of docs/howto/classifier.md.

Run: OMP_NUM_THREADS=1 python -m benchmarks.certified_loss --data ag_news/ (15 minutes on one core)
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.small_classifiers import (
    TOKENS,
    accuracy,
    examples_of,
    parser_of,
    texts_of,
    trained,
)
from wellposed.certification import certify
from wellposed_lab.statistics import holm_correction, paired_comparison
from wellposed_lab.training.config import PenaltyOptions

WEIGHTS = (0.0, 0.1, 0.3, 1.0)
MARGINS = (0.02, 0.05)
SHARE = 0.1
EVERY = 5
MOST_LOST = 0.005
COLUMNS = ("model", "accuracy", "bound", f"certified at {SHARE} of a token", "median radius")


@dataclass(frozen=True)
class Trained:
    """Numbers of one model; ``radius`` is in units of the median token."""

    accuracy: float
    bound: float
    certified: float
    radius: float


def measured(model: Any, task: Any, count: int) -> Trained:
    """Return the numbers of a model; radii are those of the first ``count`` texts of *test*."""
    certificate = certify(model, seq_len=TOKENS, cross_check=False)
    examples = examples_of(model, task, count)
    token = statistics.median(
        size for example in examples for size in example.tokens.norm(dim=-1).flatten().tolist()
    )
    radii: list[float] = []
    for example in examples:
        with torch.no_grad():
            logits = model(inputs_embeds=example.tokens).logits
        if int(logits.argmax()) == int(example.label):
            radii.append(float(certificate.radius(logits, example.label)) / token)
    certified = sum(radius > SHARE for radius in radii) / count
    on_test = accuracy(model, task)
    return Trained(on_test, certificate.total, certified, statistics.median(radii))


def row(name: str, models: list[Trained]) -> str:
    cells = []
    for column in zip(*(vars(model).values() for model in models), strict=True):
        error = statistics.stdev(column) / math.sqrt(len(column)) if len(column) > 1 else 0.0
        cells.append(f"{statistics.mean(column):.3f} ± {error:.3f}")
    return f"| {name} | {' | '.join(cells)} |"


def verdicts(by_name: dict[str, list[Trained]]) -> list[str]:
    """Return a line for every model of a budget against the first."""
    (_, plain), *others = by_name.items()
    tests = holm_correction(
        [
            paired_comparison([m.certified for m in models], [m.certified for m in plain])
            for _, models in others
        ]
    )
    lines = []
    for (name, models), test in zip(others, tests, strict=True):
        lost = statistics.mean(m.accuracy for m in plain) - statistics.mean(
            m.accuracy for m in models
        )
        accuracy_kept = "kept" if lost <= MOST_LOST else "not kept"
        lines.append(
            f"{name}: certified accuracy {test.verdict}; accuracy {accuracy_kept} ({-lost:+.4f})"
        )
    return lines


def main() -> None:
    parser = parser_of(__doc__, variants="lipschitz,lipschitz:4", examples=256, steps=300)
    parser.add_argument("--weights", type=float, nargs="+", default=WEIGHTS)
    parser.add_argument("--margins", type=float, nargs="*", default=MARGINS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    task = texts_of(arguments.data)
    for variant in arguments.variants.split(","):
        terms: dict[str, tuple[float, dict[str, float]]] = {
            f"{variant}, weight {weight:g}": (weight, {}) for weight in arguments.weights
        }
        terms |= {
            f"{variant}, margin radius {margin:g}": (0.0, {"margin_radius": margin})
            for margin in arguments.margins
        }
        print(f"\n| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
        by_name: dict[str, list[Trained]] = {}
        for name, (weight, options) in terms.items():
            by_name[name] = []
            for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
                model = trained(
                    variant,
                    seed,
                    task,
                    steps=arguments.steps,
                    layers=arguments.layers,
                    penalty=PenaltyOptions(bound=weight, bound_every=EVERY),
                    **options,
                )
                by_name[name].append(measured(model, task, arguments.examples))
            print(row(name, by_name[name]), flush=True)
        if arguments.seeds > 1:
            print("", *verdicts(by_name), sep="\n", flush=True)


if __name__ == "__main__":
    main()
