"""Cost of the affinity penalty over one attention (forward and backward), memory, and accuracy.

Memory is the growth of the peak in a fresh process, which shows N x N tensors. Accuracy is the
cosine between the mean gradient of several draws and the exact gradient.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.rows import (
    LAUNCHES,
    Benchmark,
    Goal,
    Row,
    Setup,
    in_fresh_process,
    peak_mib,
    ratio_row,
    single,
)
from wellposed.functional import affinity_penalty

WIDTH = 64
Cost = Callable[[Tensor, Tensor], Tensor]


def attention(query: Tensor, key: Tensor) -> Tensor:
    """Attention of the model itself (values are as wide as keys)."""
    return F.scaled_dot_product_attention(query, key, key).square().sum()


def by_autograd(query: Tensor, key: Tensor) -> Tensor:
    """The formula as printed, differentiated by autograd."""
    affinity = (query @ key.mT / math.sqrt(WIDTH)).softmax(-1)
    return (affinity.mT @ affinity - torch.eye(query.shape[-2], device=query.device)).square().sum()


def exact(query: Tensor, key: Tensor) -> Tensor:
    return affinity_penalty(query, key).sum()


def probes(query: Tensor, key: Tensor) -> Tensor:
    """Our estimator in O(N) memory."""
    return affinity_penalty(query, key, estimator="probes").sum()


COSTS: dict[str, Cost] = {
    "attention": attention,
    "A^T A, autograd": by_autograd,
    "exact": exact,
    "probes": probes,
}


def tensors(heads: int, tokens: int, device: str) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    query, key = (
        torch.randn(1, heads, tokens, WIDTH, device=device, requires_grad=True) for _ in range(2)
    )
    return query, key


def gradients(cost: Cost, query: Tensor, key: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(cost(query, key), (query, key))


def peaks(lengths: list[int], device: str) -> dict[tuple[str, int], float]:
    """Return the MiB by which one pass raises the peak, with one head, by cost and length."""
    torch.set_num_threads(1)
    growth: dict[tuple[str, int], float] = {}
    for name, cost in COSTS.items():
        gradients(cost, *tensors(1, 128, device))
        for tokens in lengths:
            if tokens <= 4096 or name != "A^T A, autograd":
                growth[name, tokens] = peak_mib(
                    partial(gradients, cost, *tensors(1, tokens, device)), device
                )
    return growth


def rows(setup: Setup) -> Iterator[Row]:
    heads = setup.size(4, 1)
    for tokens in setup.size([512, 1024, 2048], [64]):
        query, key = tensors(heads, tokens, setup.device)
        times = setup.interleave(
            {name: partial(gradients, cost, query, key) for name, cost in COSTS.items()}, 5
        )
        for name in list(COSTS)[1:]:
            yield ratio_row(
                f"{name} / attention, {heads} heads, N = {tokens}", times, name, "attention"
            )
    growth = in_fresh_process(peaks, setup.size([2048, 4096, 8192], [64]), setup.device)
    for (name, tokens), mib in growth.items():
        plain = growth["attention", tokens]
        if name != "attention":
            label = f"extra peak memory, {name} / attention, one head, N = {tokens}"
            yield single(label, mib / plain if plain else 1.0, ours=mib, other=plain, unit="MiB")
    query, key = tensors(2, setup.size(512, 32), setup.device)
    wanted = gradients(exact, query, key)[0].flatten()
    drawn = [gradients(probes, query, key)[0].flatten() for _ in range(setup.size(100, 5))]
    one = statistics.median(float(F.cosine_similarity(draw, wanted, dim=0)) for draw in drawn)
    yield single("cosine of the probes' gradient with the exact one, one draw", one)
    many = float(F.cosine_similarity(torch.stack(drawn).mean(0), wanted, dim=0))
    yield single(f"cosine of the mean of {len(drawn)} draws", many)


BENCHMARK = Benchmark(
    "affinity penalties over one attention, forward + backward; their memory; the cosine of the probes' gradient",
    "probes <= 2.2, cosine of 100 draws >= 0.99", 2, rows, ("cpu", "cuda"),
    goals=(
        Goal("probes / *", "<= 2.2", LAUNCHES, ("cuda",)),
        Goal("probes / *", "<= 2.2"), Goal("cosine of the mean*", ">= 0.99"),
    ),
)  # fmt: skip
