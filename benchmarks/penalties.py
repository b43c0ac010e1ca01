"""Cost of weight penalties in a training step of an encoder (d=512, dff=2048, 8 heads, 1024 tokens).

A step is forward + backward + AdamW. Each variant adds, per layer, |P^T P - I|^2 (P: query, key,
value, output stacked) and |M1^T M1 - I|^2 + |M2^T M2 - I|^2. Values are shares of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.rows import LAUNCHES, Benchmark, Goal, Row, Setup, Side, ratio_row
from wellposed.penalize import OrthogonalityPenalty
from wellposed.roles import Roles, find_roles

GRAM = (
    "Its products are the share: 24 of 512^3 per layer, against 72 in a step of 1,024 tokens. bf16"
    " halve it, and `every=` divides it."
)
Cost = Callable[[], Tensor | None]


def stacks(roles: Roles) -> list[list[Tensor]]:
    joint = [
        [part.query.tensor(), part.key.tensor(), part.value.tensor(), part.output.tensor()]
        for part in roles.attention
    ]
    return joint + [[view.tensor()] for part in roles.feedforward for view in (part.up, part.down)]


def by_autograd(roles: Roles, choose_left: Callable[[Tensor], bool]) -> Tensor:
    """Return |W^T W - I|^2 by plain autograd, or of W W^T if ``choose_left`` is true."""
    total = torch.zeros(())
    for weights in stacks(roles):
        weight = torch.cat(weights)
        gram = weight @ weight.T if choose_left(weight) else weight.T @ weight
        total = total + (gram - torch.eye(gram.shape[0], device=gram.device)).square().sum()
    return 1e-8 * total


def differentiate(cost: Cost) -> None:
    """Run a penalty forward and backward; it is None between two steps of ``every``."""
    value = cost()
    if value is not None and value.requires_grad:
        value.backward()


def rows(setup: Setup) -> Iterator[Row]:
    torch.manual_seed(0)
    width, tokens = setup.size((512, 1024), (32, 128))
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True)
    count = 2 if setup.device == "cpu" else 12
    model = nn.TransformerEncoder(layer, count, enable_nested_tensor=False).to(setup.device)
    optimizer = torch.optim.AdamW(model.parameters())
    inputs = torch.randn(tokens // 128, 128, width, device=setup.device)
    roles = find_roles(model)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        model(inputs).square().mean().backward()
        optimizer.step()

    ours = partial(OrthogonalityPenalty, model, attention=1e-8, feedforward=1e-8)
    variants: dict[str, Cost] = {
        "big side, autograd": lambda: by_autograd(roles, lambda w: w.shape[0] > w.shape[1]),
        "W^T W, autograd": lambda: by_autograd(roles, lambda _: False),
        "small side, autograd": lambda: by_autograd(roles, lambda w: w.shape[0] < w.shape[1]),
        "OrthogonalityPenalty": ours(),
        "OrthogonalityPenalty, bf16 products": ours(gram_dtype=torch.bfloat16),
        "OrthogonalityPenalty, every=10": ours(every=10),
    }
    sides = {
        name: Side(partial(differentiate, cost), repeats=10 if name.endswith("every=10") else 1)
        for name, cost in variants.items()
    }
    times = setup.interleave({"step": step, **sides}, 7)
    for name in variants:
        yield ratio_row(
            f"{name}, share of a step of {count} layers at {tokens} tokens",
            times,
            name,
            "step",
        )


BENCHMARK = Benchmark(
    "weight penalties as a share of a training step (d = 512, 1,024 tokens), ours and by plain autograd",
    "<= 30 %, every=10 <= 3 %", 1, rows, ("cpu", "cuda"),
    goals=(
        Goal("OrthogonalityPenalty, share*", "<= 0.3", LAUNCHES, ("cuda",)),
        Goal("OrthogonalityPenalty, every=10*", "<= 0.03", LAUNCHES, ("cuda",)),
        Goal("OrthogonalityPenalty, share*", "<= 0.3", GRAM),
        Goal("OrthogonalityPenalty, every=10*", "<= 0.03", GRAM),
    ),
)  # fmt: skip
