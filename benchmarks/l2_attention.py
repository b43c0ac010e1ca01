"""Forward + backward time of L2 attention, the paper's formula and `torch.cdist` over dot-product.

The fused kernel at the head width that L2 attention calls it with (`dot product, d + 8`) is a lower
limit for L2 attention by that kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.rows import Benchmark, Goal, Row, Setup, ratio_row
from wellposed.functional import l2_attention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
HEAD_DIM, WIDER = 64, 72
WIDER_HEAD = (
    "The exact backward pass needs the column sums of P^T (dO . O), which the fused kernel returns only"
    " for a wider head. It has 72 columns for 64, so 1.125 of the products, and costs dot product 1.12"
    " to 1.16 by itself (row d + 8). Norms of keys and the wider copies add 0.01 to 0.06 more."
)


def paper_formula(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Kim et al. (2021), eq. 15: the distance matrix from one matrix product and two norms."""
    squared = (
        query.square().sum(-1, keepdim=True)
        - 2 * query @ key.transpose(-1, -2)
        + key.square().sum(-1)[..., None, :]
    )
    return (-squared / query.shape[-1] ** 0.5).softmax(-1) @ value


def with_cdist(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (-torch.cdist(query, key).square() / query.shape[-1] ** 0.5).softmax(-1) @ value


def tied(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Query, key and value are one tensor, as in `L2SelfAttention`."""
    del key, value
    return l2_attention(query, query, query)


dot_product = F.scaled_dot_product_attention
CAUSAL = {
    "l2, causal": partial(l2_attention, is_causal=True),
    "dot product, causal": partial(dot_product, is_causal=True),
    "dot product, causal, d + 8": partial(dot_product, is_causal=True),
}
FULL: dict[str, Attention] = {
    "l2": l2_attention, "l2 tied": tied, "dot product, d + 8": dot_product, "paper formula": paper_formula,
    "cdist": with_cdist, "dot product": dot_product,
}  # fmt: skip


def both_ways(attention: Attention, inputs: list[Tensor], weight: Tensor) -> None:
    torch.autograd.grad(attention(*inputs), inputs, weight, allow_unused=True)


def sides_of(
    setup: Setup, heads: int, tokens: int, dtype: torch.dtype
) -> dict[str, Callable[[], None]]:
    """Return each candidate on inputs of its width."""
    make = partial(torch.randn, device=setup.device, dtype=dtype)
    inputs: dict[int, tuple[list[Tensor], Tensor]] = {}
    for width in (HEAD_DIM, WIDER):
        shape = (1, heads, tokens, width)
        inputs[width] = [make(shape, requires_grad=True) for _ in range(3)], make(shape)
    with_matrix = tokens < 4096
    taken = {
        name: attention for name, attention in (FULL | CAUSAL).items()
        if (name != "cdist" or (dtype == torch.float32 and with_matrix)) and (name != "paper formula" or with_matrix)
    }  # fmt: skip
    return {
        name: partial(both_ways, attention, *inputs[WIDER if name.endswith("d + 8") else HEAD_DIM])
        for name, attention in taken.items()
    }


def rows(setup: Setup) -> Iterator[Row]:
    on_gpu = setup.device == "cuda"
    for dtype in (torch.float32, torch.bfloat16):
        for tokens in setup.size([1024, 2048, 4096, 16384] if on_gpu else [1024, 2048, 4096], [16]):
            heads = setup.size(8 if on_gpu or tokens < 4096 else 4, 1)
            times = setup.interleave(sides_of(setup, heads, tokens, dtype), 7)
            label = f"{str(dtype).removeprefix('torch.')}, N = {tokens}"
            for name in times:
                base = "dot product, causal" if name in CAUSAL else "dot product"
                if name != base:
                    yield ratio_row(f"{name} / {base}, {label}", times, name, base)


BENCHMARK = Benchmark(
    "L2 attention (as it is, tied, causal), the paper's formula and cdist over dot-product attention",
    "<= 1.2; bf16 on a GPU <= 1.15", 6, rows, ("cpu", "cuda"),
    goals=(
        Goal("l2*bfloat16*", "<= 1.15", WIDER_HEAD, ("cuda",)),
        Goal("l2*", "<= 1.2", WIDER_HEAD),
    ),
)  # fmt: skip
