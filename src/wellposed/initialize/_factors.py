"""The factors of T-Fixup and DT-Fixup, as numbers."""

from __future__ import annotations

from typing import Annotated

from wellposed.call_checks import checked_arguments
from wellposed.options import Ge, Size


@checked_arguments
def t_fixup_encoder_factor(layers: Size) -> float:
    """Return 0.67 N^(-1/4), the factor of an encoder of N layers that feeds a decoder.

    Exact. Huang et al. (2020), appendix C: with inputs of size x = (9N)^(-1/4), N attention and N
    feed-forward blocks move the output by order one where 2N (2 v^2 x^2 + v^4) = 1, so v =
    ((sqrt(22) - 2) / 6)^(1/2) N^(-1/4); the paper prints, and its code uses, 0.67 for the constant
    0.66963.

    >>> round(t_fixup_encoder_factor(6), 5)
    0.42809
    """
    return 0.67 * layers**-0.25


@checked_arguments
def t_fixup_decoder_factor(layers: Size) -> float:
    """Return (9N)^(-1/4), the factor of a decoder of N layers with cross-attention, and of
    embeddings.

    Exact. Huang et al. (2020), appendix C: 3N residual blocks with v = w = x give 3N * 3 v^4 = 1.

    >>> round(t_fixup_decoder_factor(6), 5)
    0.36889
    """
    return (9 * layers) ** -0.25


@checked_arguments
def t_fixup_factor(blocks: Size) -> float:
    """Return (3K)^(-1/4), the factor of one stack of K residual blocks and of its embeddings.

    Exact. Not in Huang et al. (2020), who treat encoder-decoders only; it is their equation 8 for
    one stack. A block ``x + w v x`` changes by ``(v^2 + w^2) x^2 + v^2 w^2`` in one step of
    gradient descent of size one; with v = w and inputs of size x = v, K blocks change the output by
    3 K v^4, which is set to 1: (6N)^(-1/4) for the 2N blocks of an encoder-only or decoder-only
    model, (9N)^(-1/4) for the 3N blocks of a decoder.

    Args:
        blocks: K, residual blocks: two a layer, three with cross-attention.

    Raises:
        ConfigError: K < 1.

    Cost: a few float operations. When not to use: blocks whose branch is not a product of two
    weights (gated feed-forward), or whose input is normalised.

    >>> round(t_fixup_factor(12), 5)
    0.40825
    """
    return (3 * blocks) ** -0.25


@checked_arguments
def dt_fixup_factor(layers: Size, largest_norm: Annotated[float, Ge(0)]) -> float:
    """Return (N (4 mu^2 + 2 mu + 2))^(-1/2), the factor of N new layers whose inputs have norm at
    most mu.

    Exact. Xu et al. (2021), "Optimizing Deeper Transformers on Small Datasets", section 3.

    >>> [round(dt_fixup_factor(n, mu), 6) for n, mu in [(24, 10.0), (8, 10.0), (8, 1.0)]]
    [0.009937, 0.017211, 0.125]
    """
    return (layers * (4 * largest_norm**2 + 2 * largest_norm + 2)) ** -0.5
