"""Forward + backward time of L2 attention against dot-product attention, the paper's formula and `torch.cdist`.

Ratios are medians over interleaved rounds, so that a busy machine slows every candidate alike. `dot_product d + 8` is
the fused kernel at the head width that L2 attention calls it with: no L2 attention made of that kernel can be faster.
Run: python benchmarks/l2_attention.py [--tokens 1024 2048 4096] [--dtype float32 bfloat16] [--rounds 7]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from wellposed.functional import l2_attention

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def paper_formula(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Kim et al. (2021), eq. 15: the distance matrix from one matrix product and two norms."""
    squared = (
        query.square().sum(-1, keepdim=True) - 2 * query @ key.transpose(-1, -2) + key.square().sum(-1)[..., None, :]
    )
    return (-squared / query.shape[-1] ** 0.5).softmax(-1) @ value


def with_cdist(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The distance matrix from `torch.cdist`."""
    return (-torch.cdist(query, key).square() / query.shape[-1] ** 0.5).softmax(-1) @ value


def tied(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Query, key and value are one tensor, as in `L2SelfAttention`."""
    del key, value
    return l2_attention(query, query, query)


CANDIDATES: dict[str, Attention] = {
    "dot_product": F.scaled_dot_product_attention,
    "l2_attention": l2_attention,
    "l2_attention tied": tied,
    "dot_product d + 8": F.scaled_dot_product_attention,
    "dot_product causal": partial(F.scaled_dot_product_attention, is_causal=True),
    "l2_attention causal": partial(l2_attention, is_causal=True),
    "dot_product causal d + 8": partial(F.scaled_dot_product_attention, is_causal=True),
    "paper formula": paper_formula,
    "cdist": with_cdist,
}
BASELINE = dict.fromkeys(("l2_attention causal", "dot_product causal d + 8"), "dot_product causal")
_WIDER = 8


BASES = ("dot_product", *BASELINE.values())


def seconds(attention: Attention, inputs: list[Tensor], weight: Tensor) -> float:
    """Time one forward and backward pass."""
    synchronize = torch.cuda.synchronize if weight.is_cuda else (lambda: None)
    synchronize()
    start = time.perf_counter()
    torch.autograd.grad(attention(*inputs), inputs, weight, allow_unused=True)
    synchronize()
    return time.perf_counter() - start


def ratio(times: dict[str, list[float]], name: str) -> float:
    """Median over rounds, the first left out, of the time of `name` over that of its baseline."""
    base = times[BASELINE.get(name, "dot_product")]
    return statistics.median(a / b for a, b in zip(times[name][1:], base[1:], strict=True))


def main() -> None:
    """Print one table row per number of tokens and dtype."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--candidates", nargs="+", default=list(CANDIDATES), choices=list(CANDIDATES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {options.device}, {torch.get_num_threads()} threads, {options.rounds} rounds")
    print(f"ratio of forward + backward to dot_product, {options.heads} heads of width {options.head_dim}")
    for dtype_name in options.dtype:
        dtype = getattr(torch, dtype_name)
        for tokens in options.tokens:
            make = partial(torch.randn, device=options.device, dtype=dtype)
            narrow, wide = ((1, options.heads, tokens, options.head_dim + extra) for extra in (0, _WIDER))
            inputs = [make(narrow, requires_grad=True) for _ in range(3)], make(narrow)
            wider = [make(wide, requires_grad=True) for _ in range(3)], make(wide)
            chosen = {name: CANDIDATES[name] for name in options.candidates if name != "cdist" or dtype_name[0] == "f"}
            times: dict[str, list[float]] = {name: [] for name in chosen}
            for _ in range(options.rounds + 1):
                for name, attention in chosen.items():
                    times[name].append(seconds(attention, *(wider if name.endswith("d + 8") else inputs)))
            ratios = {name: ratio(times, name) for name in times if name not in BASES}
            base = statistics.median(times["dot_product"][1:])
            row = ", ".join(f"{name} {value:.2f}" for name, value in ratios.items())
            print(f"{dtype_name} N={tokens}: {row} (dot_product {1000 * base:.1f} ms)", flush=True)


if __name__ == "__main__":
    main()
