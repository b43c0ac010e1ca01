"""The rate of Adam by depth with T-Fixup, for character language models of width 32, no warm-up.

Measures how far the first step moves the last states, and the loss after thirty steps at several
rates. Prints one csv row per model; results are in `benchmarks/t_fixup_rates.csv`:
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
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(text) - TOKENS - 1, (TEXTS,), generator=generator)
        yield torch.stack([text[start : start + TOKENS] for start in starts.tolist()])


def first_step(model: Any, ids: Tensor) -> dict[str, float]:
    """Return the mean norm of last states, and their move per rate in Adam's first step."""
    model.double()
    model(input_ids=ids, labels=ids).loss.backward()
    stepped = [weight for weight in model.parameters() if weight.grad is not None]
    states, rate, facts = model.base_model, 1e-8, {}
    with torch.no_grad():
        before = states(input_ids=ids).last_hidden_state
        facts["norm"] = float(before.norm(dim=-1).mean())
        for name, min_dims in (("moved", 1), ("moved_by_matrices", 2)):
            saved = [(weight, weight.clone()) for weight in stepped if weight.ndim >= min_dims]
            for weight, _ in saved:
                weight.sub_(rate * weight.grad.sign())  # pyright: ignore[reportOptionalMemberAccess]
            after = states(input_ids=ids).last_hidden_state
            facts[name] = float((after - before).norm(dim=-1).mean()) / rate
            for weight, old in saved:
                weight.copy_(old)
    return facts


def losses(model: Any, text: Tensor, rate: float, seed: int) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.9, 0.98))
    values: list[float] = []
    for ids, _ in zip(batches(text, seed), range(STEPS), strict=False):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(float(loss.detach()))
        if not math.isfinite(values[-1]) or values[-1] > _OVERFLOWS:
            break
    return values


def main(path: str) -> None:
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
                texts = (f"{value:.4g}" for value in (curve[0], max(curve), last))
                print(depth, seed, rate, STEPS, "", "", "", *texts, sep=",", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
