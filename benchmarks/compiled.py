"""Forward + backward of each building block, ``torch.compile(fullgraph=True)`` over a plain call.

The first calls compile and are left out. Blocks dominated by fused attention or matrix products
have little to gain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

import wellposed.nn as wn
from benchmarks.rows import Benchmark, Call, Row, Setup, ratio_row


def blocks(width: int) -> dict[str, Callable[[], nn.Module]]:
    heads, wide = max(1, width // 64), 4 * width
    return {
        "dot-product attention": lambda: wn.DotProductAttention(width, heads),
        "L2 attention": lambda: wn.L2SelfAttention(width, heads),
        "cosine attention": lambda: wn.CosineSelfAttention(width, heads),
        "ball attention": lambda: wn.BallAttention(width, heads),
        "MaxMin feed-forward": lambda: wn.MaxMinFeedForward(width, wide),
        "orthogonal feed-forward": lambda: wn.OrthogonalFeedForward(width),
        "TransJect, 2 layers of 2 experts": lambda: wn.TransJectStack(width, 2, num_experts=2),
    }


def both_ways(module: Callable[..., torch.Tensor], x: torch.Tensor) -> Call:

    def run() -> None:
        out = module(x)
        getattr(out, "last_hidden_state", out).sum().backward()

    return run


def rows(setup: Setup) -> Iterator[Row]:
    width, batch, tokens = setup.size((256, 4, 512), (16, 2, 8))
    backend = setup.size("inductor", "aot_eager")
    for name, build in blocks(width).items():
        torch.manual_seed(0)
        torch._dynamo.reset()
        module = build().to(setup.device)
        x = torch.randn(batch, tokens, width, device=setup.device, requires_grad=True)
        compiled = torch.compile(module, fullgraph=True, backend=backend)
        sides = {"plain": both_ways(module, x), "compiled": both_ways(compiled, x)}
        times = setup.interleave(sides, 7)
        label = f"plain / compiled, {name}, width {width}, {batch} x {tokens} tokens"
        yield ratio_row(label, times, "compiled", "plain", inverse=True)


BENCHMARK = Benchmark(
    "building blocks under torch.compile(fullgraph=True) over a plain call, forward + backward",
    "all compile; the speed-up is printed",
    5,
    rows,
    ("cpu", "cuda"),
)
