"""The largest singular value held below a bound, with a proof in place of a trust in convergence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from wellposed.errors import ConfigError, ConvergenceError, ShapeError
from wellposed.linalg._norms import SVD_MARGIN, _gram_by_blocks, _ritz_vectors, certified_spectral_norm
from wellposed.linalg._polar import compute_dtype, full_precision, tall

CapMethod = Literal["inside", "polynomial", "rounds", "exact"]
# Room below the bound, so that `certified_spectral_norm` of the result, margin included, is at most the bound.
_ROOM = 3 * SVD_MARGIN
# Where the root mean square of the singular values is beyond this many bounds, most of them are outside.
_NEAR = 1.25
# Lanczos steps, and the slacks of the squared norm that are tried above their lower estimate.
_LANCZOS = 16
_SLACKS = (1e-2, 5e-2)
# How often a matrix is brought nearer before all its singular values are computed.
_ROUNDS = 4
# Its largest singular values are few where at most so many of the Lanczos values are beyond this many bounds; up to so
# many bounds the polynomial alone brings it in.
_FEW, _LONG, _SOFT = 6, 1.1, 1.5
# A proof in float32 may be this loose (in the squared norm); beyond, it is made in float64.
_LOOSE = 4e-2
# Products are summed in pieces of this many terms, which keeps the worst rounding of long sums small.
_PIECE = 128
_PANEL = 192
# Up to this side a Gram matrix is one product.
_WHOLE = 128
_MAX_TRIES = 16


class SpectralCap(NamedTuple):
    """What `cap_spectral_norm_` did, and the proved bound on ``|W|_2`` that it found before."""

    method: CapMethod
    before: float


def cap_spectral_norm_(weight: Tensor, *, bound: float = 1.0) -> SpectralCap:
    """Change W as little as is cheap so that ``|W|_2 <= bound``; a W proved to be inside is not touched.

    Status: certified for the matrix as stored, rounding included: a Cholesky factor of ``L I - W^T W / bound^2`` proves
    ``|W|_2 <= l bound``, ``l = sqrt L`` (Rump 2006). Where l is below about 1.12, ``W (I - a (W^T W / bound^2)^4)`` is
    taken: every singular value s becomes ``s - a s^9``, which grows on [0, l] and ends at 1 less the rounding of its
    products, bounded a priori; a singular value of half the bound moves by ``a / 512``, ``a <= l - 1``. For larger l a
    few rounds go before it, each proved anew: the largest singular values are set to the bound along their Lanczos
    vectors where they are few, or else ``s - a s^9`` takes l to 8/9 of it. Where that does not end, every one above the
    bound is set to it (eigenvectors; the nearest such matrix in the Frobenius norm), and the stored result is proved
    anew, which may shrink it by 1e-4, as is every half-precision one.
    Source: `wellposed`; soft caps by odd polynomials are of Newhouse et al. (2025, arXiv 2507.13338), without a proof.
    Power iteration is nowhere.

    Args:
        weight: (rows, columns), floating, changed in place; may be a view.
        bound: above 0.

    Returns:
        `SpectralCap`.

    Raises:
        ConvergenceError: W is not finite; it is left as it was. ShapeError: not a matrix. ConfigError: bound not above
            0, or not finite.

    Cost: in products of W with its Gram matrix, float32 at 512 x 512 on a CPU: 2 where W is inside, 6 with the
    polynomial, 4 for each round, about 35 with eigenvectors. `cap_spectral_norms_` does many of one shape at
    once. When not to use: where a weight is measured only now and then, `certified_spectral_norm` and a division do.

    >>> import torch
    >>> weight = torch.diag(torch.tensor([1.05, 0.5]))
    >>> cap_spectral_norm_(weight).method, bool(torch.linalg.matrix_norm(weight, 2) <= 1)
    ('polynomial', True)
    """
    return cap_spectral_norms_([weight], bound=bound)[0]


def cap_spectral_norms_(weights: Sequence[Tensor], *, bound: float = 1.0) -> list[SpectralCap]:
    """Do `cap_spectral_norm_` for matrices of one shape, dtype and device in batched products.

    Status, source and errors: of `cap_spectral_norm_`, whose result differs by the rounding of its products alone. Each
    matrix has a proof of its own. Nothing is written where one of them is not finite.

    Args:
        weights: (rows, columns) each, floating, changed in place; may be views.
        bound: above 0, of all.

    Returns:
        One `SpectralCap` for each matrix.

    Raises:
        ShapeError: no matrices, or not of one shape, dtype and device. ConvergenceError, ConfigError: as
            `cap_spectral_norm_`.

    Cost: small matrices take a tenth of the time of one after the other; memory of about six copies of all.

    >>> import torch
    >>> [cap.method for cap in cap_spectral_norms_([0.5 * torch.eye(3), 1.05 * torch.eye(3)])]
    ['inside', 'polynomial']
    """
    targets = [tall(weight.detach()) if weight.dim() == 2 else weight for weight in weights]
    kinds = {(tuple(target.shape), target.dtype, target.device) for target in targets}
    if len(kinds) != 1 or targets[0].dim() != 2 or not targets[0].is_floating_point():
        received = ", ".join(f"{dtype} {shape}" for shape, dtype, _ in sorted(kinds, key=str))
        raise ShapeError(
            "cap_spectral_norm_: expected a floating matrix (rows, columns), or several of one shape, dtype and "
            f"device, received {received or 'none'}"
        )
    if not 0.0 < bound < math.inf:
        raise ConfigError(f"cap_spectral_norm_: bound must be above 0 and finite, received {bound!r}")
    if targets[0].numel() == 0:
        return [SpectralCap("inside", 0.0)] * len(targets)
    with torch.no_grad(), full_precision(targets[0].device.type):
        is_one = len(targets) == 1
        stack = targets[0][None] if is_one else torch.stack(targets)
        caps = _cap_(stack, bound)
        moved = [index for index, cap in enumerate(caps) if cap.method != "inside"]
        if moved and not is_one:
            torch._foreach_copy_([targets[index] for index in moved], [stack[index] for index in moved])
    return caps


def _cap_(stack: Tensor, bound: float) -> list[SpectralCap]:
    """Cap every matrix of (batch, rows, columns) in place."""
    sizes = (torch.linalg.vector_norm(stack, dim=(-2, -1), dtype=torch.float64) / bound).tolist()
    if not all(map(math.isfinite, sizes)) and not bool(torch.isfinite(stack).all()):
        raise ConvergenceError(f"cap_spectral_norm_: the {tuple(stack.shape[1:])} matrix is not finite")
    caps = [SpectralCap("exact", size * bound * (1.0 + SVD_MARGIN)) for size in sizes]
    inside = [index for index, size in enumerate(sizes) if size <= 1.0 - _ROOM]
    near = [index for index, size in enumerate(sizes) if 1.0 - _ROOM < size <= _NEAR * math.sqrt(stack.shape[-1])]
    for index in inside:
        caps[index] = caps[index]._replace(method="inside")
    if near:
        _cap_near_(stack, near, bound, caps)
    far = [index for index, cap in enumerate(caps) if cap.method == "exact"]
    if far:
        limit = bound * (1.0 - _ROOM)
        clipped = torch.stack([_clipped(stack[index], limit, is_near=index in near) for index in far])
        stack[far] = _proved(clipped, stack.dtype, bound)
    return caps


def _cap_near_(stack: Tensor, members: list[int], bound: float, caps: list[SpectralCap]) -> None:
    """Prove or cap the matrices ``members`` of the stack, and note how; those left for `_clipped` stay as they are."""
    dtype, columns, top = compute_dtype(stack), stack.shape[-1], 1.0 - _ROOM
    kept_off = 0.0 if dtype == stack.dtype else torch.finfo(stack.dtype).eps  # the rounding of half precision
    point = (stack if len(members) == len(stack) else stack[members]).to(dtype) / bound
    proof = _prove(point, top * top)
    for index, limit in zip(members, proof.limit, strict=True):
        caps[index] = SpectralCap("inside" if limit <= top * top else "exact", math.sqrt(limit) * bound)
    left = [place for place, index in enumerate(members) if caps[index].method == "exact"]
    method: CapMethod = "polynomial"
    for attempt in range(_ROUNDS):
        strengths = {place: _strength(proof.bounds(place), columns, _unit(dtype), top - kept_off) for place in left}
        bent = {place: strength for place, strength in strengths.items() if strength is not None}
        if bent:
            capped = _bent(point[list(bent)], proof.gram[list(bent)], list(bent.values())).mul_(bound)
            chosen = [members[place] for place in bent]
            stack[chosen] = _proved(capped.double(), stack.dtype, bound) if kept_off else capped
            for index in chosen:
                caps[index] = caps[index]._replace(method=method)
        left = [place for place in left if place not in bent]
        if not left:
            return
        point, near = _nearer(point[left], proof.of(left), top, bends=attempt > 0)
        if not near:
            return
        members, point, method = [members[left[place]] for place in near], point[near], "rounds"
        proof, left = _prove(point, top * top), list(range(len(near)))


class _Bounds(NamedTuple):
    """Of a matrix X: ``|X^T X|_2 <= limit``, ``|X|_F = size``, and its G is within ``rounding`` of ``X^T X``."""

    rounding: float
    limit: float
    size: float


class _Proof(NamedTuple):
    """The Gram matrices G of a batch, and the bounds of each of its matrices."""

    gram: Tensor
    rounding: list[float]
    limit: list[float]
    size: list[float]

    def bounds(self, place: int) -> _Bounds:
        """Those of one matrix."""
        return _Bounds(self.rounding[place], self.limit[place], self.size[place])

    def of(self, places: list[int]) -> _Proof:
        """The proof of some of the matrices."""
        return _Proof(self.gram[places], *([values[place] for place in places] for values in self[1:]))


def _prove(point: Tensor, wanted: float) -> _Proof:
    """Bound the squared norm of each matrix, by ``wanted`` where that can be shown."""
    rows, columns = point.shape[-2:]
    if point.dtype != torch.float64 and (rows + 8) * columns * _unit(torch.float32) > _LOOSE:
        point = point.double()
    gram = _gram_by_blocks(point.mT, 1 if columns <= _WHOLE else 4)
    size = torch.linalg.vector_norm(point, dim=(-2, -1), dtype=torch.float64)
    rounding = 1.1 * (rows + 8) * _unit(point.dtype) * size * size
    limit = _proved_limits(gram, rounding.cpu(), wanted)
    return _Proof(gram, rounding.tolist(), limit.tolist(), size.tolist())


def _proved_limits(gram: Tensor, rounding: Tensor, wanted: float) -> Tensor:
    """Return ``wanted`` where it is proved to be at least the largest eigenvalue, or else a proved bound above it.

    A factorisation of L I - G that runs to its end proves that no eigenvalue of it is below minus its rounding.
    """
    columns = gram.shape[-1]
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1).double().cpu()
    own = 1.1 * (columns + 4) * _unit(gram.dtype)

    def slack(shift: Tensor, of: Tensor) -> Tensor:
        return rounding[of] + own * torch.maximum(columns * shift - trace[of], shift)

    limits = torch.full_like(rounding, wanted)
    everyone = torch.arange(len(gram))
    left = everyone[~_has_factor(gram, wanted - slack(limits, everyone))]
    if not len(left):
        return limits
    below = _top_quotients(gram[left])
    for share in _SLACKS:
        shift = below * (1.0 + share)
        limit = shift + slack(shift, left)
        shown = (limit > wanted) & _has_factor(gram[left], shift)
        limits[left[shown]] = limit[shown]
        left, below = left[~shown], below[~shown]
        if not len(left):
            return limits
    exact = torch.linalg.eigvalsh(gram[left].double())[:, -1].cpu() * (1.0 + SVD_MARGIN) + rounding[left]
    limits[left] = exact.clamp_min(math.nextafter(wanted, math.inf))
    return limits


def _top_quotients(gram: Tensor) -> Tensor:
    """Return ``v^T G v / v^T v`` of each matrix for the last of its Ritz vectors, in float64 on the CPU."""
    vectors = _ritz_vectors(gram, _LANCZOS)[..., -1:].to(gram)
    return (((gram @ vectors) * vectors).sum((-2, -1)) / vectors.square().sum((-2, -1))).double().cpu()


def _has_factor(gram: Tensor, shift: Tensor) -> Tensor:
    """Whether ``shift I - G`` has a Cholesky factor, for each matrix."""
    shifted = -gram
    shifted.diagonal(dim1=-2, dim2=-1).add_(shift.to(gram)[:, None])
    return torch.linalg.cholesky_ex(shifted).info.cpu() == 0


def _strength(found: _Bounds, columns: int, unit: float, top: float) -> float | None:
    """Return a with ``|X (I - a G^4)|_2 <= top``, rounding included; None where X is too large.

    The error of each product is followed in the Frobenius norm, where that of A B is at most ``g |A|_F |B|_F``; of the
    powers of G it is ``|G^k|_F <= limit^(k - 1/2) |X|_F``, as no eigenvalue exceeds the limit and their sum is |X|_F^2.
    """
    rounding, limit, own = found
    g = 1.1 * (_PIECE + columns / _PIECE + 8) * unit
    length = math.sqrt(limit)
    error = rounding + unit * (length * own + rounding)
    size = length * own + error
    error = 2.0 * limit * error + error * error + g * size * size
    size = length**3 * own + error
    error = 2.0 * limit**2 * error + error * error + g * size * size
    # The strength multiplies G^4, which rounds once more.
    error = length * error + (g + unit) * own * (length**7 * own + error)
    slope = length**9 - error
    strength = (length - top + (columns / _PIECE + 10) * unit * own) / slope if slope > 0.0 else math.inf
    # Beyond, s - a s^9 would not grow up to the largest s.
    return strength if 9.0 * strength * length**8 <= 1.0 else None


def _bent(point: Tensor, gram: Tensor, strengths: list[float]) -> Tensor:
    """Return ``X (I - a G^4)``, each matrix with its own a; ``point`` is used up."""
    fourth = _square(_square(gram.to(point)))
    fourth *= -torch.tensor(strengths, dtype=point.dtype, device=point.device)[:, None, None]
    return _by_pieces(point.clone(), point, fourth)


def _square(symmetric: Tensor) -> Tensor:
    """Return the square of each symmetric matrix, multiplied up to the diagonal and mirrored."""
    size = symmetric.shape[-1]
    out = torch.zeros_like(symmetric)
    for start in range(0, size, _PANEL):
        end = min(start + _PANEL, size)
        _by_pieces(out[:, start:end, :end], symmetric[:, start:end], symmetric[:, :, :end])
        out[:, :start, start:end] = out[:, start:end, :start].mT
    return out


def _by_pieces(out: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Add ``left @ right`` to ``out`` in sums of `_PIECE` terms."""
    for start in range(0, right.shape[-2], _PIECE):
        piece = slice(start, start + _PIECE)
        out.baddbmm_(left[..., piece], right[..., piece, :])
    return out


def _nearer(point: Tensor, proof: _Proof, top: float, *, bends: bool) -> tuple[Tensor, list[int]]:
    """Return matrices with smaller norms, and the places of those for which that may go on to the end.

    Where few Ritz values of G are long, ``X (I - V f V^T)`` for its Ritz vectors V takes the images longer than about
    ``top`` to it; they end as far below as rounding hides from a proof, so that one of ``top`` is found where nothing
    else is longer. Where there are many, or ``bends`` says that those have been tried, ``s - a s^9`` with the largest a
    that keeps it growing takes the norm to 8/9.
    """
    columns = point.shape[-1]
    # The last term is for vectors of float32.
    own = 2.2 * (columns + 4) * columns * _unit(proof.gram.dtype) + 1e-5
    hidden = torch.tensor([min(2.0 * rounding + own, _SLACKS[0]) for rounding in proof.rounding]).to(point)
    goal = (top * top - hidden).sqrt()[:, None, None]
    vectors = _ritz_vectors(proof.gram, _LANCZOS).to(point)
    images = point @ vectors
    lengths = torch.linalg.vector_norm(images, dim=-2, keepdim=True)
    without = torch.baddbmm(point, images * (1.0 - goal / lengths.maximum(goal)), vectors.mT, alpha=-1.0)
    many = [bends or count > _FEW for count in (lengths > _LONG).sum((-2, -1)).tolist()]
    soft = [place for place, limit in enumerate(proof.limit) if many[place] and limit <= _SOFT * _SOFT]
    if soft:
        limits = [proof.limit[place] for place in soft]
        without[soft] = _bent(point[soft], proof.gram[soft], [1.0 / (9.0 * limit**4) for limit in limits])
    return without, [place for place in range(len(point)) if place in soft or not many[place]]


def _clipped(target: Tensor, limit: float, *, is_near: bool) -> Tensor:
    """Return the matrix in float64 with every singular value above ``limit`` set to it.

    Where none is far beyond it, directions in the precision of the matrix do.
    """
    scale = float(target.abs().amax())
    point = target.double() / scale  # no square overflows
    gram = _gram_by_blocks(point.mT)
    vectors = torch.linalg.eigh(gram.to(compute_dtype(target)) if is_near else gram).eigenvectors.double()
    images = point @ vectors
    lengths = torch.linalg.vector_norm(images, dim=0)
    is_outside = lengths > limit / scale
    excess = images[:, is_outside] * (1.0 - limit / scale / lengths[is_outside])
    return (point - excess @ vectors[:, is_outside].mT) * scale


def _proved(value: Tensor, dtype: torch.dtype, bound: float) -> Tensor:
    """Return the batch in ``dtype``, each matrix shrunk until the rounded one is proved to be inside."""
    for attempt in range(_MAX_TRIES):
        rounded = value.to(dtype)
        reached = certified_spectral_norm(rounded, method="cholesky")
        is_outside = reached > bound
        if not bool(is_outside.any()):
            return rounded
        shrink = bound / reached * (1.0 - 2.0 ** (attempt - _MAX_TRIES))
        value = value * torch.where(is_outside, shrink, 1.0)[:, None, None]
    raise ConvergenceError(
        f"cap_spectral_norm_: {tuple(value.shape[1:])} entries of {dtype} cannot be rounded into |W|_2 <= {bound:g}"
    )


def _unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2
