"""Cost of a `Monitor`: ten steps of a small Llama, one of them measured, over ten without.

Ten steps at once scatter by more than the monitor costs. So two steps are timed, the second of them
measured, and two plain ones. The other eight steps have no hooks and count as plain; a row of its
own shows what they take.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import wellposed as wp
from benchmarks.rows import Benchmark, Goal, Row, Setup, Side, Times, ratio_row

EVERY = 10
BETWEEN = "between"


def rows(setup: Setup) -> Iterator[Row]:
    width, layers, tokens = setup.size((128, 4, 128), (16, 1, 8))
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, intermediate_size=4 * width, vocab_size=1000,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    model.to(setup.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, 1000, (8, tokens), device=setup.device)

    def run(steps: int, monitor: wp.Monitor | None = None) -> None:
        for _ in range(steps):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if monitor is not None:
                monitor.step()

    sides: dict[str, Side] = {"plain": Side(partial(run, 2))}
    for name, weights in (("defaults", True), ("vital signs", False)):
        monitor = wp.Monitor(model, optimizer, every=EVERY, weights=weights)
        run(1, monitor)  # measured: no hooks are left for the other sides
        two = partial(run, 2, monitor)
        sides[name] = Side(two, partial(setattr, monitor, "steps", EVERY - 1))
        sides.setdefault(BETWEEN, Side(two, partial(setattr, monitor, "steps", 1)))
    times = setup.interleave(sides, 61)
    # The first of the two steps adds the hooks, the second is measured and removes them.
    times_of_ten: Times = {"plain": [EVERY / 2 * plain for plain in times["plain"]]}
    label = "of a Llama of 4 x 128 (8 x 128 tokens)"
    for name in ("defaults", "vital signs"):
        pairs = zip(times[name], times["plain"], strict=True)
        times_of_ten[name] = [two + (EVERY / 2 - 1) * plain for two, plain in pairs]
        yield ratio_row(f"ten steps {label}, one measured: {name}", times_of_ten, name, "plain")
    yield ratio_row(f"a step {label} between measured ones", times, BETWEEN, "plain")


BENCHMARK = Benchmark(
    "`Monitor(every=10)`: a step with over one without", "at most 1.03", 2, rows,
    goals=(Goal("ten steps*", "<= 1.03"),),
)  # fmt: skip
