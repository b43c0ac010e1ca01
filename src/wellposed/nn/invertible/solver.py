"""Fixed points of `x = y - f(x)` for a contraction f: Picard's iteration, Anderson's acceleration,
and the error."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from wellposed.errors import ConvergenceError
from wellposed.linalg import Norm

Acceleration = Literal["anderson"]
# Measured: residuals stop shrinking at 0.3 units of rounding for attention of width 16 to 512, at
# 0.3 sqrt(width) for the hardest linear maps. One unit is enough; below the second limit a stalled
# residual is at its floor.
_UNITS_ENOUGH = 1.0
_UNITS_STALLED = (2.0, 0.5)
_WINDOW = 6


@dataclass(frozen=True)
class Inversion:
    """How well `x + f(x) = y` was solved: `|x - x*| <= error_bound` in `norm`, for every sample of
    the batch.

    x* is the inverse in exact arithmetic, with these weights, of y as given. The bound is
    a-posteriori: the residual `y - f(x) - x` of the x that is returned is evaluated in float64,
    where it holds all that the working dtype rounded away, and divided by `1 - c`; the rounding of
    that evaluation is added, and that of logits, which are quadratic in the tokens.
    `nn.invertible.inversion_bound` derives it and says what f may
    be. For a stack, errors of later blocks are carried through the earlier ones. If y itself is a
    computed `x_0 + f(x_0)`, its rounding, divided by the product of `1 - c`, is a further distance
    to x_0.
    """

    iterations: int
    """Evaluations of f, in a stack of all blocks together, the one for the error bound left out."""
    residual: float
    """Norm of `y - f(x) - x` at the x that is returned; in a stack the largest."""
    error_bound: float
    """Infinite where no bound is known: a coupling, blocks of different norms; in a backward pass,
    which asks none."""
    contraction: float
    """The c < 1 that was used; in a stack the largest."""
    norm: Norm
    converged: bool = True
    blocks: tuple[Inversion, ...] = ()
    """Of a stack: one for each block, in the order of the blocks."""
    measured_in: torch.dtype | None = None
    """In which f was evaluated for the error bound: float64 wherever f runs in it. Of a stack: see
    its blocks."""
    reason: str = ""
    """In words, why `error_bound` is infinite, where that was found out: logits that rounding
    leaves undetermined."""


def sample_norms(tokens: Tensor, norm: Norm) -> Tensor:
    """Norm of each sample, (batch,): tok = largest 2-norm of a token, inf = largest entry, 2 =
    Frobenius.

    >>> sample_norms(torch.tensor([[[3.0, 4.0], [0.0, 1.0]]]), "tok")
    tensor([5.])
    """
    if norm == "tok":
        sizes = torch.linalg.vector_norm(tokens, dim=-1)
        return sizes if sizes.dim() <= 1 else sizes.flatten(1).amax(-1)
    flat = tokens.flatten(1) if tokens.dim() > 1 else tokens[None]
    return torch.linalg.vector_norm(flat, math.inf if norm == "inf" else 2, dim=-1)


@dataclass(frozen=True)
class Solver:
    """Solves `x + f(x) = y`; see `InvertibleResidual.inverse`."""

    contraction: float
    norm: Norm
    tol: float | None
    max_iter: int
    accelerate: Acceleration | None

    def __call__(self, f: Callable[[Tensor], Tensor], y: Tensor) -> tuple[Tensor, Inversion]:
        """Return x and a report without error bound."""
        where, c = "InvertibleResidual.inverse", self.contraction
        bad = ~y.isfinite()
        if bool(bad.any()):
            raise ConvergenceError(
                f"{where}: y holds {int(bad.sum())} values that are NaN or infinite (of"
                f" {y.numel()}); expected finite numbers, of which each has exactly one inverse"
            )
        enough, stalled = self._targets(y)
        mixer = _Anderson(y, c) if self.accelerate is not None else None
        x, scale, residual = y, sample_norms(y, self.norm), math.inf
        best = torch.full_like(scale, math.inf)
        for iteration in range(1, self.max_iter + 1):
            image = y - f(x)
            difference = image - x
            sizes = sample_norms(difference, self.norm)
            # x may be larger than y, up to 1 / (1 - c) times; its rounding is what limits the
            # residual.
            scale = torch.maximum(scale, sample_norms(image, self.norm))
            residual = float(sizes.max()) if sizes.numel() else 0.0
            if not math.isfinite(residual):
                raise ConvergenceError(
                    f"{where}: f returned NaN or infinity in evaluation {iteration}; check f"
                )
            at_floor = (sizes <= stalled * scale) & (2 * sizes > best)
            if bool(((sizes <= enough * scale) | at_floor).all()):
                return image, Inversion(iteration, residual, math.inf, c, self.norm)
            best = torch.minimum(best, sizes)
            x = image if mixer is None else mixer.next(image, difference, sizes)
        raise ConvergenceError(
            f"{where}: after max_iter={self.max_iter} evaluations of f the error may be"
            f" {c / (1 - c) * residual:.3g} (norm {self.norm!r}, c = {c:.4g}); expected at most"
            f" {stalled / (1 - c):.3g} times the size of y; allow more iterations, or a"
            f" larger tol: rounding in {str(y.dtype).removeprefix('torch.')} sets a floor"
        )

    def _targets(self, y: Tensor) -> tuple[float, float]:
        """Residual, relative to y and x, that is enough; and one that is enough once it no longer
        halves."""
        if self.tol is not None:
            return self.tol * (1 - self.contraction), self.tol * (1 - self.contraction)
        unit, width = torch.finfo(computed_in(y)).eps, y.shape[-1] if y.dim() else 1
        first, slope = _UNITS_STALLED
        return _UNITS_ENOUGH * unit, (first + slope * math.sqrt(width)) * unit


def computed_in(y: Tensor) -> torch.dtype:
    """Return the coarser of the dtype of y and the autocast dtype, in which f is computed."""
    device = y.device.type
    if y.dtype is torch.float32 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return y.dtype


class _Anderson:
    """Type-II Anderson mixing of each sample by itself (Walker and Ni, 2011, eq. 2.2), with Picard
    as safeguard.

    A mixed iterate whose residual is not below c times the one before is worse than what Picard's
    step guarantees; then the next step is Picard's, from the better of the two. So two evaluations
    always gain the factor c.
    """

    def __init__(self, y: Tensor, contraction: float) -> None:
        self.contraction = contraction
        self.batch = y.shape[0] if y.dim() > 1 else 1
        shape = (self.batch, _WINDOW, y.numel() // max(self.batch, 1))
        self.differences, self.images = y.new_zeros(shape), y.new_zeros(shape)
        self.count = 0
        self.last: tuple[Tensor, Tensor, Tensor] | None = None

    def next(self, image: Tensor, difference: Tensor, sizes: Tensor) -> Tensor:
        """Return the next iterate from `image = y - f(x)`, `difference = image - x` and its
        norms."""
        flat_image, flat = image.reshape(self.batch, -1), difference.reshape(self.batch, -1)
        if self.last is None:
            self.last = (flat_image, flat, sizes)
            return image
        previous_image, previous, previous_sizes = self.last
        slot = self.count % _WINDOW
        self.differences[:, slot] = flat - previous
        self.images[:, slot] = flat_image - previous_image
        self.count += 1
        mixed = flat_image - self._weights(flat).unsqueeze(1).matmul(self.images).squeeze(1)
        failed = (sizes > self.contraction * previous_sizes)[:, None]
        better = torch.where((sizes <= previous_sizes)[:, None], flat_image, previous_image)
        chosen = torch.where(failed | ~mixed.isfinite().all(-1, keepdim=True), better, mixed)
        self.last = (flat_image, flat, sizes)
        return chosen.reshape(image.shape)

    def _weights(self, difference: Tensor) -> Tensor:
        """Least-squares weights of the stored differences, (batch, window); unused slots are
        zero."""
        stored = self.differences
        lengths = torch.linalg.vector_norm(stored, dim=-1, keepdim=True)
        lengths = lengths.clamp_min(torch.finfo(stored.dtype).tiny)
        unit = stored / lengths
        gram = (unit @ unit.mT).double()
        right = (unit @ difference.unsqueeze(-1)).double()
        # The floor keeps nearly parallel differences, whose Gram matrix is all rounding, from large
        # weights.
        gram.diagonal(dim1=-2, dim2=-1).add_(4 * torch.finfo(stored.dtype).eps)
        weights = torch.linalg.solve(gram, right).to(stored.dtype)
        return (weights / lengths).squeeze(-1)
