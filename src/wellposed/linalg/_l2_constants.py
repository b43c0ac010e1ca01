"""Brackets of the Lipschitz bounds of L2 self-attention: the part that depends on tokens, mask and
norm only.

Notation: ``N`` tokens, head width ``d``, ``phi(c) = c e^(c+1)``, ``c = phi^-1(M)`` where ``M`` is
the total weight of the other keys a query sees (``N - 1`` for a 0/1 mask that keeps the diagonal).
Sources: Kim, Papamakarios, Mnih (2021), Theorem 3.2, and the sharper forms B1 to B3 of the theory
note in the documentation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor

from wellposed.errors import ConfigError, NotLipschitzError, ShapeError, unknown_name
from wellposed.linalg._norms import Norm, check_norm

MaskKind = Literal["full", "causal", "any"]
MASK_KINDS: tuple[MaskKind, ...] = ("full", "causal", "any")

# phi_inverse(1): the largest value of t e^-t / (1 + e^-t), i.e. what one other token adds to a
# column of P * t.
_ONE_KEY = 0.27846454276107374


@overload
def phi_inverse(mass: float) -> float: ...
@overload
def phi_inverse(mass: Tensor) -> Tensor: ...
def phi_inverse(mass: float | Tensor) -> float | Tensor:
    """Return ``c`` with ``c e^(c+1) = mass``, that is ``W_0(mass / e)``, to float64 rounding.

    Exact to a few units in the last place, strictly increasing. Kim et al. (2021), Theorem 3.2
    (``phi^-1``); Halley iteration on ``w - x e^-w`` (Corless et al., 1996).

    Args:
        mass: float, or tensor of any shape; >= 0. The total weight of the other keys, ``N - 1`` for
            ``N`` tokens.

    Returns:
        A float for a float; a float64 tensor of the same shape for a tensor.

    Raises:
        NotLipschitzError: a value is negative, NaN or infinite.

    Cost: a dozen elementwise operations; no gradient.

    >>> round(phi_inverse(511.0), 7)
    3.8804249
    """
    x = torch.as_tensor(mass, dtype=torch.float64).detach()
    if not bool((torch.isfinite(x) & (x >= 0)).all()):
        raise NotLipschitzError(
            f"phi_inverse: expected finite weights >= 0 of the other keys, received {mass}"
        )
    x = x / math.e
    w = x.log1p()
    for _ in range(8):
        residual = w - x * torch.exp(-w)
        w = (w - residual / (w + 1 - (w + 2) * residual / (2 * w + 2))).clamp_min(0)
    return w if isinstance(mass, Tensor) else float(w)


@dataclass(frozen=True)
class L2Constants:
    """The three numbers behind every bracket of L2 self-attention (theory note B3).

    ``c = max_i phi^-1(M_i)``; ``column_mass`` bounds the largest column sum of ``P``;
    ``column_moment`` bounds the largest column sum of ``P_ij t_ij`` where ``t`` is the scaled
    squared distance. Build one with `l2_constants`, `l2_constants_from_weights` or
    `l2_constants_alibi`.
    """

    c: float
    column_mass: float
    column_moment: float

    def bracket(self, norm: Norm = "tok", *, head_dim: int | None = None) -> float:
        """Return the factor of one head whose value is ``P Z R`` and weight norms are 1, in
        ``norm``.

        ``tok``: ``1 + 4c``; ``2``: ``sqrt(colP) + 2c + 2 sqrt(c colT)`` (B3); ``inf``: ``1 + 2c (1
        + sqrt d)`` (B1, which for ``R = W^T W_V / sqrt d`` is ``2c + (2c + 1)/sqrt d`` in terms of
        ``W`` and ``W_V``).

        Raises:
            ConfigError: unknown norm, or ``norm="inf"`` without ``head_dim``.
        """
        check_norm(norm)
        if norm == "tok":
            return 1 + 4 * self.c
        if norm == 2:
            spread = math.sqrt(self.c * self.column_moment)
            return math.sqrt(self.column_mass) + 2 * self.c + 2 * spread
        if head_dim is None:
            raise ConfigError(
                "the inf-norm bracket of L2 attention depends on the head width: pass head_dim"
            )
        return 1 + 2 * self.c * (1 + math.sqrt(head_dim))


def l2_constants(seq_len: int, *, mask: MaskKind = "any", extra_keys: int = 0) -> L2Constants:
    """Return ``c``, ``colP``, ``colT`` for at most ``seq_len`` tokens under a 0/1 mask that keeps
    the diagonal (B3).

    Certified for every input. With ``mask="full"`` or ``"causal"`` padding is allowed as long as
    padded queries attend to themselves alone; causal windows count as ``"causal"``; anything else
    that keeps the diagonal is ``"any"``.

    Args:
        seq_len: largest number of tokens that can share a key, >= 1.
        mask: ``"full"``, ``"causal"`` or ``"any"``.
        extra_keys: keys that do not depend on the input (null or sink keys) which every query sees
            as well.

    Raises:
        ShapeError: ``seq_len < 1`` or ``extra_keys < 0``.
        ConfigError: unknown mask.

    >>> round(l2_constants(512, mask="full").bracket(2), 1), round(l2_constants(512).bracket("tok"), 1)
    (45.6, 16.5)
    """
    n = _check_length(seq_len)
    if extra_keys < 0:
        raise ShapeError(f"extra_keys must be >= 0, received {extra_keys}")
    mass, moment = (n + 1) / 2, _ONE_KEY * (n - 1)
    if mask not in MASK_KINDS:
        raise unknown_name("mask", str(mask), MASK_KINDS)
    if mask != "any":
        s = 1 if mask == "full" else 2
        # min over 0 < e <= 1 of sqrt(sN) N^(e/2) / (2.71828 e) is at e = 2 / ln N, or at e = 1 for
        # N < e^2.
        e = 1.0 if n < math.e**2 else 2 / math.log(n)
        mass = min(mass, math.sqrt(s * n))
        moment = min(moment, math.sqrt(s * n) * n ** (e / 2) / (math.e * e))
    return L2Constants(phi_inverse(float(n - 1 + extra_keys)), mass, moment)


def l2_constants_from_weights(weights: Tensor) -> L2Constants:
    """Return ``c``, ``colP``, ``colT`` for key weights ``w_ij = exp(b_ij - b_ii)``, zero where
    masked (B3, lemma L1).

    Args:
        weights: ``(..., N, N)``, non-negative; row = query; the diagonal must be 1 (the token
            itself is kept). Leading dimensions (heads) are taken together: the largest constant of
            any of them is returned.

    Raises:
        ShapeError: not square, or a diagonal entry is not 1 (``b_ij`` not normalised by ``b_ii``,
            or self is masked).

    Cost: O(N^2).
    """
    w = weights.detach().to(torch.float64)
    if w.ndim < 2 or w.shape[-1] != w.shape[-2]:
        raise ShapeError(f"key weights: expected (..., N, N), received {tuple(weights.shape)}")
    diagonal = w.diagonal(dim1=-2, dim2=-1)
    if not bool((diagonal == 1).all()):
        raise ShapeError(
            "key weights: every diagonal entry must be 1 (weights are exp(b_ij - b_ii), and a"
            " query that does not attend to itself has no Lipschitz bound); received diagonal"
            f" values from {float(diagonal.min()):g} to {float(diagonal.max()):g}"
        )
    others = w * (1 - torch.eye(w.shape[-1], dtype=w.dtype, device=w.device))
    c = phi_inverse(others.sum(-1).max())
    mass = 1 + (others / (1 + others)).sum(-2).max()
    return L2Constants(float(c), float(mass), float(phi_inverse(others).sum(-2).max()))


def l2_constants_alibi(slope: float, *, is_causal: bool = True) -> L2Constants:
    """Return length-free ``c``, ``colP``, ``colT`` for the additive bias ``-slope |i - j|`` (ALiBi;
    B3).

    Causal: ``M = 1/(e^m - 1)``, ``colP = 1 + sum_k 1/(1 + e^(mk))``, ``colT = sum_k
    phi^-1(e^(-mk))``; without the causal mask each sum counts twice. The infinite sums are cut
    where the geometric tail, which is added, is < 1e-12.

    Raises:
        ConfigError: ``slope <= 0`` (then the constants grow with the number of tokens: use
            `l2_constants`).

    >>> alibi = l2_constants_alibi(0.5)
    >>> round(alibi.bracket(2), 2), round(alibi.bracket("tok"), 2)
    (3.12, 2.54)
    """
    if not (slope > 0 and math.isfinite(slope)):
        raise ConfigError(
            f"a length-free ALiBi bound needs a slope > 0, received {slope}; use"
            " l2_constants(seq_len) else"
        )
    sides = 1 if is_causal else 2
    terms = min(1 + math.ceil((30 - math.log(-math.expm1(-slope))) / slope), 10_000_000)
    weights = torch.exp(-slope * torch.arange(1, terms + 1, dtype=torch.float64))
    tail = math.exp(-slope * (terms + 1)) / -math.expm1(-slope)
    mass = float((weights / (1 + weights)).sum()) + tail
    moment = float(phi_inverse(weights).sum()) + tail / math.e
    return L2Constants(phi_inverse(sides / math.expm1(slope)), 1 + sides * mass, sides * moment)


def kim_bracket(seq_len: int, *, norm: Literal["inf", 2], head_dim: int) -> float:
    """Return the bracket of Kim et al. (2021), Theorem 3.2, with their normalisation ``A_h = W_h
    W_h^T / sqrt d``.

    ``inf``: ``4c + 1/sqrt d``; ``2``: ``sqrt(N/d) (4c + 1)``. Valid (for p=2 with ``|W_h|^4`` under
    the root; the printed power 2 is a slip), but never below `l2_bracket`; here to compare against.

    >>> round(kim_bracket(512, norm=2, head_dim=1), 1)
    373.8
    """
    c = phi_inverse(float(_check_length(seq_len) - 1))
    if norm == "inf":
        return 4 * c + 1 / math.sqrt(head_dim)
    return math.sqrt(seq_len / head_dim) * (4 * c + 1)


def l2_bracket(
    seq_len: int,
    *,
    norm: Norm = "tok",
    mask: MaskKind = "any",
    head_dim: int | None = None,
    extra_keys: int = 0,
) -> float:
    """Return the factor by which one tied L2 attention head exceeds the norms of its weights, for
    ``seq_len`` tokens.

    Short for ``l2_constants(seq_len, mask=mask).bracket(norm, head_dim=head_dim)``; see there.

    >>> [round(l2_bracket(512, norm=2, mask=m), 1) for m in ("any", "causal", "full")]
    [70.8, 52.8, 45.6]
    """
    return l2_constants(seq_len, mask=mask, extra_keys=extra_keys).bracket(norm, head_dim=head_dim)


def _check_length(seq_len: int) -> int:
    if isinstance(seq_len, bool) or not isinstance(seq_len, int) or seq_len < 1:
        raise ShapeError(f"seq_len must be a whole number of tokens >= 1, received {seq_len!r}")
    return seq_len
