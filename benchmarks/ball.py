"""Forward + backward time of one ball block against the house pre-LN block, at equal width, heads and length.

The ball block is ball attention and the sorted-pairs feed-forward, each in a convex residual, without LayerNorm; both
blocks have the same matrices. Ratios are medians over interleaved rounds, so that a busy machine slows both alike.
Run: OMP_NUM_THREADS=1 python benchmarks/ball.py [--widths 256 512] [--tokens 512] [--causal] [--rounds 15]
"""

from __future__ import annotations

import argparse
import statistics
import time
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from wellposed.nn import NORMS, BallAttention, Block, ConvexResidual, MaxMinFeedForward


def pre_ln(width: int, heads: int) -> Block:
    """`x + A(LN(x))`, then `x + F(LN(x))`, with dot-product attention and GELU."""
    config = SimpleNamespace(
        hidden_size=width, num_attention_heads=heads, intermediate_size=4 * width, activation="gelu",
        attention="dot_product", feedforward="mlp", residual="plain", norm="pre", qk_norm=False, dropout=0.0,
        attention_dropout=0.0, layer_norm_eps=1e-5,
    )  # fmt: skip
    return Block(config)


def ball(width: int, heads: int) -> Block:
    """The same block with the 1-Lipschitz parts."""
    block = pre_ln(width, heads)
    block.attention, block.feedforward = BallAttention(width, heads), MaxMinFeedForward(width, 4 * width)
    block.attention_residual, block.feedforward_residual = ConvexResidual(), ConvexResidual()
    block.attention_norm = block.feedforward_norm = NORMS.get("none")(None)
    return block


def seconds(block: nn.Module, x: Tensor, *, is_causal: bool) -> float:
    """Time one forward and backward pass."""
    synchronize = torch.cuda.synchronize if x.is_cuda else (lambda: None)
    synchronize()
    start = time.perf_counter()
    block(x, is_causal=is_causal).square().sum().backward()
    synchronize()
    return time.perf_counter() - start


def main() -> None:
    """Print one row for each width."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    where = {"device": options.device, "dtype": getattr(torch, options.dtype)}
    print(f"torch {torch.__version__}, {options.device}, {torch.get_num_threads()} threads, {options.rounds} rounds")
    for width in options.widths:
        heads = width // options.head_dim
        blocks = [build(width, heads).to(**where) for build in (pre_ln, ball)]
        x = torch.randn(options.batch, options.tokens, width, **where).requires_grad_()
        rounds = [[seconds(block, x, is_causal=options.causal) for block in blocks] for _ in range(options.rounds + 1)]
        plain, ours = zip(*rounds[1:], strict=True)
        ratio = statistics.median(b / a for a, b in zip(plain, ours, strict=True))
        print(
            f"{options.dtype} width {width}, {heads} heads, {options.batch} x {options.tokens} tokens: "
            f"ball / pre-LN {ratio:.2f} (pre-LN {1e3 * statistics.median(plain):.0f} ms)",
            flush=True,
        )


if __name__ == "__main__":
    main()
