"""Cost of weight penalties in one training step of a Transformer encoder (d=512, dff=2048, 8 heads, 1024 tokens).

    python benchmarks/penalties.py [--layers 2] [--tokens 1024] [--rounds 7] [--threads 1]

One step is forward + backward + AdamW. Every variant adds |P^T P - I|^2 (P: query, key, value and output stacked) and
|M1^T M1 - I|^2 + |M2^T M2 - I|^2 of every layer. Variants are interleaved round by round and compared by medians of
process CPU time, so that a busy machine slows all alike; the cost of a penalty is its time over the step's time.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from wellposed.penalize import OrthogonalityPenalty
from wellposed.roles import Roles, find_roles

Cost = Callable[[], Tensor | None]


def stacks(roles: Roles) -> list[list[Tensor]]:
    """Return the weights of every penalty term."""
    joint = [
        [part.query.tensor(), part.key.tensor(), part.value.tensor(), part.output.tensor()] for part in roles.attention
    ]
    return joint + [[view.tensor()] for part in roles.feedforward for view in (part.up, part.down)]


def by_autograd(roles: Roles, choose_left: Callable[[Tensor], bool]) -> Tensor:
    """|W^T W - I|^2 by plain autograd, or the other Gram matrix where ``choose_left`` says so."""
    total = torch.zeros(())
    for weights in stacks(roles):
        weight = torch.cat(weights)
        gram = weight @ weight.T if choose_left(weight) else weight.T @ weight
        total = total + (gram - torch.eye(gram.shape[0])).square().sum()
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, options.layers)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(max(1, options.tokens // 128), 128, 512)
    roles = find_roles(model)

    def ours(**extra: object) -> OrthogonalityPenalty:
        return OrthogonalityPenalty(model, attention=1e-8, feedforward=1e-8, **extra)

    sparse = ours(every=10)
    variants: dict[str, Cost] = {
        "big side, autograd": lambda: 1e-8 * by_autograd(roles, lambda w: w.shape[0] > w.shape[1]),
        "W^T W, autograd": lambda: 1e-8 * by_autograd(roles, lambda _: False),
        "small side, autograd": lambda: 1e-8 * by_autograd(roles, lambda w: w.shape[0] < w.shape[1]),
        "OrthogonalityPenalty": ours(),
        "OrthogonalityPenalty, bf16 products": ours(gram_dtype=torch.bfloat16),
    }

    def penalise(cost: Cost, repeat: int = 1) -> float:
        gc.collect()
        start = time.process_time()
        for _ in range(repeat):
            value = cost()
            if value is not None and value.requires_grad:
                value.backward()
        return (time.process_time() - start) / repeat

    def step() -> float:
        start = time.process_time()
        optimizer.zero_grad(set_to_none=False)
        model(inputs).square().mean().backward()
        optimizer.step()
        return time.process_time() - start

    steps: list[float] = []
    times: dict[str, list[float]] = {name: [] for name in [*variants, "OrthogonalityPenalty, every=10"]}
    for index in range(options.rounds + 1):
        measured = {name: penalise(cost) for name, cost in variants.items()}
        measured["OrthogonalityPenalty, every=10"] = penalise(sparse, 10)
        whole = step()
        if index:
            steps.append(whole)
            for name, value in measured.items():
                times[name].append(value)
    base = statistics.median(steps)
    print(f"torch {torch.__version__}, {options.threads} thread(s), CPU time, median of {options.rounds} rounds")
    print(f"step: {options.layers} layers, d=512, dff=2048, {options.tokens} tokens, {base * 1e3:.0f} ms")
    print(f"{'penalty':40}{'% of a step':>12}{'   spread':>10}")
    for name, values in times.items():
        ratios = sorted(100 * value / base for value in values)
        print(f"{name:40}{statistics.median(ratios):12.1f}{ratios[0]:8.1f}..{ratios[-1]:.1f}")


if __name__ == "__main__":
    main()
