"""Lipschitz bound of a multi-head L2 self-attention layer from its weights (theory note B1, B3).

In row convention ``z_h = x W_h`` is query and key of head h, and ``z_h R_h`` its value. The
concatenated heads are multiplied by ``W_O``; ``C_h = R_h W_O,h`` is head h's path to the output.
Logits are ``-tau |z_i - z_j|^2 + b_ij``; the bounds are the same for all ``tau > 0`` and biases.
"""

from __future__ import annotations

from functools import cached_property, partial
from typing import Literal

import torch
from torch import Tensor

from wellposed.errors import ShapeError
from wellposed.linalg._l2_constants import L2Constants, kim_bracket
from wellposed.linalg._norms import (
    Bound,
    Norm,
    SpectralMethod,
    certified_spectral_norm,
    check_norm,
    infinity_norm,
    power_of_two,
    smallest_bound,
    wide_enough,
)
from wellposed.linalg._tensors import full_precision

# Heads further below the largest (in powers of two) are bounded as if they were here: 1e-15 of the
# sum, and its square is not denormal in float32.
_LEAST_EXPONENT = -50
# Range of the scalings of heads in powers of two.
_LEAST_SCALING = -20
# Up to this width three scalings are certified, above it only the most promising one.
_TRY_ALL_BELOW = 128


class L2Layer:
    """The weights of a tied L2 self-attention layer F, and its ``bound``.

    ``bound`` is the least proved L with ``|F(X) - F(Y)| <= L |X - Y|``.
    Status: certified for weights of any size, rounding of this computation included. A bound above
    the largest float64 is infinite.
    Source: Kim, Papamakarios, Mnih (2021), Theorem 3.2, in the sharper forms B1 (inf) and B3 (tok,
    2) of the theory note, with a scale for each head (docs/theory/l2.md).

    Args:
        projection: ``W_h``, ``(H, D, d)``, query = key = ``x @ W_h``.
        mixing: ``R_h``, ``(H, d, d)``; Kim et al.: ``W_h^T W_V,h / sqrt d`` with ``tau = 1/sqrt
            d``.
        output: ``W_O,h``, ``(H, d, E)``: The rows of ``W_O`` that read head h.
        method: How spectral norms are bounded; ``"gram"`` is differentiable and meant for training.
        exponents: (H,) integers: ``mixing`` is meant times ``2^exponents``, which might overflow.

    Raises:
        ShapeError: the three shapes do not fit.
        ConfigError: a weight is not real and floating, an unknown norm or method.
        NotLipschitzError: a weight is not finite.

    Cost: two spectral norms of D x D matrices, kept for later bounds; O(D^2 d) with
    ``per_head_only``.

    >>> from wellposed.linalg._l2_constants import l2_constants
    >>> W = torch.eye(4).reshape(1, 4, 4)
    >>> layer = L2Layer(W, W, W)
    >>> [round(float(layer.bound(l2_constants(2), norm=norm).value), 3) for norm in ("tok", 2)]
    [1.797, 2.339]
    """

    def __init__(
        self,
        projection: Tensor,
        mixing: Tensor,
        output: Tensor,
        *,
        method: SpectralMethod = "svd",
        exponents: Tensor | None = None,
    ) -> None:
        _check_shapes(projection, mixing, output)
        double = method in ("svd", "cholesky")
        dtype = torch.float64 if double else torch.promote_types(projection.dtype, torch.float32)
        weights = [wide_enough(weight, dtype=dtype) for weight in (projection, mixing, output)]
        largest = torch.stack([weight.detach().abs().amax((-2, -1)) for weight in weights])
        units = power_of_two(largest)
        shifts = torch.zeros_like(units[0]) if exponents is None else exponents.to(units)
        # frexp writes 2^k as 0.5 * 2^(k + 1).
        powers = (torch.frexp(units).exponent - 1).to(units)
        sizes = shifts + powers.sum(0)
        silent = (largest == 0).any(0)
        heard = sizes[~silent]
        self.exponent = heard.amax() if len(heard) else sizes.new_zeros(())
        self.shares = torch.where(silent, 0.0, torch.exp2(shifts - self.exponent))
        """``2^exponents / 2^exponent`` (H,), relative to the layer of order one; 0 if silent."""
        shrink = torch.exp2((sizes - self.exponent).clamp(_LEAST_EXPONENT, 0))
        self.projection, self.mixing, output = (
            weight / unit[:, None, None] for weight, unit in zip(weights, units, strict=True)
        )
        self.mixing = self.mixing * shrink[:, None, None]
        with full_precision(output.device.type):
            self.paths = self.mixing @ output

        # |fl(R W_O) - R W_O| <= gamma |R| |W_O| entry by entry; it matters if the product cancels.
        gamma = (mixing.shape[-1] + 4) * torch.finfo(dtype).eps
        mixed = self.mixing.detach().abs()
        out = output.detach().abs()
        self.write_error = (
            gamma * mixed.square().sum((-2, -1)).sqrt() * out.square().sum((-2, -1)).sqrt()
        )
        """(H,): how much rounding may have taken from ``|C_h|``."""
        self.column_error = gamma * (mixed.sum(-2).unsqueeze(-1) * out).sum(-2)
        """(H, E): the same for the sum of a column's absolute entries."""
        # In the given weights' units: which head W_O reads most, which W_h is smallest.
        self._out_units = torch.exp2((powers[2] - powers[2].amax()).clamp_min(_LEAST_SCALING))
        self._read_units = torch.exp2((powers[0].amin() - powers[0]).clamp_min(_LEAST_SCALING))
        self.method: SpectralMethod = method
        self._stacked: dict[tuple[str, bool], tuple[Tensor, Tensor]] = {}

    @cached_property
    def read(self) -> Tensor:
        """``|W_h|`` of the layer of order one, (H,)."""
        return certified_spectral_norm(self.projection, method=self.method)

    @cached_property
    def write(self) -> Tensor:
        """``|C_h|`` of the layer of order one, (H,)."""
        return certified_spectral_norm(self.paths, method=self.method) + self.write_error

    @cached_property
    def scalings(self) -> dict[str, Tensor]:
        """Choices of ``s_h`` for the given weights, by the name of the form they give."""
        mixed = certified_spectral_norm(self.mixing, method=self.method)
        scalings = {
            "|W_O| sqrt(sum |W_h|^2|R_h|^2)": self._out_units / _positive(mixed),
            "|stack C_h| |[W_h]|": self._read_units,
            "balanced stack |s C_h| |[W_h/s]|": (
                (_positive(self.read) / _positive(self.write)).sqrt()
            ),
        }
        return {form: scales.detach() for form, scales in scalings.items()}

    def bound(
        self, constants: L2Constants, *, norm: Norm = "tok", per_head_only: bool = False
    ) -> Bound:
        """Return the least of the proved bounds and its form; in float64, infinite above its range.

        ``constants`` are from `l2_constants`. ``per_head_only`` uses ``sum_h |W_h| |C_h|`` alone:
        far cheaper, looser.
        """
        bound = self.unit_bound(constants, norm=norm, per_head_only=per_head_only)
        half = (self.exponent / 2).floor().double()
        value = bound.value.double() * torch.exp2(half) * torch.exp2(self.exponent.double() - half)
        # Round denormal values up, so that only a layer of bound zero gets zero.
        value = value + (bound.value > 0) * torch.full_like(value, 5e-324)
        return Bound(value, bound.form)

    def unit_bound(
        self, constants: L2Constants, *, norm: Norm = "tok", per_head_only: bool = False
    ) -> Bound:
        """Return `bound` divided by ``2^exponent``, so that it stays in the dtype's range."""
        check_norm(norm)
        if norm == "inf":
            return _inf_bound(self.projection, self.paths, self.column_error, constants)

        composite = Bound(
            (self.read * self.write).sum() * constants.bracket(norm), f"sum |W_h||C_h|, {norm} (B3)"
        )
        if per_head_only or self.projection.shape[0] == 1:
            return composite

        forms = list(self.scalings)
        if self.projection.shape[1] > _TRY_ALL_BELOW:
            # Every scaling is valid, so a guess may choose the one to certify.
            guesses = [self._joint(form, constants, norm, guess=True).detach() for form in forms]
            forms = [forms[int(torch.stack(guesses).argmin())]]

        values = [
            Bound(self._joint(form, constants, norm), f"{form}, {norm} (B3)") for form in forms
        ]
        return smallest_bound([composite, *values])

    def _joint(
        self, form: str, constants: L2Constants, norm: Norm, *, guess: bool = False
    ) -> Tensor:
        scales = self.scalings[form]
        write, read = self._stack_norms(form, guess)
        if norm == 2:
            return write * read * constants.bracket(2)
        heads_apart = (self.read / scales).square().sum().sqrt()
        rows = (1 + 2 * constants.row_excess) * heads_apart
        return write * (rows + 2 * constants.c * read)

    def _stack_norms(self, form: str, guess: bool) -> tuple[Tensor, Tensor]:
        """Return ``|stack_h s_h C_h|`` and ``|[W_h / s_h]|``."""
        if (form, guess) not in self._stacked:
            scales = self.scalings[form][:, None, None]
            paths = (self.paths * scales).flatten(0, 1)
            # (heads, in, d) -> (in, heads d)
            projections = (self.projection / scales).movedim(0, 1).flatten(1)
            size = _power_guess if guess else partial(certified_spectral_norm, method=self.method)
            error = (self.scalings[form] * self.write_error).sum()
            self._stacked[form, guess] = size(paths) + error, size(projections)
        return self._stacked[form, guess]


def _inf_bound(projection: Tensor, paths: Tensor, error: Tensor, constants: L2Constants) -> Bound:
    """Return B1, per output: averaging plus 4c, in the inf-norm or by the head's 2-norm."""
    head_dim = projection.shape[-1]
    read = projection.abs().sum(-2)
    read_inf = read.amax(-1, keepdim=True)
    read_two = read.square().sum(-1, keepdim=True).sqrt()
    path_one = paths.abs().sum(-2) + error
    path_two = paths.square().sum(-2).sqrt() + error
    averaging = path_one * read_inf
    through_inf = averaging * (constants.bracket("inf", head_dim=head_dim) - 1)
    through_two = path_two * read_two * (4 * constants.c)
    margin = 1 + 4 * (projection[0].numel() + paths[0].numel()) * torch.finfo(paths.dtype).eps
    # The smaller one of each row is at most either one for all rows.
    value = (averaging + torch.minimum(through_inf, through_two)).sum(0).amax() * margin

    return Bound(value, "per row, inf (B1)")


@torch.no_grad()
def _power_guess(matrix: Tensor) -> Tensor:
    """Guess a spectral norm, only to choose among valid scalings; never part of a bound."""
    matrix = matrix.float()
    vector = torch.linspace(1, 2, matrix.shape[1], dtype=matrix.dtype, device=matrix.device)
    for _ in range(8):
        vector = matrix.mT @ (matrix @ vector)
        vector = vector / vector.norm().clamp_min(torch.finfo(matrix.dtype).tiny)
    return (matrix @ vector).norm()


def _positive(norms: Tensor) -> Tensor:
    """Replace zero norms by 1: any positive scale is valid."""
    return torch.where(norms > 0, norms, torch.ones_like(norms))


def _check_shapes(projection: Tensor, mixing: Tensor, output: Tensor) -> None:
    fits = projection.ndim == mixing.ndim == output.ndim == 3
    if fits:
        heads, _, dim = projection.shape
        fits = tuple(mixing.shape) == (heads, dim, dim) and tuple(output.shape[:2]) == (heads, dim)
    if not fits:
        raise ShapeError(
            "L2 attention bound: expected projection (H, D, d), mixing (H, d, d), output (H, d,"
            f" E); received {tuple(projection.shape)}, {tuple(mixing.shape)}, {tuple(output.shape)}"
        )


def kim2021_bound(
    projection: Tensor,
    value: Tensor,
    output: Tensor,
    *,
    seq_len: int,
    norm: Literal["inf", 2],
    as_printed: bool = False,
    method: SpectralMethod = "svd",
) -> Tensor:
    """Return Theorem 3.2 of Kim, Papamakarios, Mnih (2021) for tied L2 attention, 0-dim in float64.

    With ``A_h = W_h W_h^T / sqrt d``. Status: certified. ``inf``: ``(4c + 1/sqrt d) max|W_h|_inf
    |W_h^T|_inf max|W_V,h^T|_inf |W_O^T|_inf``; ``2``: ``sqrt(N/d) (4c + 1) sqrt(sum |W_h|^4
    |W_V,h|^2) |W_O|``. The paper prints the fourth power as a square: that is a slip and **no upper
    bound** (the map is quadratic in ``W_h``).

    Args:
        projection: ``W_h``, ``(H, D, d)``.
        value: ``W_V,h``, ``(H, D, d)``.
        output: ``W_O``, ``(H d, E)``.
        seq_len: Number of tokens N.
        norm: ``"inf"`` or ``2``; the paper has no other.
        as_printed: With the slip.
        method: How spectral norms are bounded; ``"gram"`` is differentiable.

    When not to use: `L2Layer.bound` is never larger.

    >>> one, ten = torch.ones(1, 1, 1), torch.full((1, 1, 1), 10.0)
    >>> [round(float(kim2021_bound(ten, one, one[0], seq_len=2, norm=2, as_printed=slip)), 2)
    ...     for slip in (False, True)]
    [298.95, 29.89]
    """
    bracket = kim_bracket(seq_len, norm=norm, head_dim=projection.shape[-1])
    if norm == "inf":
        square = infinity_norm(projection) * infinity_norm(projection.mT)
        return bracket * square.amax() * infinity_norm(value.mT).amax() * infinity_norm(output.mT)
    power = 2 if as_printed else 4
    spectral, values = (
        certified_spectral_norm(weight, method=method) for weight in (projection, value)
    )
    heads = (spectral.pow(power) * values.square()).sum().sqrt()
    return bracket * heads * certified_spectral_norm(output, method=method)
