"""What vital signs cost: ten steps of a small GPT-2, one of which is measured, against the same
ten without a `Monitor`, in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import wellposed as wp
from benchmarks.rows import Benchmark, Goal, Row, Setup, ratio_row

EVERY = 10


def ten_steps(setup: Setup, *, watched: bool) -> Callable[[], object]:
    """Return what takes ten steps of a model of its own."""
    width, layers, tokens = setup.size((256, 4, 128), (16, 1, 8))
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=width, n_layer=layers, n_head=4, vocab_size=1000, n_positions=tokens,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model: Any = GPT2LMHeadModel(config)
    model.to(setup.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    monitor = wp.Monitor(model, optimizer, every=EVERY, weights=False) if watched else None
    ids = torch.randint(0, 1000, (8, tokens), device=setup.device)

    def run() -> None:
        for _ in range(EVERY):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if monitor is not None:
                monitor.step()

    return run


def rows(setup: Setup) -> Iterator[Row]:
    """One."""
    sides = {"watched": ten_steps(setup, watched=True), "plain": ten_steps(setup, watched=False)}
    name = "ten steps of GPT-2 (width 256, 8 x 128 tokens), one of them with vital signs"
    yield ratio_row(name, setup.interleave(sides, 7), "watched", "plain")


BENCHMARK = Benchmark(
    "the vital signs of `Monitor(every=10)`: a step with over one without",
    "at most 1.03",
    2,
    rows,
    goals=(Goal("*", "<= 1.03"),),
)
