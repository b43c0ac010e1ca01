"""The rate of Adam by depth with T-Fixup: how far its first step moves the last states, and the loss
after thirty steps at each of some rates, of character language models of width 32 without warm-up.

Prints a row of csv for each model; those at hand are `benchmarks/t_fixup_rates.csv`:
`python -m benchmarks.t_fixup_rates tinyshakespeare.txt.gz`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from wellposed.models import build_model
from wellposed_lab.tasks.data.files import read_text

DEPTHS = (6, 24, 96, 300, 1000)
RATES = (3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4)
SEEDS, STEPS, TEXTS, TOKENS, WIDTH = 3, 30, 8, 32, 32
_OVERFLOWS = 100.0


def model_of(depth: int, symbols: int, seed: int) -> Any:
    """Return a language model with T-Fixup's weights."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": WIDTH, "num_hidden_layers": depth, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 2 * WIDTH, "max_position_embeddings": TOKENS}
    parts = {"norm": "none", "init": "t_fixup", "activation": "relu", "tie_word_embeddings": False}
    return build_model("wellposed", "causal_lm", vocab_size=symbols, **sizes, **parts)


def batches(text: Tensor, seed: int) -> Iterator[Tensor]:
    """Yield batches of blocks drawn from a text."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(text) - TOKENS - 1, (TEXTS,), generator=generator)
        yield torch.stack([text[start : start + TOKENS] for start in starts.tolist()])


def first_step(model: Any, ids: Tensor) -> dict[str, float]:
    """Return the mean norm of last states, and how far Adam's first step, the sign of the gradient,
    moves them over its rate, with biases and without, in the limit of small rates."""
    model.double()
    model(input_ids=ids, labels=ids).loss.backward()
    stepped = [weight for weight in model.parameters() if weight.grad is not None]
    states, rate, found = model.base_model, 1e-8, {}
    with torch.no_grad():
        before = states(input_ids=ids).last_hidden_state
        found["norm"] = float(before.norm(dim=-1).mean())
        for name, least in (("moved", 1), ("moved_by_matrices", 2)):
            kept = [(weight, weight.clone()) for weight in stepped if weight.ndim >= least]
            for weight, _ in kept:
                weight.sub_(rate * weight.grad.sign())  # pyright: ignore[reportOptionalMemberAccess]
            after = states(input_ids=ids).last_hidden_state
            found[name] = float((after - before).norm(dim=-1).mean()) / rate
            for weight, old in kept:
                weight.copy_(old)
    return found


def losses(model: Any, text: Tensor, rate: float, seed: int) -> list[float]:
    """Return the loss of each step, up to one that overflows."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.98))
    found: list[float] = []
    for ids, _ in zip(batches(text, seed), range(STEPS), strict=False):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
        if not math.isfinite(found[-1]) or found[-1] > _OVERFLOWS:
            break
    return found


def main(path: str) -> None:
    """Print every row."""
    from pathlib import Path

    text = read_text(Path(path)).text
    symbols = sorted(set(text))
    ids = torch.tensor([symbols.index(letter) for letter in text])
    print("depth,seed,rate,steps,norm,moved,moved_by_matrices,first,largest,last")
    for depth in DEPTHS:
        for seed in range(SEEDS):
            model = model_of(depth, len(symbols), seed)
            step = first_step(model, next(batches(ids, seed)))
            print(
                depth, seed, "", *(f"{value:.4g}" for value in step.values()), "", "", "", sep=","
            )
            for rate in RATES:
                curve = losses(model_of(depth, len(symbols), seed), ids, rate, seed)
                last = sum(curve[-5:]) / 5 if len(curve) == STEPS else math.inf
                told = (f"{value:.4g}" for value in (curve[0], max(curve), last))
                print(depth, seed, rate, STEPS, "", "", "", *told, sep=",", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
