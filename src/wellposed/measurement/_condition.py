"""The condition of all weights of a model; weights of one shape are stacked."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from wellposed.errors import ConfigError, ConvergenceError, listed
from wellposed.linalg import (
    Cut,
    full_precision,
    in_stacks,
    is_sharded,
    mapped,
    read,
    rounded_sums,
    singular_values,
    symmetric_product,
)
from wellposed.measurement._shards import owned_ones, shared
from wellposed.measurement._stacks import ENTRIES, norms, stacked
from wellposed.roles import RoleWeight
from wellposed.text_table import format_number

COLD = 48
WARM = 12
"""Lanczos steps from a random-like vector (1e-3 on flat spectra), and from the last vector."""
INDEPENDENT = 1e-2
"""Smaller eigenvalues of the products of unit vectors are rounding: the vectors are dependent."""
NEW = 0.1
"""Share of the random-like vector added to the last one, so that a new largest value shows."""
QUICK = ("scale_free_orthogonality_error", "orthogonality_error", "sigma_max", "stable_rank")
EXACT = (*QUICK, "sigma_min", "condition_number")


# Layers that compute a weight do so one at a time.
_READING = threading.Lock()


class _Stack(NamedTuple):
    """Weights of one Gram size, their Lanczos vectors, and the numbers to transfer:

    scale (Frobenius norm or the power of two above; finite if the weight is); of the scaled Gram
    matrix G the mean c of the diagonal, ``|G - c I|_F``, the smallest and largest entry off the
    diagonal; eigenvalues, or the products of the vectors with each other and with ``G - c I``.
    """

    places: Sequence[int]
    vectors: Tensor | None
    numbers: tuple[Tensor, ...]


class StackedCondition:
    """Orthogonality errors and singular values of many weights; status as in `measure`."""

    def __init__(self, weights: Sequence[RoleWeight], *, spectra: bool = False) -> None:
        self._views = [weight.view for weight in weights]
        self._spectra = spectra
        self._stacks: list[_Stack] = []
        self._starts: dict[tuple[int, ...], Tensor] = {}
        self._cuts: dict[int, Cut] = {}
        self._gathered: dict[int, Tensor] = {}
        self._on_threads = False

    @property
    def groups(self) -> int:
        """The number of process groups that share a measured step, by one all-reduce each."""
        return len({cut.groups for cut in self._cuts.values()})

    @torch.no_grad()
    def measured(self) -> list[Tensor]:
        """Compute the tensors that `rows` takes, without waiting for the device."""
        stored = {view.parameter_name: view.parameter for view in self._views}
        quantised = [f"{n}: {p.dtype}" for n, p in stored.items() if not p.is_floating_point()]
        if quantised:
            problem = "these weights are quantised; measure the model before quantisation"
            raise ConfigError(f"{problem}:\n{listed(quantised)}")

        sides = [sorted(view.shape) for view in self._views]
        kinds = [(view.parameter.dtype, view.parameter.device) for view in self._views]
        self._cuts, self._gathered = owned_ones(self._views)
        others = self._cuts.keys() - self._gathered
        mine = [i for i, view in enumerate(self._views) if id(view.parameter) not in others]
        # Eigenvalues of a few hundred rows gain little from several threads.
        self._on_threads = self._spectra and all(
            p.device.type == "cpu" and (id(p) in self._cuts or not is_sharded(p))
            for p in stored.values()
        )
        groups = in_stacks(
            mine,
            key=lambda i: (sides[i][0], *kinds[i]),
            size=lambda i: 1 if self._on_threads else ENTRIES // max(1, sides[i][0] ** 2),
        )
        parts = [
            [
                *in_stacks(
                    group,
                    key=lambda i: sides[i][1],
                    size=lambda i: ENTRIES // max(1, math.prod(sides[i])),
                )
            ]
            for group in groups
        ]
        with full_precision(*{device.type for _, device in kinds}):
            self._stacks = mapped(self._stack, parts, on_threads=self._on_threads)

        return [number for stack in self._stacks for number in stack.numbers]

    @torch.no_grad()
    def _stack(self, parts: Sequence[Sequence[int]]) -> _Stack:
        pairs = [self._scaled_gram([*self._wide(part)]) for part in parts]
        scales, grams = zip(*pairs, strict=True)
        places = tuple(index for part in parts for index in part)
        gram = grams[0] if len(grams) == 1 else torch.cat(grams)
        spectral: tuple[Tensor, ...] = ()
        if self._spectra:
            spectral = (torch.linalg.eigvalsh(gram.nan_to_num(0.0, 0.0, 0.0)).flip(-1),)

        diagonal = gram.diagonal(dim1=-2, dim2=-1)
        centre = diagonal.mean(-1)
        diagonal.sub_(centre[:, None])
        spread = torch.linalg.vector_norm(gram, dim=(-2, -1))
        vectors = None if self._spectra else self._vectors(places, gram)
        if vectors is not None:
            spectral = vectors @ vectors.mT, vectors @ gram @ vectors.mT

        diagonal.zero_()
        # On a CPU `aminmax` takes 20 times as long.
        low = gram.amin((1, 2))
        high = gram.amax((1, 2))
        return _Stack(places, vectors, (torch.cat(scales), centre, spread, low, high, *spectral))

    def _vectors(self, places: tuple[int, ...], gram: Tensor) -> Tensor:
        # The sine of squares looks random: it is orthogonal to no structured vector.
        start = torch.arange(gram.shape[-1], device=gram.device, dtype=gram.dtype).square().sin()
        start = (start / torch.linalg.vector_norm(start)).expand(len(places), -1)
        previous = self._starts.get(places)
        if previous is not None and previous.shape == start.shape:
            start = previous.to(start) + NEW * start
            start = start / torch.linalg.vector_norm(start, dim=-1, keepdim=True)
        return _krylov(gram, start, COLD if previous is None else WARM)

    def _wide(self, part: Sequence[int]) -> Iterator[Tensor]:
        """Yield weights, transposed if they have more rows than columns."""
        for index in part:
            matrix = self._matrix(index)
            yield matrix if len(matrix) <= matrix.shape[1] else matrix.mT

    def _matrix(self, index: int) -> Tensor:
        view = self._views[index]
        with _READING:
            gathered = self._gathered.get(id(view.parameter))
            return read(view.tensor()) if gathered is None else view.matrix_in(gathered)

    def _scaled_gram(self, matrices: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Return scales near the Frobenius norms, and the Gram matrices of the scaled rows."""
        wide = torch.promote_types(matrices[0].dtype, torch.float32)
        wide = torch.float64 if self._spectra else wide
        lengths = stacked(norms(matrices, torch.float64)).clamp_min(torch.finfo(wide).tiny)
        # A power of two rounds nothing; NaN if infinite.
        scale = (lengths / lengths.frexp().mantissa if self._spectra else lengths).to(wide)
        rows, columns = matrices[0].shape
        width = max(1, ENTRIES // (len(matrices) * rows))
        gram = None
        for start in range(0, columns, width):
            part = stacked([matrix[:, start : start + width] for matrix in matrices]).to(wide)
            copied = part if len(matrices) > 1 else None
            part = torch.div(part, scale[:, None, None], out=copied)
            product = (symmetric_product if self._spectra else torch.matmul)(part, part.mT)
            gram = product if gram is None else gram.add_(product)
        assert gram is not None
        return scale, gram

    @torch.no_grad()
    def rows(self, numbers: Sequence[Tensor]) -> list[dict[str, Any]]:
        """Return the numbers of each weight; ConvergenceError names all weights with NaN or
        infinity."""
        numbered: list[tuple[int, Sequence[Any]]] = []
        coming = iter(numbers)
        for stack in self._stacks:
            *columns, last = islice(coming, len(stack.numbers))
            if stack.vectors is not None:
                last = self._ritz(stack, stack.vectors, columns.pop(), last).tolist()
            lines = zip(*(column.tolist() for column in columns), last, strict=True)
            numbered += zip(stack.places, lines, strict=True)

        lines = mapped(lambda pair: self._line(*pair), numbered, on_threads=self._on_threads)
        line_of_index = dict(zip((index for index, _ in numbered), lines, strict=True))
        names = (*EXACT, *("singular_value_error",) * self._spectra)
        sizes = [len(names) + min(view.shape) * self._spectra for view in self._views]
        cuts = [self._cuts.get(id(view.parameter)) for view in self._views]
        device = self._views[0].parameter.device
        lines = shared(
            [line_of_index.get(i) or [0.0] * n for i, n in enumerate(sizes)], cuts, device
        )
        self._stacks = []
        self._gathered = {}
        index = names.index("sigma_max")
        stored = [view.parameter_name for view in self._views]
        is_broken = {
            name for name, line in zip(stored, lines, strict=True) if math.isnan(line[index])
        }
        broken = [name for name in dict.fromkeys(stored) if name in is_broken]
        if broken:
            problem = "these weights hold NaN or infinity and cannot be measured"
            raise ConvergenceError(f"{problem}:\n{listed(broken)}")

        rows: list[dict[str, Any]] = []
        for line in lines:
            values = [None if math.isnan(number) else number for number in line]
            rows.append(dict(zip(names, values, strict=False)))
            rows[-1]["sigma_max_status"] = "exact" if self._spectra else "empirical"
            if self._spectra:
                rows[-1]["singular_values"] = values[len(names) :]

        return rows

    def _ritz(self, stack: _Stack, vectors: Tensor, among: Tensor, inside: Tensor) -> Tensor:
        """Return the largest eigenvalue of ``G - c I`` in the span of the vectors; keep its
        vector."""
        sizes, turned = torch.linalg.eigh(among.nan_to_num(0.0, 0.0, 0.0))
        # Leave out vectors that depend on the others up to rounding.
        weights = sizes.rsqrt().where(sizes > INDEPENDENT, 0.0)
        white = turned * weights[:, None]
        values, turned = torch.linalg.eigh((white.mT @ inside @ white).nan_to_num(0.0, 0.0, 0.0))
        top = (white @ turned[..., -1:]).to(vectors)
        self._starts[tuple(stack.places)] = (vectors.mT @ top).squeeze(-1)
        return values[:, -1]

    @torch.no_grad()
    def _line(self, i: int, numbers: Sequence[Any]) -> list[float]:
        """Return the numbers of a weight in the order of `rows`, NaN for none."""
        scale, centre, spread, low, high, last = numbers
        size = min(self._views[i].shape)
        square = spread**2 + size * centre**2  # of the Frobenius norm of G
        line = [spread / math.sqrt(square) if square else math.nan, max(high, -low) * scale**2]
        if self._spectra:
            return line + self._of_squares(i, last, scale)
        top = max(0.0, centre + max(0.0, last))
        line += [scale * math.sqrt(top), size * centre / top if top else math.nan]
        return [*line, math.nan, math.nan]

    def _of_squares(self, i: int, squares: Tensor, scale: float) -> list[float]:
        """Return spectral numbers, their error and all singular values (Weyl's bounds, or an
        SVD)."""
        squares = squares.clamp_min(0.0)
        unit = torch.finfo(torch.float64).eps
        sums = rounded_sums(max(self._views[i].shape)) * squares.sum() + len(squares) * squares[0]
        values = squares.sqrt() * scale
        off = sums * unit / 2
        below = (squares - off).clamp_min(0.0).sqrt() * scale
        above = (squares + off).sqrt() * scale
        error = torch.maximum(values - below, above - values).amax()
        pairs = zip(_spectral(below, above), _spectral(above, below), strict=True)
        if any(format_number(a) != format_number(b) for a, b in pairs):
            values = singular_values(self._matrix(i))
            error = values[0] * len(values) * unit

        return [*_spectral(values, values), error.item(), *values.tolist()]


def _spectral(tops: Tensor, bottoms: Tensor) -> list[float]:
    """Return sigma_max, stable rank, sigma_min and their ratio, from upper and lower bounds."""
    largest = tops[0].item()
    smallest = bottoms[-1].item()
    rank = (bottoms / largest).square().sum().item() if largest > 0 else math.nan
    return [largest, rank, smallest, largest / smallest if smallest > 0 else math.inf]


def _krylov(gram: Tensor, start: Tensor, steps: int) -> Tensor:
    """Return unit vectors that span ``start, start G, ..``, shape (matrices, steps, rows)."""
    vectors = gram.new_zeros(len(gram), min(steps, gram.shape[-1]), gram.shape[-1])
    vectors[:, 0] = start
    for step in range(1, vectors.shape[1]):
        previous = vectors[:, :step]
        image = previous[:, -1:] @ gram
        image = torch.baddbmm(image, image @ previous.mT, previous, alpha=-1)
        length = torch.linalg.vector_norm(image, dim=-1, keepdim=True)
        vectors[:, step : step + 1] = image / length.clamp_min(torch.finfo(gram.dtype).tiny)
    return vectors
