"""The part of the Lipschitz bounds of L2 self-attention that depends on tokens, mask and norm only.

Notation: The number of tokens is ``N``, the head width ``d``. With ``phi(c) = c e^(c+1)``, ``c =
phi^-1(M)``. Here ``M`` is the total weight of the other keys of a query (``N - 1`` for a 0/1 mask
that keeps the diagonal).
Sources: Kim, Papamakarios, Mnih (2021), Theorem 3.2; theory notes B1 to B3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

from wellposed.errors import ConfigError, NotLipschitzError, ShapeError, unknown_name
from wellposed.linalg._norms import Norm, check_norm

MaskKind = Literal["full", "causal", "any"]
MASK_KINDS: tuple[MaskKind, ...] = ("full", "causal", "any")

# phi_inverse(1), the largest value of t e^-t / (1 + e^-t): one token's part of a column of P * t.
_ONE_KEY = 0.27846454276107374


def phi_inverse(mass: float) -> float:
    """Return ``c`` with ``c e^(c+1) = mass``, that is ``W_0(mass / e)``.

    Status: exact to a few units in the last place of float64, strictly increasing. Source: Kim et
    al. (2021), Theorem 3.2 (``phi^-1``); Halley iteration on ``w - x e^-w`` (Corless et al., 1996).
    ``mass`` is the weight of the other keys, ``N - 1`` for ``N`` tokens. `NotLipschitzError` if it
    is negative, NaN or infinite.

    >>> round(phi_inverse(511.0), 7)
    3.8804249
    """
    if not 0 <= mass < math.inf:
        raise NotLipschitzError(
            f"phi_inverse: expected a finite weight >= 0 of the other keys, received {mass}"
        )
    x = mass / math.e
    w = math.log1p(x)
    for _ in range(8):
        residual = w - x * math.exp(-w)
        w = max(0.0, w - residual / (w + 1 - (w + 2) * residual / (2 * w + 2)))
    return w


@dataclass(frozen=True)
class L2Constants:
    """The numbers in every bound of L2 self-attention (theory notes B3, B24), from `l2_constants`.

    Here ``c = max_i phi^-1(M_i)``. The largest column sum of ``P`` is at most ``column_mass``, that
    of ``P_ij t_ij`` at most ``column_moment``; ``t`` is the scaled squared distance.
    """

    c: float
    column_mass: float
    column_moment: float
    row_excess: float
    """Bound of the mean of ``max(t - 1, 0)`` over a row of ``P``; ``c`` bounds that of ``t``."""

    def without_joint_keys(self) -> L2Constants:
        """Return the constants of B3, which adds averages and keys: contractive layers divide by
        its bound, so that they compute what they did in earlier versions."""
        return replace(self, row_excess=self.c)

    def bracket(self, norm: Norm = "tok", *, head_dim: int | None = None) -> float:
        """Return the factor in ``norm`` of one head of value ``P Z R`` and weights of norm 1.

        In tok ``1 + 2e + 2c`` with e = ``row_excess`` (B24).
        In 2 ``sqrt(colP) + 2c + 2 sqrt(c colT)`` (B3). In inf ``1 + 2c (1 + sqrt d)`` (B1).
        `ConfigError` for ``"inf"`` without ``head_dim``, or an unknown norm.
        """
        check_norm(norm)
        if norm == "tok":
            return 1 + 2 * self.row_excess + 2 * self.c
        if norm == 2:
            spread = math.sqrt(self.c * self.column_moment)
            return math.sqrt(self.column_mass) + 2 * self.c + 2 * spread
        if head_dim is None:
            raise ConfigError(
                "the inf-norm bracket of L2 attention depends on the head width: pass head_dim"
            )
        return 1 + 2 * self.c * (1 + math.sqrt(head_dim))


def l2_constants(seq_len: int, *, mask: MaskKind = "any") -> L2Constants:
    """Return ``c``, ``colP``, ``colT`` and the excess for a 0/1 mask that keeps the diagonal (B3).

    Status: certified for every input of at most ``seq_len`` tokens. With ``mask="full"`` or
    ``"causal"`` padding is allowed if padded queries attend to themselves alone. Causal windows
    count as ``"causal"``; any other mask that keeps the diagonal is ``"any"``.

    Args:
        seq_len: largest number of tokens that can share a key, >= 1.
        mask: ``"full"``, ``"causal"`` or ``"any"``.

    Raises:
        ShapeError: ``seq_len < 1``. ConfigError: unknown mask.

    >>> round(l2_constants(512, mask="full").bracket(2), 1)
    45.6
    """
    n = _check_length(seq_len)
    mass = (n + 1) / 2
    moment = _ONE_KEY * (n - 1)
    if mask not in MASK_KINDS:
        raise unknown_name("mask", str(mask), MASK_KINDS)

    if mask != "any":
        s = 1 if mask == "full" else 2
        # min over 0 < e <= 1 of sqrt(sN) N^(e/2) / (2.71828 e) is at e = 2 / ln N, or at e = 1 for
        # N < e^2.
        e = 1.0 if n < math.e**2 else 2 / math.log(n)
        mass = min(mass, math.sqrt(s * n))
        moment = min(moment, math.sqrt(s * n) * n ** (e / 2) / (math.e * e))

    others = float(n - 1)
    # e exp(e) = M / 2.71828^2; the margin covers the division.
    excess = phi_inverse(others / math.e) * (1 + 1e-14)
    return L2Constants(phi_inverse(others), mass, moment, excess)


def kim_bracket(seq_len: int, *, norm: Literal["inf", 2], head_dim: int) -> float:
    """Return the bracket of Kim et al. (2021), Theorem 3.2, with ``A_h = W_h W_h^T / sqrt d``.

    ``inf``: ``4c + 1/sqrt d``; ``2``: ``sqrt(N/d) (4c + 1)``. Valid (for 2 with ``|W_h|^4`` under
    the root; the printed power 2 is a slip), but never below that of `l2_constants`: for
    comparison.

    >>> round(kim_bracket(512, norm=2, head_dim=1), 1)
    373.8
    """
    c = phi_inverse(float(_check_length(seq_len) - 1))
    if norm == "inf":
        return 4 * c + 1 / math.sqrt(head_dim)
    return math.sqrt(seq_len / head_dim) * (4 * c + 1)


def _check_length(seq_len: int) -> int:
    if isinstance(seq_len, bool) or not isinstance(seq_len, int) or seq_len < 1:
        raise ShapeError(f"seq_len must be a whole number of tokens >= 1, received {seq_len!r}")
    return seq_len
