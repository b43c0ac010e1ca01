"""Certified radii around single texts: local, global, and the smallest radius that an attack breaks.

Prints the table of docs/theory/composition.md, B22: medians over the right ones of the first texts of
*test*, in units of the median token norm. The local radius is `local_radius`, the global one that of
`certify` on all inputs or on a ball about the vocabulary. Ratios are medians, the last column is the
middle 80 %. It ends with an error if an attack breaks a text within its certified radius.

Run: OMP_NUM_THREADS=1 python -m benchmarks.local_bounds --data ag_news/ (minutes on one core)
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
from torch import Tensor

from benchmarks.small_classifiers import (
    TOKENS,
    Example,
    examples_of,
    parser_of,
    texts_of,
    trained,
)
from wellposed.certification import local_radius
from wellposed_lab.training.certified.run import best_certificate

_STEPS = 40
_RESTARTS = 3
_FACTOR = 2.0
_HALVINGS = 5
_LARGEST = 1e6
COLUMNS = (
    "variant, seed", "right", "global", "local", "attacked",
    "local / global", "attacked / global", "attacked / local",
)  # fmt: skip


def is_broken(model: Any, example: Example, r: float) -> bool:
    """Return whether gradient descent on the margin changes the answer with tokens within r."""
    x, label = example.tokens.expand(_RESTARTS, -1, -1), int(example.label)
    moved = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(0))
    moved[0] = 0.0
    moved = _within(moved, r)
    for _ in range(_STEPS):
        moved.requires_grad_()
        logits = model(inputs_embeds=x + moved).logits
        others = torch.cat((logits[:, :label], logits[:, label + 1 :]), dim=-1)
        margins = logits[:, label] - others.amax(-1)
        if bool((margins < 0).any()):
            return True
        (gradient,) = torch.autograd.grad(margins.sum(), moved)
        sizes = gradient.norm(dim=-1, keepdim=True).clamp_min(1e-300)
        moved = _within(moved.detach() - gradient / sizes * (r / 4), r)
    return False


def _within(moved: Tensor, r: float) -> Tensor:
    """Scale the moves of tokens down to norm r."""
    return moved * (r / moved.norm(dim=-1, keepdim=True).clamp_min(r))


def smallest_break(model: Any, example: Example, low: float) -> float:
    """Return the smallest radius above ``low`` at which an attack breaks the answer; infinity if none
    up to ``_LARGEST`` does."""
    high = low * _FACTOR
    while not is_broken(model, example, high):
        low, high = high, high * _FACTOR
        if high > _LARGEST:
            return math.inf
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if is_broken(model, example, middle) else (middle, high)
    return high


def table_row(name: str, model: Any, examples: list[Example]) -> str:
    """Return a row of the table; an attack within a certified radius is an error."""
    certificate = best_certificate(model, TOKENS)
    token = statistics.median(
        size for example in examples for size in example.tokens.norm(dim=-1).flatten().tolist()
    )
    everywhere: list[float] = []
    local: list[float] = []
    attacked: list[float] = []
    for example in examples:
        with torch.no_grad():
            logits = model(inputs_embeds=example.tokens).logits
        if int(logits.argmax()) != int(example.label):
            continue

        largest = example.tokens.norm(dim=-1).max()[None]
        near = float(local_radius(model, example.tokens, example.label))
        far = float(certificate.radius(logits, example.label, largest_token=largest))
        if is_broken(model, example, max(near, far)):
            raise SystemExit(f"{name}: an attack breaks a text within its certified radius")
        everywhere.append(far / token)
        local.append(near / token)
        attacked.append(smallest_break(model, example, near) / token)

    if not local:
        return f"| {name} | 0 of {len(examples)} |{' |' * (len(COLUMNS) - 2)}"

    medians = [statistics.median(column) for column in (everywhere, local, attacked)]
    ratios = sorted(high / low for high, low in zip(attacked, local, strict=True))
    shares = [ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]]
    cells = [
        f"{len(local)} of {len(examples)}",
        *(f"{value:.3g}" for value in medians),
        f"{medians[1] / medians[0]:.3g}",
        f"{medians[2] / medians[0]:.3g}",
        f"{shares[0]:.3g} to {shares[1]:.3g}",
    ]
    return f"| {name} | {' | '.join(cells)} |"


def main() -> None:
    parser = parser_of(__doc__, variants="lipschitz,pre_ln,post_ln", examples=30, steps=150)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    task = texts_of(arguments.data)
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
    for variant in arguments.variants.split(","):
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
            model = trained(variant, seed, task, steps=arguments.steps, layers=arguments.layers)
            examples = examples_of(model, task, arguments.examples)
            print(table_row(f"{variant}, {seed}", model, examples), flush=True)


if __name__ == "__main__":
    main()
