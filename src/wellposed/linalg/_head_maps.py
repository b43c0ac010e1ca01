"""Norms of several linear maps that are added: the heads of an attention layer (theory note B21).

Each norm is certified. Scales and multipliers are guessed, since any positive one is valid.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from wellposed.linalg._norms import certified_spectral_norm

# Allowance for float64 sums of products that are formed here, beyond `certified_spectral_norm`.
_SLACK = 1 + 1e-12
_GUESS_STEPS = 12
# Multipliers that are tried, as multiples of the ratio of the two norms.
_RATIOS = (0.25, 0.5, 0.7, 1.0, 1.4, 2.0, 4.0)


class HeadMaps:
    """Linear maps ``M_h`` (H, r, E) in row convention, and certified norms of their sums.

    Status: certified, rounding included. Source: theory note B21.

    Args:
        maps: ``M_h``, one for each head.
        errors: (H,), by how much the spectral norm of each exact map may exceed that of ``maps``.

    Cost: one batch of small factorisations, and one of the stack for each scaling that is used.

    >>> both = HeadMaps(torch.eye(4, dtype=torch.float64).reshape(2, 2, 4))
    >>> round(float(both.joined(torch.tensor([3.0, 4.0]))), 4)
    5.0
    """

    def __init__(self, maps: Tensor, errors: Tensor | None = None) -> None:
        self.maps = maps.detach().double()
        self.errors = self.maps.new_zeros(len(maps)) if errors is None else errors
        self._stacks: dict[str, Tensor] = {}

    @classmethod
    def product(cls, left: Tensor, right: Tensor) -> HeadMaps:
        """Return ``R B`` (H, min(D, d), E) for ``A = Q R``, so that ``|R B x| = |A B x|``.

        ``left`` A is (H, D, d), ``right`` B (H, d, E).
        """
        left = left.detach().double()
        right = right.detach().double()
        maps = torch.linalg.qr(left, mode="r").R @ right
        terms = left.shape[-2] + left.shape[-1] + right.shape[-1]
        unit = 8 * terms * torch.finfo(torch.float64).eps
        sizes = torch.linalg.matrix_norm(left) * torch.linalg.matrix_norm(right)
        # A product of tiny entries may vanish although the exact one does not.
        tiny = torch.finfo(torch.float64).tiny * terms
        heard = (left != 0).any((-2, -1)) & (right != 0).any((-2, -1))
        return cls(maps, unit * sizes + tiny * heard)

    @property
    def transposed(self) -> HeadMaps:
        """The transposed maps, with the same norms."""
        return HeadMaps(self.maps.mT, self.errors)

    @cached_property
    def norms(self) -> Tensor:
        """Upper bounds of ``|M_h|`` (H,)."""
        return certified_spectral_norm(self.maps) + self.errors

    def joined(self, sizes: Tensor, *, balance: bool = True) -> Tensor:
        """Bound ``|sum_h M_h^T u_h|`` over all ``|u_h| <= sizes_h``, 0-dim.

        It is the least of ``sum_h sizes_h |M_h|`` and ``|stack_h s_h M_h| sqrt(sum_h (sizes_h /
        s_h)^2)`` for some scales s > 0: exact if the maps write to orthogonal outputs.

        Args:
            sizes: (H,), >= 0; a map of zeros may have an infinite one.
            balance: Also try scales that depend on the sizes, at the cost of one more factorisation.
        """
        sizes = sizes.detach().double()
        apart = torch.where(self.norms > 0, self.norms * sizes, 0.0).sum() * _SLACK
        if len(self.maps) == 1 or not 0 < float(apart) < math.inf:
            return apart.nan_to_num(nan=math.inf, posinf=math.inf)
        lengths = _positive(self.norms)
        scalings = {"equal": torch.ones_like(lengths), "normalised": 1 / lengths}
        if balance:
            scalings["balanced"] = (_positive(sizes) / lengths).sqrt()
        name = min(scalings, key=lambda name: self._guess(sizes, scalings[name]))
        scales = scalings[name]
        joined = self._stack(name, scales) * (sizes / scales).square().sum().sqrt() * _SLACK
        return torch.minimum(apart, joined.nan_to_num(nan=math.inf, posinf=math.inf))

    def through_points(self, reads: HeadMaps) -> Tensor:
        """Bound ``|sum_h M_h^T S_h B_h|`` over covariances S_h of points of the unit ball, 0-dim.

        All heads read one vector by ``reads`` B (H, r, D). The bound is ``|stack_h sqrt(t_h) M_h|
        |stack_h B_h / sqrt(t_h)|`` with ``t_h = |B_h| / |M_h|``.
        """
        scales = (_positive(reads.norms) / _positive(self.norms)).sqrt()
        scales = torch.where(scales.isfinite() & (scales > 0), scales, 1.0)
        write = self._stack("", scales)
        read = reads._stack("", 1 / scales)
        return (write * read * _SLACK).nan_to_num(nan=math.inf, posinf=math.inf)

    def _stack(self, name: str, scales: Tensor) -> Tensor:
        """Bound ``|stack_h s_h M_h|``; kept for named scales that depend on the maps alone."""
        if name not in ("equal", "normalised"):
            return self._stack_norm(scales)
        if name not in self._stacks:
            self._stacks[name] = self._stack_norm(scales)
        return self._stacks[name]

    def _stack_norm(self, scales: Tensor) -> Tensor:
        stack = (self.maps * scales[:, None, None]).flatten(0, 1)
        if not bool(stack.isfinite().all()):
            return stack.new_tensor(math.inf)
        return certified_spectral_norm(stack, method="cholesky") + (scales * self.errors).sum()

    def _guess(self, sizes: Tensor, scales: Tensor) -> float:
        """Guess a bound by power iteration, only to choose among valid scales."""
        stack = (self.maps * scales[:, None, None]).flatten(0, 1)
        vector = torch.linspace(1, 2, stack.shape[1], dtype=stack.dtype, device=stack.device)
        for _ in range(_GUESS_STEPS):
            vector = stack.mT @ (stack @ vector)
            vector = vector / vector.norm().clamp_min(torch.finfo(stack.dtype).tiny)
        guess = float((stack @ vector).norm() * (sizes / scales).square().sum().sqrt())
        return math.inf if math.isnan(guess) else guess


def shared_points_norm(left: HeadMaps, right: HeadMaps) -> Tensor:
    """Bound ``|A_h^T S B_h|`` over covariances S of points of the unit ball, for each head (H,).

    Status: certified: ``min_t |[sqrt(t) A, B / sqrt(t)]|^2 / 2``, at most ``|A| |B|``, and half of it
    if A and B read orthogonal directions (theory note B21).

    Args:
        left: A (H, D, m).
        right: B (H, D, k).
    """
    product = left.norms * right.norms * _SLACK
    ratio = right.norms / left.norms
    usable = (product > 0) & product.isfinite() & (ratio > 0) & ratio.isfinite()
    if not bool(usable.any()):
        return product

    tries = torch.where(usable, ratio, 1.0) * ratio.new_tensor(_RATIOS)[:, None]
    joint = torch.cat((left.maps, right.maps), dim=-1)
    widths = [left.maps.shape[-1], right.maps.shape[-1]]
    powers = tries.new_tensor([0.5] * widths[0] + [-0.5] * widths[1])
    columns = tries[..., None] ** powers
    grams = joint.mT @ joint * columns[..., :, None] * columns[..., None, :]
    guesses = torch.linalg.eigvalsh(grams.nan_to_num(posinf=0.0, neginf=0.0))[..., -1]
    heads = torch.arange(len(ratio), device=ratio.device)
    best = guesses.argmin(0)
    multiplier = tries[best, heads]
    norms = certified_spectral_norm(joint * columns[best, heads][:, None, :])
    spread = multiplier.sqrt() * left.errors + multiplier.rsqrt() * right.errors
    half = (norms + spread).square() / 2 * _SLACK

    return torch.where(usable, torch.minimum(product, half), product)


def _positive(values: Tensor) -> Tensor:
    """Replace zeros by 1: any positive scale is valid."""
    return torch.where(values > 0, values, torch.ones_like(values))
