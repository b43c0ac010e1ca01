"""Activation memory of reversible stacks by depth, and the time their backward pass costs.

Three measures. Saved: bytes the graph keeps, by `torch.autograd.graph.saved_tensors_hooks`. Live: the most bytes of
tensors alive at one moment of forward and backward, less those alive before and less one gradient for each parameter
(a stack of L blocks has L blocks' gradients whatever its method; they are no activations). Process: growth of the
resident memory of a fresh process, less the same gradients; the allocator's unused pages are in it.
Run: python benchmarks/reversible.py [--depths 8 64]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from wellposed.nn import AdditiveCoupling, InvertibleResidual, L2SelfAttention, ReversibleSequential


def build(kind: str, depth: int, width: int, tokens: int) -> ReversibleSequential:
    """Return a stack of contractive L2 attention residuals, or of couplings of L2 attention and a feed-forward."""
    torch.manual_seed(0)

    def block() -> nn.Module:
        if kind == "residual":
            return InvertibleResidual(L2SelfAttention(width, 4, contractive=0.9, max_tokens=tokens))
        half = width // 2
        feedforward = nn.Sequential(nn.Linear(half, width), nn.GELU(), nn.Linear(width, half))
        return AdditiveCoupling(L2SelfAttention(half, 4), feedforward)

    return ReversibleSequential([block() for _ in range(depth)])


def forward(stack: ReversibleSequential, x: Tensor, plain: bool) -> Tensor:
    """Run the stack, with or without an ordinary graph."""
    if not plain:
        return stack(x)
    for block in stack.blocks:
        x = block(x)
    return x


def saved_bytes(stack: ReversibleSequential, x: Tensor, plain: bool) -> int:
    """Bytes of distinct tensors other than parameters that the graph keeps."""
    known = {parameter.data_ptr() for parameter in stack.parameters()}
    storages: dict[int, int] = {}

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        kept = forward(stack, x, plain)
    del kept
    return sum(storages.values())


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make and that are alive: now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and count what it made."""
        del types
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage(), given)
        return made

    def _count(self, storage: Any, given: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in given or key in self._alive:
            return
        self._alive.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.now -= size


def live_bytes(stack: ReversibleSequential, x: Tensor, plain: bool) -> int:
    """Most bytes of tensors alive during forward and backward, without one gradient for each parameter."""
    stack.zero_grad()
    x.grad = None
    gradients = sum(parameter.nbytes for parameter in stack.parameters())
    with LiveBytes() as counter:
        forward(stack, x, plain).square().mean().backward()
    return counter.most - gradients


def measure(kind: str, depth: int, width: int, tokens: int, batch: int, plain: bool) -> dict[str, float]:
    """Return saved bytes, growth of the process, seconds of forward + backward, and the gradient's size."""
    stack = build(kind, depth, width, tokens)
    x = torch.randn(batch, tokens, width).requires_grad_()
    warm = build(kind, 1, width, tokens)
    forward(warm, x.detach().clone().requires_grad_(), plain).sum().backward()
    saved, live = saved_bytes(stack, x, plain), live_bytes(stack, x, plain)
    for parameter in stack.parameters():
        parameter.grad = torch.ones_like(parameter)  # written, so that the pages are there before
    gradients = sum(parameter.nbytes for parameter in stack.parameters())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    forward(stack, x, plain).square().mean().backward()
    seconds = time.perf_counter() - start
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "saved_MiB": saved / 2**20,
        "live_MiB": live / 2**20,
        "process_MiB": grown / 2**10 - gradients / 2**20,
        "seconds": seconds,
    }


def in_fresh_process(arguments: list[str]) -> dict[str, float]:
    """Measure in a process of its own, since the peak of a process never falls."""
    command = [sys.executable, str(Path(__file__).resolve()), "--one", *arguments]
    # Every tensor gets pages of its own, so that memory which is free is not counted.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "4096", "MALLOC_MMAP_MAX_": "1000000"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(done.stdout)


def text(row: dict[str, float]) -> str:
    """Join names and values."""
    return ", ".join(f"{name} {value:.2f}" for name, value in row.items())


def main() -> None:
    """Print one row per kind and depth, then the ratios of the deepest to the shallowest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depths", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--one", nargs=3, metavar=("KIND", "DEPTH", "MODE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes = [options.width, options.tokens, options.batch]
    if options.one:
        kind, depth, mode = options.one
        print(json.dumps(measure(kind, int(depth), *sizes, plain=mode == "plain")))
        return
    print(f"torch {torch.__version__}, cpu, {torch.get_num_threads()} threads, width, tokens, batch = {sizes}")
    extra = ["--width", str(sizes[0]), "--tokens", str(sizes[1]), "--batch", str(sizes[2])]
    for kind in ("residual", "coupling"):
        for mode in ("plain", "reversible"):
            rows = [in_fresh_process([kind, str(depth), mode, *extra]) for depth in options.depths]
            for depth, row in zip(options.depths, rows, strict=True):
                print(f"{kind} {mode} {depth} blocks: {text(row)}")
            ratios = {name: rows[-1][name] / rows[0][name] for name in rows[0] if rows[0][name]}
            print(f"{kind} {mode} {options.depths[-1]} / {options.depths[0]}: {text(ratios)}", flush=True)


if __name__ == "__main__":
    main()
