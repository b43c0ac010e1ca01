"""L2 attention on a GPU: the augmented fused kernel of the library, and FlexAttention.

FlexAttention subtracts `scale |k|^2` from the score `2 scale q.k`. This is `-scale |q - k|^2` up to
a term that the softmax cancels, so neither side has an N x N tensor. Its kernel needs
`torch.compile`; on a CPU it runs as plain operations, without a backward pass, to test the code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention

from benchmarks.rows import Benchmark, Goal, Row, Setup, ratio_row, single
from wellposed.functional import l2_attention

HEADS, HEAD_DIM = 8, 64


def l2_by_flex(
    query: Tensor, key: Tensor, value: Tensor, *, kernel: Callable[..., Any] = flex_attention
) -> Tensor:
    """L2 attention with the norm of the key as a modification of the score."""
    scale = query.shape[-1] ** -0.5
    penalty = scale * key.float().square().sum(-1)

    def less_norm(score: Tensor, batch: Tensor, head: Tensor, _query: Tensor, at: Tensor) -> Tensor:
        return score - penalty[batch, head, at]

    return kernel(query, key, value, score_mod=less_norm, scale=2 * scale)


def both_ways(
    attention: Callable[..., Tensor], inputs: list[Tensor], weight: Tensor
) -> tuple[Tensor, ...]:
    out = attention(*inputs)
    return out.detach(), *(torch.autograd.grad(out, inputs, weight) if out.requires_grad else ())


def largest_gap(result: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> float:
    """Return the largest difference of output and gradients, relative to the largest entry."""
    return max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(result, wanted, strict=True)
    )


def rows(setup: Setup) -> Iterator[Row]:
    on_gpu = setup.device == "cuda"
    kernel = torch.compile(flex_attention, dynamic=False) if on_gpu else flex_attention
    flex = partial(l2_by_flex, kernel=kernel)
    for dtype in setup.size((torch.bfloat16, torch.float32), (torch.float32,)):
        for tokens in setup.size((1024, 4096, 16384), (16,)):
            shape = (1, HEADS, tokens, HEAD_DIM)
            make = partial(torch.randn, shape, device=setup.device, dtype=dtype)
            inputs = [make(requires_grad=on_gpu) for _ in range(3)]
            sides = {
                "augmented": l2_attention,
                "flex": flex,
                "dot product": F.scaled_dot_product_attention,
            }
            weight = make()
            calls = {
                name: partial(both_ways, attention, inputs, weight)
                for name, attention in sides.items()
            }
            times = setup.interleave(calls, 20)
            label = f"{str(dtype).removeprefix('torch.')}, N = {tokens}"
            for ours, other in (
                ("augmented", "dot product"), ("flex", "dot product"), ("flex", "augmented"),
            ):  # fmt: skip
                yield ratio_row(f"L2 {ours} / {other}, {label}", times, ours, other)
            gap = largest_gap(
                *(both_ways(attention, inputs, weight) for attention in (flex, l2_attention))
            )
            yield single(f"largest relative difference of output and gradients, {label}", gap)


BENCHMARK = Benchmark(
    "L2 attention through FlexAttention beside the augmented kernel, N up to 16k, forward + backward",
    "bf16 <= 1.15 of dot product", 3, rows, ("cuda",),
    goals=(
        Goal("L2 * / dot product, bfloat16*", "<= 1.15"),
        Goal("L2 * / dot product*", "<= 1.25"),
        Goal("largest *bfloat16*", "<= 0.05"),
        Goal("largest *", "<= 1e-3"),
    ),
)  # fmt: skip
