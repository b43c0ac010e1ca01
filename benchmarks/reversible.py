"""Activation memory of reversible stacks by depth, and the time of their backward pass.

Saved: bytes that the graph keeps (`torch.autograd.graph.saved_tensors_hooks`). Live: largest number
of bytes of live tensors during forward and backward, minus those before. Process: growth of the
memory of a fresh process, unused pages of the allocator included. Live and process leave out one
gradient per parameter, which any method needs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.rows import (
    Benchmark,
    Goal,
    Row,
    Setup,
    in_fresh_process,
    peak_mib,
    ratio_row,
    single,
)
from wellposed.nn import InvertibleResidual, L2SelfAttention, ReversibleSequential

Sizes = tuple[int, int, int]
"""Width, tokens, batch."""


def build(depth: int, sizes: Sizes) -> ReversibleSequential:
    """Return a stack of contractive L2 attention residuals."""
    torch.manual_seed(0)
    width, tokens, _ = sizes

    def block() -> nn.Module:
        return InvertibleResidual(L2SelfAttention(width, 4, contractive=0.9, max_tokens=tokens))

    return ReversibleSequential([block() for _ in range(depth)])


def inputs(sizes: Sizes) -> Tensor:
    width, tokens, batch = sizes
    return torch.randn(batch, tokens, width).requires_grad_()


def forward(stack: ReversibleSequential, x: Tensor, is_plain: bool) -> Tensor:
    if not is_plain:
        return stack(x)
    for block in stack.blocks:
        x = block(x)
    return x


def both_ways(stack: ReversibleSequential, x: Tensor, is_plain: bool) -> None:
    forward(stack, x, is_plain).square().mean().backward()


def saved_bytes(stack: ReversibleSequential, x: Tensor, is_plain: bool) -> int:
    """Return the bytes of distinct tensors, except parameters, that the graph keeps."""
    parameter_pointers = {parameter.data_ptr() for parameter in stack.parameters()}
    storages: dict[int, int] = {}

    def record(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameter_pointers:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        output = forward(stack, x, is_plain)
    del output
    return sum(storages.values())


class LiveBytes(TorchDispatchMode):
    """Count the bytes of live storages that operations create: now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._alive: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        inputs = {
            t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)
        }
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage(), inputs)
        return made

    def _count(self, storage: Any, inputs: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in inputs or key in self._alive:
            return
        self._alive.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._alive.discard(key)
        self.now -= size


def live_bytes(stack: ReversibleSequential, x: Tensor, is_plain: bool) -> int:
    """Return the most live bytes during forward and backward, minus parameter gradients."""
    gradients = sum(parameter.nbytes for parameter in stack.parameters())
    with LiveBytes() as counter:
        both_ways(stack, x, is_plain)
    return counter.most - gradients


def memory(depth: int, sizes: Sizes, is_plain: bool) -> dict[str, float]:
    """Return MiB saved by the graph, alive at most, and growth of the process."""
    stack, x = build(depth, sizes), inputs(sizes)
    both_ways(build(1, sizes), inputs(sizes), is_plain)
    saved, live = saved_bytes(stack, x, is_plain), live_bytes(stack, x, is_plain)
    for parameter in stack.parameters():
        parameter.grad = torch.ones_like(parameter)  # written, so that their pages exist before
    gradients = sum(parameter.nbytes for parameter in stack.parameters())
    grown = peak_mib(partial(both_ways, stack, x, is_plain))
    return {"saved": saved / 2**20, "live": live / 2**20, "process": grown - gradients / 2**20}


def memories(
    kinds: tuple[str, ...], depths: tuple[int, int], sizes: Sizes
) -> dict[tuple[str, bool, int], Any]:
    torch.set_num_threads(1)
    return {
        (kind, is_plain, depth): memory(depth, sizes, is_plain)
        for kind in kinds for is_plain in (False, True) for depth in depths
    }  # fmt: skip


def gpu_rows(setup: Setup, kind: str, depths: tuple[int, int], sizes: Sizes) -> Iterator[Row]:
    """Yield the growth of peak GPU memory with depth, minus parameter gradients."""
    for is_plain in (False, True):
        peaks: list[float] = []
        for depth in depths:
            stack, x = build(depth, sizes).to(setup.device), inputs(sizes).to(setup.device)
            both_ways(stack, x, is_plain)
            peaks.append(peak_mib(partial(both_ways, stack, x, is_plain), setup.device))
        label = "ordinary backward" if is_plain else "reversible"
        name = f"peak of {depths[1]} blocks / {depths[0]}, {kind}, {label}"
        raw = {"ours": peaks[1], "other": peaks[0]}
        yield single(name, peaks[1] / max(peaks[0], 1e-9), **raw, unit="MiB")


def rows(setup: Setup) -> Iterator[Row]:
    sizes: Sizes = setup.size((64, 256, 32), (16, 8, 2))
    shallow, deep = setup.size((8, 64), (1, 2))
    kinds = ("residual",)
    if setup.device == "cuda":
        for kind in kinds:
            yield from gpu_rows(setup, kind, (shallow, deep), sizes)
        return
    grown = in_fresh_process(memories, kinds, (shallow, deep), sizes)
    for kind in kinds:
        for is_plain in (False, True):
            few, many = (grown[kind, is_plain, depth] for depth in (shallow, deep))
            for name in few:
                label = "ordinary backward" if is_plain else "reversible"
                yield single(
                    f"{name} bytes of {deep} blocks / {shallow}, {kind}, {label}", many[name] / few[name],
                    ours=many[name], other=few[name], unit="MiB",
                )  # fmt: skip
        stack, x = build(shallow, sizes), inputs(sizes)
        sides = {
            name: partial(both_ways, stack, x, is_plain)
            for name, is_plain in (("reversible", False), ("plain", True))
        }
        times = setup.interleave(sides, 3)
        yield ratio_row(
            f"time of a pass over plain, {shallow} blocks, {kind}", times, "reversible", "plain"
        )


BENCHMARK = Benchmark(
    "memory of reversible stacks of 64 blocks over 8, and the time of a pass over an ordinary one",
    "<= 1.25", 3, rows, ("cpu", "cuda"),
    goals=(Goal("peak of *, reversible", "<= 1.25"), Goal("[!p]* bytes of *, reversible", "<= 1.25")),
)  # fmt: skip
