"""Cost of the affinity penalty against one attention, forward and backward; memory against tokens; quality of probes.

    python benchmarks/affinity.py [--tokens 512 1024 2048] [--heads 4] [--rounds 5] [--threads 1]

Times are medians of process CPU time over interleaved rounds, as ratios to `scaled_dot_product_attention` forward +
backward on the same query and key. Memory is the growth of peak resident memory of a fresh process per size, which is
where N x N tensors show. Quality is the cosine between the mean gradient of 100 draws and the exact gradient.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from wellposed.functional import affinity_penalty

WIDTH = 64
Cost = Callable[[Tensor, Tensor], Tensor]


def attention(query: Tensor, key: Tensor) -> Tensor:
    """What the model pays anyway (values are as wide as keys)."""
    return F.scaled_dot_product_attention(query, key, key).square().sum()


def by_autograd(query: Tensor, key: Tensor) -> Tensor:
    """The formula as printed, differentiated by autograd."""
    affinity = (query @ key.mT / math.sqrt(WIDTH)).softmax(-1)
    return (affinity.mT @ affinity - torch.eye(query.shape[-2])).square().sum()


def exact(query: Tensor, key: Tensor) -> Tensor:
    return affinity_penalty(query, key).sum()


def probes(query: Tensor, key: Tensor) -> Tensor:
    return affinity_penalty(query, key, estimator="probes").sum()


COSTS: dict[str, Cost] = {"attention": attention, "A^T A, autograd": by_autograd, "exact": exact, "probes": probes}


def tensors(batch: int, heads: int, tokens: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    query, key = (torch.randn(batch, heads, tokens, WIDTH, requires_grad=True) for _ in range(2))
    return query, key


def seconds(cost: Cost, query: Tensor, key: Tensor) -> float:
    start = time.process_time()
    torch.autograd.grad(cost(query, key), (query, key))
    return time.process_time() - start


def resident(field: str) -> int:
    """Return VmRSS or VmHWM of this process, in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def peak(name: str, heads: int, tokens: int) -> float:
    """Return MiB by which one forward and backward raises the peak resident memory (Linux)."""
    torch.set_num_threads(1)
    seconds(COSTS[name], *tensors(1, heads, 128))
    query, key = tensors(1, heads, tokens)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before = resident("VmRSS")
    seconds(COSTS[name], query, key)
    return (resident("VmHWM") - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--memory-tokens", type=int, nargs="*", default=[2048, 4096, 8192])
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {options.threads} thread(s), float32, head_dim {WIDTH}, {options.heads} heads")
    print(f"{'tokens':>8}" + "".join(f"{name:>20}" for name in COSTS))
    for tokens in options.tokens:
        query, key = tensors(1, options.heads, tokens)
        rounds = [{name: seconds(cost, query, key) for name, cost in COSTS.items()} for _ in range(options.rounds + 1)]
        medians = {name: statistics.median(times[name] for times in rounds[1:]) for name in COSTS}
        ratios = "".join(f"{medians[name] / medians['attention']:19.2f}x" for name in COSTS)
        print(f"{tokens:8}{ratios}   (attention {medians['attention'] * 1e3:.0f} ms)")
    print("\nextra peak memory, MiB, one head")
    context = multiprocessing.get_context("spawn")
    for tokens in options.memory_tokens:
        row = f"{tokens:8}"
        for name in COSTS:
            if name == "A^T A, autograd" and tokens > 4096:
                row += f"{'not run':>20}"
                continue
            with context.Pool(1) as pool:
                row += f"{pool.apply(peak, (name, 1, tokens)):20.0f}"
        print(row, flush=True)
    query, key = tensors(1, 2, 512)
    (wanted,) = torch.autograd.grad(exact(query, key), query)
    drawn = [torch.autograd.grad(probes(query, key), query)[0] for _ in range(100)]
    mean = torch.stack(drawn).mean(0)
    one = statistics.median(float(F.cosine_similarity(d.flatten(), wanted.flatten(), dim=0)) for d in drawn)
    many = float(F.cosine_similarity(mean.flatten(), wanted.flatten(), dim=0))
    print(f"\ngradient cosine with exact, 32 probes, 512 tokens: one draw {one:.4f}, mean of 100 draws {many:.4f}")


if __name__ == "__main__":
    main()
