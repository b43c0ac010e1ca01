"""Looseness of attention's certificates: bound over attained slope in norm tok, random weights.

The attack begins at tokens of mixed lengths, some near zero and some in opposite pairs, as steep
inputs have. From normal numbers alone it stays far lower, which makes a bound look loose.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import wellposed as wp
from benchmarks.rows import Benchmark, Goal, Row, Setup, row_of
from wellposed.linalg import l2_constants

HEADS = 4
FORMS = {
    "dot product, R = 3": (wp.nn.DotProductAttention, {}, 3.0),
    "ball": (wp.nn.BallAttention, {}, None),
    "cosine": (wp.nn.CosineSelfAttention, {}, None),
    "L2, tied": (wp.nn.L2SelfAttention, {}, None),
    "L2, contractive": (wp.nn.L2SelfAttention, {"contractive": 0.9, "max_tokens": 8}, None),
}


def starts(tokens: int, width: int, seed: int, count: int, size: float) -> Tensor:
    """Return first inputs of an attack: lengths from 0.03 to 30 times ``size``, zeros, pairs."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(count, tokens, width, generator=generator, dtype=torch.float64)
    powers = torch.rand(count, tokens, 1, generator=generator, dtype=torch.float64) * 3 - 1.5
    x = drawn * (size / math.sqrt(width)) * 10**powers
    x[::2, 0] *= 1e-3
    x[::3, 2::2] = -x[::3, 1:-1:2]
    return x


def steep_starts(module: wp.nn.L2SelfAttention, tokens: int, seed: int, count: int) -> Tensor:
    """Return inputs whose heads are near the steepest form of one dimension.

    A token is at the centre. The others are at both sides of it, sqrt(1 + c) away along what the head
    reads and writes.
    """
    generator = torch.Generator().manual_seed(seed)
    reads, mixes, writes = module.head_weights(torch.float64)
    paths = mixes @ writes
    heads, _, head_dim = reads.shape
    from_heads = torch.linalg.pinv(reads.detach().movedim(0, 1).flatten(1))
    distance = math.sqrt((1 + l2_constants(tokens).c) * math.sqrt(head_dim))
    x = torch.zeros(count, tokens, heads, head_dim, dtype=torch.float64)
    for start in range(count):
        for head in range(heads):
            read = (reads[head].mT @ reads[head]).detach()
            write = (paths[head] @ paths[head].mT).detach()
            share, size = torch.rand(2, generator=generator, dtype=torch.float64)
            both = share * read / read.trace() + (1 - share) * write / write.trace()
            steepest = torch.linalg.eigh(both).eigenvectors[:, -1]
            sides = torch.randperm(tokens - 1, generator=generator) % 2 * 2.0 - 1
            x[start, 1:, head] = sides[:, None] * distance * (0.7 + 0.6 * size) * steepest
    return x.flatten(2) @ from_heads


def looseness(form: str, width: int, seed: int, tokens: int, steps: int, count: int) -> float:
    kind, options, radius = FORMS[form]
    torch.manual_seed(seed)
    module: nn.Module = kind(width, HEADS, **options).double().eval()
    certificate = wp.certify(module, seq_len=tokens, radius=radius, cross_check=False)
    first = starts(tokens, width, seed, count, radius or 3.0)
    if isinstance(module, wp.nn.L2SelfAttention):
        first = torch.cat((first, steep_starts(module, tokens, seed, count)))
    attack = wp.lipschitz_lower_bound(
        module, (tokens, width), start=first, restarts=len(first), steps=steps, learning_rate=0.03,
        radius=radius,
    )  # fmt: skip
    return certificate.total / attack.value


def rows(setup: Setup) -> Iterator[Row]:
    widths = setup.size(((32, 3), (64, 1)), ((8, 1),))
    steps, count = setup.size((250, 24), (3, 6))
    for width, repeats in widths:
        for form in FORMS:
            values = [looseness(form, width, seed, 8, steps, count) for seed in range(repeats)]
            yield row_of(f"bound / attained slope, {form}, width {width}", values)


BENCHMARK = Benchmark(
    "Looseness of attention's certificates in norm tok: bound over the slope that an attack attains",
    "cosine <= 10, L2 tied <= 5, contractive <= 2, ball <= 3 at width 64", 12, rows,
    goals=(
        Goal("bound / attained slope, cosine, *", "<= 10"),
        Goal("bound / attained slope, L2, tied, *", "<= 5"),
        Goal("bound / attained slope, L2, contractive, *", "<= 2"),
        Goal("bound / attained slope, ball, *", "<= 3"),
        Goal("bound / attained slope, dot product*", "<= 3"),
    ),
)  # fmt: skip
