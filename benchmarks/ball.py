"""Forward + backward time of one ball block over our pre-LN block of equal width, heads, length.

The ball block has ball attention and the sorted-pairs feed-forward, each in a convex residual, and
no LayerNorm. Both blocks have the same matrices.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from benchmarks.rows import Benchmark, Goal, Row, Setup, ratio_row
from wellposed.nn import NORMS, BallAttention, Block, ConvexResidual, MaxMinFeedForward

HEAD_DIM = 64

ELEMENTWISE = (
    "At width 256 the work beside products (projections onto balls, MaxMin, convex sums) is a larger"
    " share than at 512, which is well inside."
)


def pre_ln(width: int) -> Block:
    """`x + A(LN(x))`, then `x + F(LN(x))`, with dot-product attention and GELU."""
    config = SimpleNamespace(
        hidden_size=width, num_attention_heads=width // HEAD_DIM, intermediate_size=4 * width, activation="gelu",
        attention="dot_product", feedforward="mlp", residual="plain", norm="pre", qk_norm=False, dropout=0.0,
        attention_dropout=0.0, layer_norm_eps=1e-5,
    )  # fmt: skip
    return Block(config)


def ball(width: int) -> Block:
    block = pre_ln(width)
    block.attention, block.feedforward = (
        BallAttention(width, width // HEAD_DIM),
        MaxMinFeedForward(width, 4 * width),
    )
    block.attention_residual, block.feedforward_residual = ConvexResidual(), ConvexResidual()
    block.attention_norm = block.feedforward_norm = NORMS.get("none")(None)
    return block


def both_ways(block: nn.Module, x: Tensor, is_causal: bool) -> None:
    block(x, is_causal=is_causal).square().sum().backward()


def rows(setup: Setup) -> Iterator[Row]:
    """Yield one row per width, for the narrow one also causal."""
    batch, tokens = setup.size((4, 512), (1, 16))
    for width, is_causal in setup.size([(256, False), (512, False), (256, True)], [(64, False)]):
        x = torch.randn(batch, tokens, width, device=setup.device, requires_grad=True)
        sides = {
            build.__name__: partial(both_ways, build(width).to(setup.device), x, is_causal)
            for build in (pre_ln, ball)
        }
        name = (
            f"ball block / pre-LN block, width {width}{', causal' * is_causal}, {batch} x {tokens}"
            " tokens"
        )
        yield ratio_row(name, setup.interleave(sides, 15), "ball", "pre_ln")


BENCHMARK = Benchmark(
    "a block of ball attention, MaxMin and convex residuals over a pre-LN block, forward + backward",
    "<= 1.3", 1, rows, ("cpu", "cuda"), goals=(Goal("*", "<= 1.3", ELEMENTWISE),),
)  # fmt: skip
