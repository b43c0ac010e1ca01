"""Plain and sharded tensors read and written alike, precision of products, reused memory."""

from __future__ import annotations

import contextlib
import math
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_stacks(
    items: Iterable[Item], key: Callable[[Item], Hashable], size: Callable[[Item], int]
) -> Iterator[list[Item]]:
    """Yield items of equal key together, at most ``size`` of the first at a time."""
    groups: dict[Hashable, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    for group in groups.values():
        step = max(1, size(group[0]))
        yield from (group[start : start + step] for start in range(0, len(group), step))


def mapped(
    function: Callable[[Item], Result], items: Sequence[Item], *, on_threads: bool
) -> list[Result]:
    """Map a function; on several items at a time, by one thread each, if there are threads."""
    threads = torch.get_num_threads()
    if not on_threads or min(threads, len(items)) < 2:
        return [*map(function, items)]
    try:
        with ThreadPoolExecutor(threads, "", torch.set_num_threads, (1,)) as pool:
            return [*pool.map(function, items)]
    finally:
        torch.set_num_threads(threads)  # a number set in a thread holds for later threads


@contextlib.contextmanager
def full_precision(*device_types: str) -> Iterator[None]:
    """Run float32 products in float32: no TF32, bfloat16 or autocast. Default device: CPU.

    Covers ``set_float32_matmul_precision``, ``fp32_precision`` (also inherited), ``allow_tf32`` and
    autocast. Each is restored on leaving, by an exception too. Per process, not per thread.
    """
    mkldnn: Any = torch.backends.mkldnn
    backends = (torch.backends.cuda.matmul, mkldnn.matmul)
    reduced = [(backend, backend.fp32_precision) for backend in backends]
    reduced = [(backend, value) for backend, value in reduced if value not in ("none", "ieee")]

    def restore() -> None:
        for backend, value in reduced:
            # An inherited setting must still follow the one it came from.
            backend.fp32_precision = "none"
            if backend.fp32_precision != value:
                backend.fp32_precision = value

    try:
        for backend, _ in reduced:
            backend.fp32_precision = "ieee"
        with contextlib.ExitStack() as stack:
            for device_type in device_types or ("cpu",):
                has_autocast = torch.amp.is_autocast_available(device_type)
                kind = device_type if has_autocast else "cpu"
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            yield
    finally:
        try:
            restore()
        finally:  # of an interrupt in between
            restore()


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Return float64 for float64 tensors and float32 for every other floating dtype."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def tall(matrix: Tensor) -> Tensor:
    """Return the matrix, transposed (a view) when it has more columns than rows."""
    return matrix if matrix.shape[-2] >= matrix.shape[-1] else matrix.mT


def is_sharded(tensor: Tensor) -> TypeGuard[Any]:
    """Whether the tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def gathered(tensor: Tensor) -> Tensor:
    """Return the whole tensor: itself, or the shards gathered (one all-gather, on every rank)."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def read(tensor: Tensor) -> Tensor:
    """Return the whole tensor, detached."""
    return gathered(tensor.detach())


def write_(target: Tensor, value: Tensor) -> None:
    """Copy a whole matrix into ``target``; each rank fills its shard, no communication."""
    plain = target.detach()
    plain.copy_(cut_like(plain, value.to(plain.dtype)))


def cut_like(target: Tensor, value: Tensor) -> Tensor:
    """Return ``value`` cut as ``target`` is, without communication; whole if that is."""
    if not is_sharded(target):
        return value
    from torch.distributed.tensor import DTensor, Replicate

    mesh = target.device_mesh
    replicated = DTensor.from_local(
        value.to(target.device), mesh, [Replicate()] * mesh.ndim, run_check=False
    )
    return replicated.redistribute(placements=target.placements)


def mesh_of(weights: Iterable[Tensor]) -> Any:
    """Return the device mesh of the first weight in shards; None if there is none."""
    return next((weight.device_mesh for weight in weights if is_sharded(weight)), None)


def mean_over_ranks(value: Tensor, mesh: Any) -> Tensor:
    """Return ``value``, the same on every rank, with the gradient of the mean loss.

    FSDP2 averages the gradients of its ranks, but not of what reads shards (of ``mesh``, or None)
    directly. Without this each shard would follow the loss of its own rank. Cost: one scalar
    all-reduce in the backward pass.
    """
    return value if mesh is None else _MeanOverRanks.apply(value, mesh)  # type: ignore[return-value]


def sum_over_ranks(value: Tensor, groups: Sequence[Any], shards: Sequence[Tensor]) -> Tensor:
    """Return the sum of the values of all ranks; a rank's own value gets the whole gradient.

    ``shards`` get a gradient of zeros, so that a rank without a value takes part in the backward
    pass.
    """
    return _SumOverRanks.apply(value, groups, *shards)  # type: ignore[return-value]


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, groups: Sequence[Any], *shards: Tensor) -> Tensor:
        ctx.save_for_backward(*shards)
        total = value.clone()
        for group in groups:
            torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad, None, *map(torch.zeros_like, ctx.saved_tensors)


class _MeanOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, mesh: Any) -> Tensor:
        ctx.mesh = mesh
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        total = grad.clone()
        for dimension in range(ctx.mesh.ndim):
            torch.distributed.all_reduce(total, group=ctx.mesh.get_group(dimension))
        return total / ctx.mesh.size(), None


_Margins = tuple[float, float, float]


class Workspace:
    """Buffers allocated once for each shape, and numbers that are read or guessed.

    On an accelerator a read waits for all work before it. So a step may take 1.5 times the numbers
    of the step before as upper bounds, which are as sound. One read at the end checks them, and
    what relied on one that was too low is done again.

    >>> import torch
    >>> work = Workspace()
    >>> work("gram", (2, 2), torch.zeros(1)) is work("gram", (2, 2), torch.zeros(1))
    True
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, tuple[int, ...], torch.dtype, torch.device], Tensor] = {}
        self._bounds: dict[Hashable, list[float]] = {}
        self._task: tuple[Hashable, ...] = ()
        self._count: Counter[str] = Counter()
        self._results: list[tuple[tuple[Hashable, ...], Callable[[], None]]] = []
        self._wrong: set[Hashable] = set()
        self._unread: list[
            tuple[tuple[Hashable, ...], Hashable, Tensor, Sequence[float], _Margins]
        ] = []
        self.is_ahead = False
        """Whether numbers are guessed, and results wait for `finish`."""

    def __call__(
        self, name: str, shape: tuple[int, ...] | torch.Size, like: Tensor, *, padded: bool = False
    ) -> Tensor:
        """Return the buffer ``name`` of this shape, with dtype and device of ``like``, not cleared.

        Padded rows lie 16 entries further apart, which halves a transposed pass at n = 512 on a
        CPU.
        """
        key = (name, tuple(shape), like.dtype, like.device)
        if key not in self._buffers:
            width = shape[-1] + (16 if padded else 0)
            buffer = torch.empty((*shape[:-1], width), dtype=like.dtype, device=like.device)
            self._buffers[key] = buffer[..., : shape[-1]]
        return self._buffers[key]

    @contextlib.contextmanager
    def task(self, task: tuple[Hashable, ...], *, is_ahead: bool) -> Iterator[None]:
        """Remember the numbers of a task (members of a batch); guess them if ``is_ahead``."""
        self._task = task
        self.is_ahead = is_ahead
        self._count = Counter()
        try:
            yield
        finally:
            self._task = ()
            self.is_ahead = False

    @property
    def is_reading(self) -> bool:
        """Whether there is no task, so that all numbers are read: on a CPU that is free."""
        return not self._task

    def bounds(
        self,
        name: str,
        values: Tensor,
        *,
        slack: float = 1.5,
        minimum: float = 0.0,
        decay: float = 0.8,
        below: float = math.inf,
        guess: Sequence[float] | None = None,
    ) -> Sequence[float]:
        """Return upper bounds on the entries of ``values``: themselves if they are read.

        Args:
            name: Name of these numbers within the task; the same name again means other numbers.
            values: On any device, flattened.
            slack: Factor from these numbers to the guess of the next step.
            minimum: Guesses are at least this.
            decay: Guesses are at least this fraction of the last guess.
            below: Guesses that are not below it are replaced by a read.
            guess: A guess that does not come from the step before.
        """
        numbers = values.reshape(-1)
        key = (self._task, name, self._count[name], len(numbers))
        self._count[name] += 1
        bounds = self._bounds.get(key) if guess is None else guess
        if self.is_ahead and bounds is not None and all(number < below for number in bounds):
            self._unread.append((self._task, key, numbers, bounds, (slack, minimum, decay)))
            return bounds
        read = numbers.tolist()
        if self._task:
            self._remember(key, read, (slack, minimum, decay))
        return read

    def guess(self, name: str, count: int) -> Sequence[float] | None:
        """Return what `bounds` will guess for ``count`` numbers; None if it will read them."""
        bounds = self._bounds.get((self._task, name, self._count[name], count))
        return bounds if self.is_ahead else None

    def write(self, result: Callable[[], None]) -> None:
        """Run ``result``, which writes a result: now, or in `finish` if the guesses were right."""
        if self.is_ahead:
            self._results.append((self._task, result))
        else:
            result()

    def finish(self) -> set[Hashable]:
        """Check all guesses by one read a device, write right results, return other members."""
        unread = self._unread
        self._unread = []
        results = self._results
        self._results = []
        numbers: dict[torch.device, list[float]] = {}
        for device in {values.device for _, _, values, *_ in unread}:
            parts = [values for _, _, values, *_ in unread if values.device == device]
            numbers[device] = torch.cat(parts).tolist()

        for task, key, values, guess, margins in unread:
            count = len(values)
            rest = numbers[values.device]
            actual = rest[:count]
            numbers[values.device] = rest[count:]
            self._remember(key, actual, margins)
            if not all(number <= bound for number, bound in zip(actual, guess, strict=True)):
                self._wrong.update(task)

        for task, result in results:
            if self._wrong.isdisjoint(task):
                result()
        return self._wrong

    def forget(self) -> None:
        """Drop unfinished work: another step begins."""
        self._unread = []
        self._results = []
        self._wrong = set()

    def _remember(self, key: Hashable, numbers: list[float], margins: _Margins) -> None:
        slack, minimum, decay = margins
        # Some numbers jump from step to step: the largest recent one decides.
        old = self._bounds.pop(key, [0.0] * len(numbers))
        if all(map(math.isfinite, numbers)):
            pairs = zip(numbers, old, strict=True)
            self._bounds[key] = [max(slack * now, decay * before, minimum) for now, before in pairs]


def joined(
    tensors: Sequence[Tensor],
    dtype: torch.dtype,
    name: str,
    work: Workspace,
    *,
    fresh: bool = False,
) -> Tensor:
    """Return one matrix, its own memory if ``dtype`` fits and not ``fresh``, or a stack; tall."""
    if len(tensors) == 1:
        return tall(read(tensors[0]).to(dtype, copy=fresh))
    matrices = [tall(tensor.detach()) for tensor in tensors]
    if fresh:
        return torch.stack(matrices)
    return torch.stack(matrices, out=work(name, (len(matrices), *matrices[0].shape), matrices[0]))


def write_matrices_(targets: Sequence[Tensor], values: Tensor) -> None:
    """Copy ``values`` into one target, or a stack's into several, transposing if needed."""
    stack = values.unbind() if len(targets) > 1 else [values]
    pairs = zip(stack, targets, strict=True)
    parts = [part if part.shape == target.shape else part.mT for part, target in pairs]
    if len(targets) > 1:
        torch._foreach_copy_(list(targets), parts)
    elif is_sharded(targets[0]) or targets[0].data_ptr() != parts[0].data_ptr():
        write_(targets[0], parts[0])
