"""One held matrix: where it lives in the model, what the handle asks of it whatever its set, and batches of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wellposed.constrain._report import ConstrainedWeight
from wellposed.constrain._select import Candidate
from wellposed.linalg import Retraction, Workspace
from wellposed.linalg.sharded import is_sharded, read, write_

# Optimizers that scale their step by the size of the weight: the weight may not be displaced under
# them.
_READS_WEIGHT_SIZE = frozenset({"adafactor", "lamb", "lars", "nvlamb", "fusedlamb"})
# Entries up to which a CPU saves more by fewer calls than it loses by stacking.
_SMALL = 2**14
# Entries of one stacked operand. A handful of copies of it stays in the cache of a CPU, and below
# about 400 MB in float32 on an accelerator.
_CPU_ENTRIES, _ENTRIES = 2**18, 2**24


class Weight:
    """A matrix that is put back into a set after each step; a set is a subclass.

    The methods that are empty here are those that a set which is projected to has no need of.
    """

    decays = False
    """Whether weight decay keeps the matrix in the set."""
    stored_dtype: torch.dtype | None = None
    """The dtype that copies were made for; None where any dtype will do."""
    is_steered = False
    """Whether the gradient is put into coordinates of the set before the optimizer steps."""
    tolerance = 0.0
    """The error up to which a matrix counts as one of the set already."""

    def __init__(self, place: Candidate, optimizer: Optimizer, size: float) -> None:
        assert place.parameter is not None  # what cannot be held was refused before
        self.place = place
        self.path = place.label
        self.parameter: nn.Parameter = place.parameter
        self.rows = place.rows
        self.optimizer = optimizer
        self.gain = size

    @property
    def value(self) -> Tensor:
        """The matrix, without its graph: a view of the parameter."""
        return self.place.seen(self.parameter.detach())

    @property
    def gradient(self) -> Tensor | None:
        """The part of the gradient that belongs to the matrix, a view of it."""
        gradient = self.parameter.grad
        return None if gradient is None else self.place.seen(gradient)

    @property
    def batch_key(self) -> tuple[object, ...] | None:
        """What those share that one batched product can serve; None where the matrix is worked on
        by itself."""
        if is_sharded(self.parameter):
            return None
        return tuple(self.value.shape), self.parameter.dtype, self.parameter.device, self.gain

    def error_of(self, matrix: Tensor) -> float:
        """Measure how far a matrix is from the set."""
        raise NotImplementedError

    def error(self) -> float:
        """Measure how far the matrix, as stored, is from the set."""
        return self.error_of(read(self.value))

    def nearest(self, whole: Tensor) -> Tensor:
        """Return the matrix of the set nearest to ``whole``, in float64 or as it is to be stored."""
        raise NotImplementedError

    def start(self, *, dry_run: bool) -> ConstrainedWeight:
        """Move the matrix into the set, unless it is there, and tell how far."""
        whole = read(self.value)
        before = self.error_of(whole)
        is_moved = not before <= self.tolerance
        inside = self.nearest(whole) if is_moved else whole
        report = ConstrainedWeight(
            path=self.path,
            shape=(whole.shape[0], whole.shape[1]),
            gain=self.gain,
            moved_frobenius=_moved(whole, inside, "fro") if is_moved else 0.0,
            moved_spectral=_moved(whole, inside, 2) if is_moved else 0.0,
            error_before=before,
            error_after=self.error_of(inside.to(whole.dtype)),
            also=self.place.also,
        )
        if not dry_run:
            self.begin_(inside, is_moved=is_moved)
        return report

    def begin_(self, inside: Tensor, *, is_moved: bool) -> None:
        """Store the matrix to start from."""
        if is_moved:
            write_(self.value, inside)

    @classmethod
    def retract_(cls, weights: Sequence[Any], work: Workspace, /) -> Retraction:
        """Put matrices of one `batch_key`, or one alone, back into the set; nothing is written when
        a step is not finite."""
        raise NotImplementedError

    @classmethod
    def project_gradients_(cls, weights: Sequence[Any], work: Workspace, /) -> None:
        """Put the gradients of steered weights of one `batch_key`, or of one alone, into the
        coordinates the optimizer is to step in."""

    def remember_(self, *, decayed: bool) -> None:
        """Keep what the retraction needs."""

    def restore_(self) -> None:
        """Undo `remember_` when the step it prepared never came to its end."""

    def claim_state(self) -> bool:
        """Return whether moments in other coordinates had to be restarted."""
        return False

    def mark_state(self, drift: float) -> None:
        """Note beside the moments what a resumed run needs."""

    def release_state(self) -> None:
        """Restart moments that only a constrained step understands."""


def batches(weights: Iterable[Weight], *, batched: bool | None) -> list[list[Weight]]:
    """Group weights that one batched product can serve; ``None`` does so where it is faster than a
    loop."""
    groups: dict[object, list[Weight]] = {}
    for weight in weights:
        on_cpu, entries = weight.parameter.device.type == "cpu", weight.value.numel()
        wanted = (not on_cpu or entries <= _SMALL) if batched is None else batched
        key = weight.batch_key if wanted else None
        groups.setdefault(id(weight) if key is None else (type(weight), key), []).append(weight)
    chunks: list[list[Weight]] = []
    for group in groups.values():
        room = _CPU_ENTRIES if group[0].parameter.device.type == "cpu" else _ENTRIES
        size = max(1, room // group[0].value.numel())
        chunks.extend(group[start : start + size] for start in range(0, len(group), size))
    return chunks


def write_back_(weights: Sequence[Weight], values: Tensor) -> None:
    """Give each weight its matrix of a stack."""
    if len(weights) == 1:
        write_(weights[0].value, values[0])
    else:
        torch._foreach_copy_([weight.value for weight in weights], list(values.unbind()))


def reads_weight_size(optimizer: Optimizer) -> bool:
    """Whether the optimizer's step depends on the norm of the weight."""
    return type(optimizer).__name__.lower() in _READS_WEIGHT_SIZE


def _moved(first: Tensor, second: Tensor, order: Literal["fro", 2]) -> float:
    wide = torch.float32 if first.device.type == "mps" else torch.float64
    whole = torch.linalg.matrix_norm(first.to(wide), order)
    part = torch.linalg.matrix_norm(second.to(wide) - first.to(wide), order)
    return float(part / whole.clamp_min(torch.finfo(wide).tiny))
