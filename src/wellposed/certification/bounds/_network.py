"""Linear maps and activations in sequence, as the proofs with multipliers read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from wellposed.certification.bounds._rounding import MORE_TERMS, UNDERFLOW, UNIT
from wellposed.errors import ConfigError, NotLipschitzError
from wellposed.torch_modes import in_float64, on_the_cpu

_LARGEST = 1e60
"""Sums of absolute weights above it, or below its inverse, have products of norms alone."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """A linear map ``x -> W x`` of each token."""

    weight: Tensor
    """``(out, in)``, in any floating dtype; the bound is of the stored values."""
    norm: float = math.inf
    """An upper bound of its largest singular value, if one is known."""
    source: Callable[[], Tensor] | None = None
    """Reads the weight again, with its gradient."""

    def live(self) -> Matrix:
        """Return the map with the gradient of its weight."""
        return self if self.source is None else replace(self, weight=self.source())


@dataclass(frozen=True, eq=False)
class Slopes:
    """A nonlinearity of each entry, every slope of which lies between ``low`` and ``high``."""

    low: float | Tensor
    """One number, or one an entry."""
    high: float | Tensor

    def __post_init__(self) -> None:
        low, high = map(in_float64, (self.low, self.high))
        if not bool((low.isfinite() & high.isfinite() & (low <= high)).all()):
            raise ConfigError(
                f"slopes: expected finite numbers low <= high, received low={self.low},"
                f" high={self.high}; without known slopes use the product of norms"
            )


@dataclass(frozen=True)
class SortedPairs:
    """MaxMin: entry i and its partner i + D/2 become the larger and the smaller of the two."""


Link: TypeAlias = Matrix | Slopes | SortedPairs


@dataclass(frozen=True, eq=False)
class Network:
    """``x -> W_n phi_(n-1)(... phi_1(W_1 x))``, up to biases, and what rounding may add to its bound.

    The slopes of entry j of phi_i lie in ``[mid_j - half_j, mid_j + half_j]``.
    """

    weights: tuple[Tensor, ...]
    """Float64 ``(d_i, d_(i-1))``."""
    slopes: tuple[tuple[Tensor, Tensor], ...]
    """``mid`` and ``half``, each ``(d_i,)``."""
    excess: float
    """By how much a bound of this network must grow to be one of the links."""

    @property
    def is_usual(self) -> bool:
        """Whether no weight is empty and all are of sizes whose products are ordinary numbers."""
        are_usual = (weight.numel() and _has_usual_size(weight) for weight in self.weights)
        return self.excess < _LARGEST and all(are_usual)

    def units_in_use(self) -> list[Tensor]:
        """Return by hidden layer which units are not constant, and reach the output; all of them if
        a layer has none."""
        used = [(mid != 0) | (half != 0) for mid, half in self.slopes]
        # A pass may leave units idle of the layers before, so there are as many as layers.
        for _ in used:
            for index, mask in enumerate(used):
                reads = self.weights[index][:, used[index - 1]] if index else self.weights[0]
                read_by = self.weights[index + 1]
                read_by = read_by[used[index + 1]] if index + 1 < len(used) else read_by
                mask &= (reads != 0).any(1) & (read_by != 0).any(0)
        return used if all(mask.any() for mask in used) else [torch.ones_like(m) for m in used]

    def only(self, units: Sequence[Tensor]) -> Network:
        """Return the same map of some hidden units, if the others change nothing."""
        if all(unit.all() for unit in units):
            return self  # large weights are not copied
        rows = [*units, slice(None)]
        columns = [slice(None), *units]
        remaining = zip(self.weights, rows, columns, strict=True)
        weights = tuple(weight[row][:, column] for weight, row, column in remaining)
        slopes = zip(self.slopes, units, strict=True)
        return replace(
            self,
            weights=weights,
            slopes=tuple((mid[unit], half[unit]) for (mid, half), unit in slopes),
        )


@on_the_cpu
def network_of(links: Sequence[Link]) -> Network | None:
    """Return the network of some links, or None if it has fewer than two linear maps.

    Sorted pairs are an absolute value of half the difference, next to half the sum. Consecutive
    linear maps are multiplied. Rounding of both is counted in `Network.excess`. The weights of the
    network have the gradient of those of the links.

    Raises:
        NotLipschitzError: a matrix holds NaN or infinity.
    """
    matrices = [link.weight for link in links if isinstance(link, Matrix)]
    for index, weight in enumerate(matrices):
        wrong = int((~weight.isfinite()).sum())
        if wrong:
            raise NotLipschitzError(
                f"network_of: matrix {index} of {len(matrices)}, {tuple(weight.shape)}, holds {wrong}"
                " entries that are NaN or infinite, so the map has no bound; pass finite weights"
            )

    if len(matrices) < 2:
        return None
    builder = _Builder()
    try:
        for link in links:
            if isinstance(link, Matrix):
                builder.add_matrix(link)
            else:
                builder.add_activation(link, links)
        return builder.network()
    except _NoNetwork:
        return None


class _NoNetwork(Exception):  # noqa: N818 (an answer, no fault)
    """Raised for sorted pairs next to another activation or at an end, and for extreme weights."""


class _Builder:
    """Collects the links of a network."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []
        self.slopes: list[tuple[Tensor, Tensor]] = []
        self.errors: list[float] = []
        self.after_pairs = False

    def add_matrix(self, link: Matrix) -> None:
        """Add a linear map, or multiply the last one by it."""
        weight = link.weight.to("cpu", torch.float64)
        if not _has_usual_size(weight):
            raise _NoNetwork

        error = 0.0
        if self.after_pairs:
            weight, error = _unpaired(weight)
            self.after_pairs = False

        if len(self.weights) > len(self.slopes):
            before = self.weights.pop()
            before_error = self.errors.pop()
            error = _product_error(weight, before, error, before_error)
            weight = weight @ before
        self.weights.append(weight)
        self.errors.append(error)

    def add_activation(self, link: Slopes | SortedPairs, links: Sequence[Link]) -> None:
        """Add an activation: after a linear map, after another activation, or at the start."""
        follows_another = len(self.weights) == len(self.slopes)
        if follows_another and (self.after_pairs or isinstance(link, SortedPairs)):
            raise _NoNetwork
        if follows_another and self.weights:
            self.slopes[-1] = _after(self.slopes[-1], link)
            return
        if follows_another:
            self._add_identity(_first_width(links))
        if isinstance(link, SortedPairs):
            self._add_pairs()
        else:
            self.slopes.append(_ends(link, len(self.weights[-1])))

    def network(self) -> Network:
        """Return the network; an activation at the end is followed by the identity."""
        if len(self.weights) == len(self.slopes):
            if self.after_pairs:
                raise _NoNetwork
            self._add_identity(len(self.weights[-1]))
        excess = _excess(self.weights, self.slopes, self.errors)
        return Network(tuple(self.weights), tuple(self.slopes), excess)

    def _add_identity(self, width: int) -> None:
        self.weights.append(torch.eye(width, dtype=torch.float64))
        self.errors.append(0.0)

    def _add_pairs(self) -> None:
        """Add the slopes of half the sums, which are 1, and of half the differences."""
        self.weights[-1], added = _paired(self.weights[-1])
        self.errors[-1] += added
        half = len(self.weights[-1]) // 2
        one = torch.ones(half, dtype=torch.float64)
        self.slopes.append((torch.cat((one, 0 * one)), torch.cat((0 * one, one))))
        self.after_pairs = True


def _has_usual_size(weight: Tensor) -> bool:
    size = float(weight.detach().abs().sum())
    return size == 0 or 1 / _LARGEST < size < _LARGEST


def _first_width(links: Sequence[Link]) -> int:
    first = next(link for link in links if isinstance(link, Matrix))
    return first.weight.shape[1]


def _ends(link: Slopes, width: int) -> tuple[Tensor, Tensor]:
    """Return the middle and half the length of an interval that contains all slopes."""
    low, high = (in_float64(end).expand(width) for end in (link.low, link.high))
    mid = (low + high) / 2
    return mid, torch.maximum(high - mid, mid - low) * (1 + 4 * UNIT)


def _after(first: tuple[Tensor, Tensor], second: Slopes | SortedPairs) -> tuple[Tensor, Tensor]:
    """Return the slopes of two activations in sequence: products of the ends of both intervals."""
    assert isinstance(second, Slopes)
    mid, half = first
    other_mid, other_half = _ends(second, len(mid))
    ends = [
        (mid + sign * half) * (other_mid + other * other_half)
        for sign in (-1, 1)
        for other in (-1, 1)
    ]
    stacked = torch.stack(ends)
    low = stacked.amin(0)
    high = stacked.amax(0)
    middle = (low + high) / 2
    size = stacked.abs().amax(0)

    return middle, torch.maximum(high - middle, middle - low) + 16 * UNIT * size


def _paired(weight: Tensor) -> tuple[Tensor, float]:
    """Return half the sums and half the differences of the two halves of the rows."""
    first, second = weight.chunk(2)
    made = torch.cat((first + second, first - second)) / 2
    return made, 2 * UNIT * _size(made)


def _unpaired(weight: Tensor) -> tuple[Tensor, float]:
    """Return the sums and the differences of the two halves of the columns."""
    first, second = weight.chunk(2, dim=1)
    made = torch.cat((first + second, first - second), dim=1)
    return made, 2 * UNIT * _size(made)


def _size(matrix: Tensor) -> float:
    return float(matrix.detach().norm())


def _product_error(second: Tensor, first: Tensor, error: float, before: float) -> float:
    """Bound the error of ``second @ first`` if each has an error of its own (in the 2-norm)."""
    sizes = _size(second), _size(first)
    terms = second.shape[1] + MORE_TERMS
    return 1.01 * (
        terms * UNIT * sizes[0] * sizes[1]
        + error * (sizes[1] + before)
        + before * (sizes[0] + error)
    )


def _excess(
    weights: Sequence[Tensor], slopes: Sequence[tuple[Tensor, Tensor]], errors: Sequence[float]
) -> float:
    """Bound the map by which rounding of the weights changes the network (a telescoping sum)."""
    if not any(errors):
        return 0.0
    sizes = [_size(weight) + error for weight, error in zip(weights, errors, strict=True)]
    steep = math.prod(float((mid.abs() + half).max()) for mid, half in slopes)
    others = (
        error * math.prod(size for other, size in enumerate(sizes) if other != index)
        for index, error in enumerate(errors)
    )
    return 1.01 * steep * sum(others) + UNDERFLOW
