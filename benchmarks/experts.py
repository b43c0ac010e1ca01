"""Cost of a penalty on the experts of one layer, by their number.

Beside it: the Gram matrices of the stack by three batched products that autograd differentiates,
and the penalty of one expert after the other, by a slice of the stack for each.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import MixtralConfig, MixtralModel

import wellposed as wp
from benchmarks.rows import Benchmark, Goal, Row, Setup, Side, ratio_row
from wellposed.functional import gram_penalty

EXPERTS = (8, 16, 32, 64)


def rows(setup: Setup) -> Iterator[Row]:
    width, hidden = setup.size((128, 256), (16, 32))
    a_expert: dict[int, list[float]] = {}
    for experts in setup.size(EXPERTS, EXPERTS[:2]):
        torch.manual_seed(0)
        config = MixtralConfig(
            hidden_size=width, intermediate_size=hidden, num_local_experts=experts,
            num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, vocab_size=50,
        )  # fmt: skip
        model: Any = MixtralModel(config)
        model.to(setup.device)
        penalty = wp.OrthogonalityPenalty(model, feedforward=1.0)
        layer = model.layers[0].mlp.experts
        clear = partial(model.zero_grad, set_to_none=True)
        sides = {
            "penalty": Side(lambda penalty=penalty: penalty().backward(), clear),
            "stack": Side(partial(stack_of_grams, layer, hidden), clear),
            "slices": Side(partial(one_by_one, layer, hidden), clear),
        }
        times = setup.interleave(sides, 15)
        a_expert[experts] = [seconds / experts for seconds in times["penalty"]]
        sizes = f"{experts} experts of {width} x {hidden}"
        yield ratio_row(
            f"penalty over Gram matrices of the stack, {sizes}", times, "penalty", "stack"
        )
        yield ratio_row(f"penalty over slices, {sizes}", times, "penalty", "slices")
    few, many = min(a_expert), max(a_expert)
    ratios = [seconds / statistics.median(a_expert[few]) for seconds in sorted(a_expert[many])]
    value = statistics.median(ratios)
    yield Row(f"an expert of {many} over one of {few}", value, ratios[0], ratios[-1])


def matrices_of(experts: Any, hidden: int) -> list[Tensor]:
    """Return gate, up and down of all experts, (experts, out, in) each."""
    fused: Tensor = experts.gate_up_proj
    return [fused[:, :hidden], fused[:, hidden:], experts.down_proj]


def stack_of_grams(experts: Any, hidden: int) -> None:
    total = torch.zeros(())
    for stack in matrices_of(experts, hidden):
        tall = stack.shape[1] >= stack.shape[2]
        gram = stack.mT @ stack if tall else stack @ stack.mT
        unit = torch.eye(gram.shape[-1], device=gram.device)
        total = total + (gram - unit).square().sum()
    total.backward()


def one_by_one(experts: Any, hidden: int) -> None:
    stacks = matrices_of(experts, hidden)
    values = [gram_penalty(stack[expert]) for stack in stacks for expert in range(len(stack))]
    torch.stack(values).sum().backward()


BENCHMARK = Benchmark(
    "penalty on experts in one tensor, by their number", "no more than the Gram matrices", 2, rows,
    goals=(
        Goal("penalty over Gram matrices of the stack*", "<= 1.0"),
        Goal(
            "penalty over slices, 64*",
            "<= 0.2",
            "The six products of the penalty alone take 0.18 of the slices on an AMD EPYC, and with"
            " the passes over the stack 0.21 to 0.26. On a Xeon slices take 2 to 3 times as long.",
        ),
        Goal("an expert of*", "<= 1.2"),
    ),
)  # fmt: skip
