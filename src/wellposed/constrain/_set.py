"""`MatrixSet`: the interface of a set of matrices, and the registry of sets."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from wellposed.constrain._options import LOGITS, SetOptions, check_length
from wellposed.constrain._weight_slice import WeightSlice
from wellposed.errors import ConfigError
from wellposed.linalg import Retraction, Workspace, read, wide, write_matrices_
from wellposed.registry import Registry

# Reachable max |W^T W / g^2 - I| as stored. Rounding entries by a relative u moves entries of W^T W by
# at most 2 u + u^2 (Cauchy and Schwarz). A test reaches it: 7.83e-3 in bfloat16, u = 2^-8; 9.8e-4 in
# float16, u = 2^-11. The float32 copy adds its own 1e-5.
TOLERANCES = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class NearestMatrices:
    """Result of `MatrixSet.nearest_stack`: an entry for each matrix of the stack."""

    sizes: list[float]
    """The sizes of the sets, fitted if they were NaN."""
    before: list[float]
    """The errors of the matrices."""
    matrices: Tensor
    """The nearest in the set, in float64 or the stored dtype."""
    after: list[float]
    """The errors of `matrices` in the stored dtype."""


@dataclass(frozen=True)
class ZeroColumns:
    """Count of the columns of a weight that are zero, a padding vector left out."""

    count: int
    first: int
    """The first of them."""
    columns: int
    """All columns."""


@dataclass(frozen=True)
class MatrixSet(ABC):
    """A set of matrices: how to measure, project, prepare a step and retract after it.

    Matrices of one shape with equal sets are worked on together. To add a set, subclass this and
    register it in `SETS`; `error` and `nearest` are enough. `for_weight` sets the tolerance, and
    `nearest_stack` may project a stack in one product.
    """

    size: float
    """The common singular value, the bound or the length."""
    tolerance: float = 0.0
    """The error up to which a matrix is in the set."""
    is_steered: bool = False
    """Whether `state` changes the gradient, and the coordinates of a square one's moments."""
    decays: ClassVar[bool] = False
    """Whether weight decay keeps a matrix in the set; if not, steps leave it out."""
    keeps_master: ClassVar[bool] = False
    """Whether half weights are kept in float32; else steps below their spacing are lost."""
    stacked: ClassVar[int] = 2**14
    """Entries up to which stacking is faster on a CPU."""
    is_oriented: ClassVar[bool] = True
    """Whether a matrix and its transpose are in different sets, so not in one batch."""
    options: ClassVar[frozenset[str]] = frozenset({"bound"})
    """Options of `constrain_` that the set reads; others are refused."""
    default_where: ClassVar[str | None] = None
    """The choice of weights if ``where`` is left out; None if it has to be given."""

    # Choosing the set of a weight.

    @classmethod
    def check_bound(cls, bound: float | str | None) -> None:
        """Raise `ConfigError` for a bound that no size of the set has."""
        check_length(bound)

    @classmethod
    def reads_orientation(cls, options: SetOptions) -> bool:
        """Whether weights must be read as (out, in), as their layers apply them."""
        del options
        return cls.is_oriented

    @classmethod
    def refusal(
        cls, weight_slice: WeightSlice, options: SetOptions, *, is_table: bool
    ) -> str | None:
        """Return why no weight of this shape is in the set, or None."""
        del weight_slice, options, is_table

    @classmethod
    def refusal_of_zeros(cls, zeros: ZeroColumns, options: SetOptions) -> str | None:
        """Return why a weight with these zero columns has no nearest matrix in the set, or None."""
        del zeros, options

    @classmethod
    def chosen(cls, weight_slice: WeightSlice, options: SetOptions, *, is_table: bool) -> MatrixSet:
        """Return the set that the options give one weight; it may be of another class."""
        del is_table
        size = 1.0 if options.bound is None else options.bound
        assert not isinstance(size, str)  # `check_bound` raised for it
        return cls.for_weight(size, weight_slice)

    @classmethod
    def for_weight(cls, size: float, weight_slice: WeightSlice) -> Self:
        """Return the set of this size, with the tolerance of the dtype of one weight."""
        assert weight_slice.parameter is not None
        return cls(size, TOLERANCES[weight_slice.parameter.dtype])

    # Measuring and projecting matrices.

    @abstractmethod
    def error(self, matrix: Tensor) -> float:
        """Measure how far a matrix is from the set."""

    def spectral_error(self, matrix: Tensor) -> float:
        """Measure by singular values how far a matrix is from the set; refused by most sets."""
        del matrix
        raise ConfigError(
            f"error(norm='spectral') is by singular values, and the set {type(self).__name__} says"
            " nothing of them; leave norm= out, or look with wellposed.measure(model)"
        )

    @abstractmethod
    def nearest(self, matrix: Tensor) -> Tensor:
        """Return the nearest matrix, in float64 or the stored dtype; of a stack, each one's.

        Raise `ConvergenceError` if it is not finite.
        """

    def nearest_stack(self, stack: Tensor) -> NearestMatrices:
        """Return the nearest matrices, and errors before and after; those in the set stay."""
        before = [self.error(matrix) for matrix in stack]
        inside = wide(stack).clone()
        for index, error in enumerate(before):
            if not error <= self.tolerance:
                inside[index] = self.nearest(stack[index])
        after = [self.error(matrix) for matrix in inside.to(stack.dtype)]
        return NearestMatrices([self.size] * len(stack), before, inside, after)

    # Steps.

    def memory(self) -> Any:
        """Return fresh state of one matrix, if the set keeps any from one step to the next."""
        return None

    def state(self, matrices: Sequence[Any], work: Workspace) -> None:
        """Before a step: put the gradients into the coordinates of the step."""

    def retract(self, matrices: Sequence[Any], work: Workspace) -> Retraction:
        """After a step: put matrices of one `batch_key` back into the set, by default by `nearest`.

        Nothing is written if a step is not finite.
        """
        values = [matrix.value for matrix in matrices]
        for matrix in matrices:
            if matrix.is_displaced and matrix.before is not None:
                matrix.value.add_(matrix.before)
                matrix.is_displaced = False
        stack = read(values[0]) if len(values) == 1 else torch.stack(values)
        inside = self.nearest_late(stack, work)
        work.write(lambda: write_matrices_(values, inside))
        return Retraction("nearest")

    def nearest_late(self, matrix: Tensor, work: Workspace) -> Tensor:
        """Do as `nearest`, but checks may wait for the end of the step."""
        del work
        return self.nearest(matrix)


SETS = Registry[type[MatrixSet]]("set", entry_points="wellposed.sets", taken=(LOGITS,))
"""Sets by the name that ``constrain_(to=)`` gives."""
