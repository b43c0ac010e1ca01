"""TransJect and `nn.TransformerEncoder`: forward pass, growth with length, memory, training step.

Width 512, 6 layers, batch 1, eval, no gradients; ours has 4 experts, the encoder 8 heads and a
feed-forward of 2048. The encoder runs on its fast path (N x N weights), and without it
(`scaled_dot_product_attention`). Memory is the peak of a fresh process above its start. A training
step has 8192 tokens; re-orthogonalisation is the extra time of `constrain_` in `optimizer.step()`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.rows import (
    Benchmark,
    Call,
    Goal,
    Row,
    Setup,
    Side,
    in_fresh_process,
    peak_mib,
    ratio_row,
    row_of,
    single,
)
from wellposed.constrain import constrain_
from wellposed.nn import OrthogonalLinear, TransJectStack

EXPERTS = 4
HELD = (
    "Constraining a weight of 512^2 takes about 0.8 of a matmul pair of 512^3. Its part of a step of 8,192"
    " tokens takes 16: a share of 0.05."
)
FLOOR = (
    "Four fifths of a pass are the products that define it, at the rate of the processor's own matmul."
    " They alone would reach 1.35 of the encoder at 128 tokens and 7.4 at 4,096. The rest are passes over"
    " the activations: 4/5 of 7.4 is 5.9."
)


def ours(width: int, layers: int) -> TransJectStack:
    """Return the stack, with residual weights away from zero."""
    torch.manual_seed(0)
    return TransJectStack(width, layers, num_experts=EXPERTS, residual="sigmoid").eval()


def transformer(width: int, layers: int) -> nn.TransformerEncoder:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()


KINDS = {"ours": ours, "encoder": transformer}


@contextmanager
def no_fast_path() -> Iterator[None]:
    """Switch off the fused layers of `nn.TransformerEncoder`."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def run_encoder(encoder: nn.Module, x: Tensor) -> None:
    with no_fast_path():
        encoder(x)


def forward_rows(
    setup: Setup, dtype: torch.dtype, lengths: list[int], alone: list[int]
) -> Iterator[Row]:
    """Yield two rows per length, and the slope from 1024 tokens on."""
    name, width, layers = str(dtype).removeprefix("torch."), *setup.size((512, 6), (32, 1))
    stack, encoder = (build(width, layers).to(setup.device, dtype) for build in KINDS.values())
    medians: dict[int, float] = {}
    for length in [*lengths, *alone]:
        x = torch.randn(1, length, width).to(setup.device, dtype)
        # Short passes are repeated, as the processor clock is coarse.
        side = partial(Side, repeats=max(1, setup.size(1024, 1) // length))
        sides = {"ours": side(partial(stack, x))}
        if length in lengths:
            sides |= {
                "encoder": side(partial(encoder, x)),
                "its sdpa path": side(partial(run_encoder, encoder, x)),
            }
        with torch.inference_mode():
            times = setup.interleave(sides, 5)
        medians[length] = statistics.median(times["ours"])
        for other in list(sides)[1:]:
            yield ratio_row(
                f"{other} / ours, {name}, N = {length}", times, "ours", other, inverse=True
            )
    long = sorted(length for length in medians if length >= setup.size(1024, 1))
    if len(long) > 1:
        slope = math.log(medians[long[-1]] / medians[long[0]]) / math.log(long[-1] / long[0])
        yield single(f"log-log slope of ours, {name}, N = {long[0]} to {long[-1]}", slope)


@torch.inference_mode()
def peaks(kind: str, lengths: list[int], device: str) -> list[float]:
    """Return the MiB by which one pass raises the peak, by length."""
    torch.set_num_threads(1)
    model = KINDS[kind](512, 6).to(device)
    model(torch.randn(1, 16, 512, device=device))
    return [
        peak_mib(partial(model, torch.randn(1, length, 512, device=device)), device)
        for length in lengths
    ]


def memory_rows(setup: Setup) -> Iterator[Row]:
    """Yield the extra peak memory of a pass, over that of the encoder."""
    lengths = [1024, 4096]
    sizes = [in_fresh_process(peaks, kind, lengths, setup.device) for kind in KINDS]
    for length, mine, theirs in zip(lengths, *sizes, strict=True):
        yield single(
            f"extra peak memory, encoder / ours, N = {length}",
            theirs / mine,
            ours=mine,
            other=theirs,
            unit="MiB",
        )


def training_row(setup: Setup) -> Row:
    """Return the share of `constrain_` in a step, with the same gradients on both sides."""
    batch, length, width, layers = setup.size((16, 512, 512, 6), (2, 8, 32, 1))
    x, goal = torch.randn(2, batch, length, width, device=setup.device).unbind()
    model, twin = (ours(width, layers).train().to(setup.device) for _ in range(2))
    optimizers = [
        torch.optim.AdamW(part.parameters(), lr=1e-3, weight_decay=0.0) for part in (model, twin)
    ]
    constrain_(model, optimizers[0], where=OrthogonalLinear)

    def backward() -> None:
        model.zero_grad()
        loss = (model(x).last_hidden_state - goal).square().mean() + model.reconstruction_loss(x)
        loss.backward()

    def copy_gradients() -> None:
        for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
            other.grad = None if mine.grad is None else mine.grad.clone()

    sides: dict[str, Call | Side] = {
        "backward": backward, "held": optimizers[0].step, "free": Side(optimizers[1].step, copy_gradients),
    }  # fmt: skip
    times = setup.interleave(sides, 5)
    shares = [
        (h - f) / (b + h)
        for b, h, f in zip(times["backward"], times["held"], times["free"], strict=True)
    ]
    return row_of(
        f"re-orthogonalisation, share of a training step of {batch} x {length} tokens",
        shares,
    )


def rows(setup: Setup) -> Iterator[Row]:
    yield from forward_rows(
        setup, torch.float32, setup.size([128, 1024, 4096], [16]), setup.size([16384], [])
    )
    yield from forward_rows(setup, torch.bfloat16, setup.size([128, 1024], [16]), [])
    if not setup.quick:
        yield from memory_rows(setup)
    yield training_row(setup)


BENCHMARK = Benchmark(
    "a forward pass of TransJect over nn.TransformerEncoder's by length, its slope, memory, and constrain_ in a step",
    ">= 1.2 at 128 tokens, >= 7 at 4,096, slope <= 1.1", 5, rows, ("cpu", "cuda"),
    goals=(
        Goal("encoder / ours, float32, N = 128", ">= 1.2", FLOOR),
        Goal("encoder / ours, float32, N = 4096", ">= 7", FLOOR),
        Goal("log-log slope*", "<= 1.1"),
        Goal("re-orthogonalisation, share*", "<= 0.05", HELD),
    ),
)  # fmt: skip
