"""Bounds of ``x -> s x + c W_2 phi(W_1 x)`` by one multiplier a hidden unit (theory note B18).

With phi = mid + half r, the slopes of r in [-1, 1], the map is ``G x + B r(C x)``. For every
diagonal T > 0, ``|f(x) - f(y)|^2 <= rho |x - y|^2`` if ``[[rho I - C'TC, G'], [G, I - B T^-1 B']]``
is positive definite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from wellposed.certification.bounds._network import Network
from wellposed.certification.bounds._rounding import MORE_TERMS, UNDERFLOW, UNIT, check_positive
from wellposed.certification.bounds._search import (
    SMOOTHING,
    Ascent,
    smallest_proved,
    top_weights,
)
from wellposed.errors import ConfigError
from wellposed.linalg import guess_largest_eigenvalue, proves_definite, symmetric_product
from wellposed.torch_modes import on_the_cpu

# Factors of the smallest multiplier that are tried first.
_FACTORS = (0.05, 0.12, 0.3, 0.6, 1.0, 2.0, 4.0, 10.0, 30.0, 100.0, 1e3, 1e4)
_WIDE = 256
"""Widths from which multiples of one vector are tried, by few products."""
_WIDE_FACTORS = (1.0, 1.7)
_SMALLER_FACTORS = (0.6,)
_LARGER_FACTORS = (5.0,)
"""Tried after the former, on the side that they fall towards."""
_POWER_STEPS = 6
_WORK = 5e8
"""Multiply-adds that a search may take for one layer; wide layers get fewer steps."""
_STEPS = 50
_TINY = 1e-150


@dataclass(frozen=True, eq=False)
class _Maps:
    """Stacks of G, B, C of maps of one shape."""

    straight: Tensor
    out: Tensor
    into: Tensor
    excess: Tensor
    """What rounding of the three adds to the bound."""
    live: Tensor
    """Which hidden units are in B and C; the slope of the others is known, or has no effect."""


@on_the_cpu
def branch_bound(
    networks: Sequence[Network],
    skips: Sequence[float],
    scales: Sequence[float],
    *,
    multipliers: Tensor | None = None,
) -> list[float]:
    """Return upper bounds of the Lipschitz constants of ``s x + c W_2 phi(W_1 x)``, in the 2-norm.

    Status: certified, rounding included; infinite if no bound is proved. Source: one S-procedure
    step, as LipSDP-Neuron (Fazlyab et al. 2019) for one hidden layer; theory note B18.

    Args:
        networks: Networks of one hidden layer, all of the same shapes.
        skips: s of each; other than 0 only if outputs are as wide as inputs.
        scales: c of each.
        multipliers: (count, hidden), positive; a search proposes them by default. Whatever they
            are, the result is a bound.

    Raises:
        ConfigError: a multiplier is not a positive finite number.

    Cost: some products of the weights and eigenvalues of the width, in float64 on the CPU.

    >>> from wellposed.certification.bounds import Matrix, Slopes, network_of
    >>> eye = Matrix(torch.eye(2))
    >>> round(branch_bound([network_of([eye, Slopes(0, 1), eye])], [1.0], [1.0])[0], 4)
    2.0
    """
    return searched_branches(networks, skips, scales, multipliers=multipliers)[0]


@torch.no_grad()
def searched_branches(
    networks: Sequence[Network],
    skips: Sequence[float],
    scales: Sequence[float],
    *,
    multipliers: Tensor | None = None,
) -> tuple[list[float], Tensor | None]:
    """Return the bounds of `branch_bound`, and the multipliers of the proof."""
    if not all(network.is_usual for network in networks):
        return [math.inf] * len(networks), None
    maps = _maps(networks, skips, scales)
    if multipliers is not None:
        _check(multipliers, maps)
        grams = _grams(maps, multipliers.to(torch.float64)[:, maps.live])
    elif maps.straight.shape[-1] >= _WIDE and maps.into.shape[-2]:
        grams = _on_one_ray(maps)
    else:
        grams = _grams(maps, _proposed(maps))

    bounds = _proved(maps, grams)
    # The slope of the others is known: at the limit 0 they count nothing.
    used = torch.full((len(networks), len(maps.live)), _TINY, dtype=torch.float64)
    used[:, maps.live] = grams.multipliers
    return [float(bound) for bound in bounds + maps.excess], used


def branch_square(network: Network, skip: float, scale: float, multipliers: Tensor) -> Tensor:
    """Return rho for fixed multipliers, to differentiate by the weights; no proof.

    It is a mean of ``v'Mv`` over top eigenvectors v of ``M = C'TC + G'R^-1 G`` with
    ``R = I - B T^-1 B'``. Since ``(Gv)'R^-1 Gv`` is the largest ``2 x'Gv - x'Rx``, the gradient is
    that of products with v and ``x = R^-1 Gv``, held fixed: no matrix of them is differentiated.
    """
    with torch.no_grad():
        straight, out, into, _ = _parts(network, skip, scale)
        room = torch.eye(len(out), dtype=torch.float64) - (out / multipliers) @ out.mT
        solved = torch.linalg.solve(room, straight)
        gram = (into.mT * multipliers) @ into
        _, tops, weights = top_weights(gram + straight.mT @ solved, SMOOTHING)
        reached = solved @ tops

    first, last = network.weights
    ((mid, half),) = network.slopes
    hidden = first @ tops
    along = scale * (last @ (mid[:, None] * hidden))
    if skip:
        along = along + skip * tops
    back = (scale * half)[:, None] * (last.mT @ reached)
    within = multipliers[:, None] * hidden.square() + back.square() / multipliers[:, None]
    across = 2 * reached * along - reached.square()
    return (within.sum(-2) + across.sum(-2)) @ weights


def _check(multipliers: Tensor, maps: _Maps) -> None:
    expected = (len(maps.into), len(maps.live))
    if tuple(multipliers.shape) != expected:
        raise ConfigError(
            f"branch_bound: expected multipliers {expected}, received {tuple(multipliers.shape)}"
        )
    check_positive("branch_bound", [multipliers])


def _maps(networks: Sequence[Network], skips: Sequence[float], scales: Sequence[float]) -> _Maps:
    parts = [_parts(*one) for one in zip(networks, skips, scales, strict=True)]
    straight = _stacked([part[0] for part in parts])
    out = _stacked([part[1] for part in parts])
    into = _stacked([part[2] for part in parts])
    excess = torch.tensor([part[3] for part in parts], dtype=torch.float64)
    live = (out.abs().amax((0, -2)) > 0) & (into.abs().amax((0, -1)) > 0)
    if not bool(live.all()):
        out = out[..., live]
        into = into[:, live]
    return _Maps(straight, out, into, excess, live)


def _stacked(matrices: Sequence[Tensor]) -> Tensor:
    """Return a stack, without a copy of one matrix."""
    return matrices[0][None] if len(matrices) == 1 else torch.stack(list(matrices))


def _parts(network: Network, skip: float, scale: float) -> tuple[Tensor, Tensor, Tensor, float]:
    """Return G, B, C and what rounding of them adds to the bound."""
    first, last = network.weights
    ((mid, half),) = network.slopes
    centred = last * mid
    straight = scale * (centred @ first)
    out = scale * (last * half)
    first_size = _size(first)
    lost = abs(scale) * (len(mid) + MORE_TERMS) * _size(centred) * first_size
    lost += 4 * _size(straight) + 4 * _size(out) * first_size
    if skip:
        straight = straight + skip * torch.eye(len(straight), dtype=torch.float64)
        lost += 2 * _size(straight)
    excess = 1.01 * UNIT * lost + UNDERFLOW + abs(scale) * network.excess

    return straight, out, first, excess


def _size(matrix: Tensor) -> float:
    return float(matrix.detach().norm())


def _proposed(maps: _Maps) -> Tensor:
    """Return multipliers by two rays, then by gradient steps on their logarithms."""
    rows = maps.into.norm(dim=-1)
    columns = maps.out.norm(dim=-2)
    balanced = _above(columns) / _above(rows)
    rays = [_best_on_ray(maps, base) for base in (balanced, torch.ones_like(balanced))]
    first, second = rays
    is_second = second[0] < first[0]
    start = torch.where(is_second[..., None], second[1], first[1])
    width = maps.straight.shape[-1]
    hidden = maps.into.shape[-2]
    step = hidden * (width**2 + len(maps.straight[0]) ** 2) + 10 * width**3
    steps = min(_STEPS, int(_WORK / max(step, 1)))
    if steps < 1 or not hidden:
        return start

    ascent = Ascent(start.log(), torch.minimum(first[0], second[0]))
    for _ in range(steps):
        ascent.step(*_value_and_gradient(maps, ascent.point.exp(), ascent.temperature))
        if ascent.is_over():
            break
    return ascent.best.exp()


def _above(sizes: Tensor) -> Tensor:
    """Raise sizes that are small beside the largest, which are divided by."""
    if not sizes.shape[-1]:
        return sizes
    return sizes.clamp_min(1e-6 * sizes.amax(-1, keepdim=True)).clamp_min(1e-300)


def _best_on_ray(maps: _Maps, base: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest rho, and T, of the multiples of ``base``."""
    values, vectors = torch.linalg.eigh((maps.out / base[..., None, :]) @ maps.out.mT)
    turned = vectors.mT @ maps.straight
    gram = (maps.into.mT * base[..., None, :]) @ maps.into
    smallest = values[..., -1].clamp_min(1e-300)
    tried = []
    for factor in _FACTORS:
        size = smallest * (1 + factor)
        rest = 1 - values / size[..., None]
        matrix = size[..., None, None] * gram + (turned.mT / rest[..., None, :]) @ turned
        tried.append((torch.linalg.eigvalsh(matrix)[..., -1], size))

    values = torch.stack([value for value, _ in tried])
    sizes = torch.stack([size for _, size in tried])
    chosen = values.argmin(0, keepdim=True)
    return values.gather(0, chosen)[0], base * sizes.gather(0, chosen)[0][..., None]


def _value_and_gradient(
    maps: _Maps, multipliers: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Return rho (infinite if T is too small) and the gradient of its logarithm by log T."""
    straight = maps.straight
    out = maps.out
    into = maps.into
    room = -(out / multipliers[..., None, :]) @ out.mT
    room.diagonal(dim1=-2, dim2=-1).add_(1)
    factor, info = torch.linalg.cholesky_ex(room)
    fails = (info != 0)[..., None, None]
    factor = torch.where(fails, torch.eye(factor.shape[-1], dtype=factor.dtype), factor)
    half = torch.linalg.solve_triangular(factor, straight, upper=False)
    matrix = (into.mT * multipliers[..., None, :]) @ into + half.mT @ half
    values, vectors, weights = top_weights(matrix, temperature)
    reached = torch.cholesky_solve(straight @ vectors, factor)
    change = (into @ vectors).square() * multipliers[..., None]
    change = change - (out.mT @ reached).square() / multipliers[..., None]
    gradient = (change * weights[..., None, :]).sum(-1) / values[..., None]

    return torch.where(fails[..., 0, 0], math.inf, values), gradient


@dataclass(frozen=True, eq=False)
class _Grams:
    """``C'TC`` and ``B T^-1 B'``, and bounds of the products that are summed in their entries."""

    inner: Tensor
    outer: Tensor
    inner_sizes: Tensor
    outer_sizes: Tensor
    terms: int
    multipliers: Tensor

    def scaled(self, factor: Tensor) -> _Grams:
        """Return those of T times a factor, one a map."""
        rows = factor[:, None]
        return _Grams(
            self.inner * rows[..., None],
            self.outer / rows[..., None],
            self.inner_sizes * rows,
            self.outer_sizes / rows,
            self.terms + 1,
            self.multipliers * rows,
        )


def _grams(maps: _Maps, multipliers: Tensor) -> _Grams:
    """Return the products for T, the squares of the stored roots of the multipliers."""
    roots = multipliers.sqrt()
    inner = maps.into * roots[..., :, None]
    outer = maps.out / roots[..., None, :]
    return _Grams(
        symmetric_product(inner.mT, inner),
        symmetric_product(outer, outer.mT),
        inner.square().sum(-2),
        outer.square().sum(-1),
        maps.into.shape[-2] + MORE_TERMS,
        multipliers,
    )


def _on_one_ray(maps: _Maps) -> _Grams:
    """Return the products for the best of some multiples of the balanced vector."""
    lengths = maps.into.norm(dim=-1)
    base = _grams(maps, _above(maps.out.norm(dim=-2)) / _above(lengths))
    smallest = guess_largest_eigenvalue(base.outer).clamp_min(1e-300)
    rows = smallest[:, None, None]
    # Only a choice, so float32 does, for matrices of ordinary size.
    unit = maps.straight.abs().amax((-2, -1), keepdim=True)
    unit = torch.maximum(unit, (base.inner.abs().amax((-2, -1), keepdim=True) * rows).sqrt())
    inner = (base.inner / unit.square() * rows).float()
    outer = (base.outer / rows).float()
    straight = (maps.straight / unit).float()
    values = [_reach(straight, inner, outer, 1 + factor) for factor in _WIDE_FACTORS]
    more = _LARGER_FACTORS if bool((values[1] < values[0]).any()) else _SMALLER_FACTORS
    values += [_reach(straight, inner, outer, 1 + factor) for factor in more]
    sizes = 1 + smallest.new_tensor((*_WIDE_FACTORS, *more))

    return base.scaled(smallest * sizes[torch.stack(values).argmin(0)])


def _reach(straight: Tensor, inner: Tensor, outer: Tensor, size: float) -> Tensor:
    """Estimate rho for T times a size by some power steps; infinite if it is too small."""
    room = -outer / size
    room.diagonal(dim1=-2, dim2=-1).add_(1)
    factor, info = torch.linalg.cholesky_ex(room)
    usable = info == 0
    factor = torch.where(usable[:, None, None], factor, torch.eye(factor.shape[-1]).to(factor))

    def step(vector: Tensor) -> Tensor:
        solved = torch.cholesky_solve(straight @ vector, factor)
        return size * (inner @ vector) + straight.mT @ solved

    start = inner.new_ones(*inner.shape[:-1], 1)
    return torch.where(usable, _power(step, start), math.inf)


def _power(step: Callable[[Tensor], Tensor], vector: Tensor) -> Tensor:
    """Estimate the largest eigenvalue of a map of vectors by power steps, from below."""
    places = torch.arange(1, vector.shape[-2] + 1, dtype=vector.dtype)
    vector = places.square().sin()[:, None].expand_as(vector)
    size = vector.norm(dim=-2, keepdim=True)
    for _ in range(_POWER_STEPS):
        vector = step(vector / size.clamp_min(torch.finfo(vector.dtype).tiny))
        size = vector.norm(dim=-2, keepdim=True)
    return size[..., 0, 0]


def _proved(maps: _Maps, grams: _Grams) -> Tensor:
    """Return the smallest bounds that the proof accepts."""
    straight = maps.straight
    room = -grams.outer
    room.diagonal(dim1=-2, dim2=-1).add_(1)
    identity = torch.eye(grams.inner.shape[-1], dtype=torch.float64)

    def proves(squares: Tensor) -> Tensor:
        blocks = {
            (0, 0): squares[:, None, None] * identity - grams.inner,
            (1, 0): straight,
            (1, 1): room,
        }
        errors = [
            (UNIT * (2 * grams.terms * grams.inner_sizes + 4 * squares[:, None])).sqrt(),
            (UNIT * (2 * grams.terms * grams.outer_sizes + 4)).sqrt(),
        ]
        return proves_definite(blocks, errors)

    factor, info = torch.linalg.cholesky_ex(room)
    half = torch.linalg.solve_triangular(factor, straight, upper=False)
    guess = guess_largest_eigenvalue(grams.inner + half.mT @ half)
    usable = (info == 0) & guess.isfinite()
    return smallest_proved(torch.where(usable, guess, math.nan), proves)
