"""The factors of T-Fixup and DT-Fixup, as numbers."""

from __future__ import annotations

from typing import Annotated

from wellposed.call_checks import checked_arguments
from wellposed.options import Ge, Size


@checked_arguments
def t_fixup_encoder_factor(layers: Size) -> float:
    """Return 0.67 N^(-1/4), for an encoder of N layers that feeds a decoder.

    Exact. Huang et al. (2020), appendix C, as printed (docs/theory/fixup.md).

    >>> round(t_fixup_encoder_factor(6), 5)
    0.42809
    """
    return 0.67 * layers**-0.25


@checked_arguments
def t_fixup_decoder_factor(layers: Size) -> float:
    """Return (9N)^(-1/4), exact, for embeddings and N decoder layers with cross-attention.

    >>> round(t_fixup_decoder_factor(6), 5)
    0.36889
    """
    return (9 * layers) ** -0.25


@checked_arguments
def t_fixup_factor(blocks: Size) -> float:
    """Return (3K)^(-1/4), the factor of one stack of K residual blocks and of its embeddings.

    Exact. Derived in docs/theory/fixup.md; Huang et al. (2020) treat encoder-decoders only.

    Args:
        blocks: K, residual blocks: two a layer, three with cross-attention.

    Raises:
        ConfigError: K < 1.

    Cost: a few float operations. When not to use: gated feed-forward networks, normalised inputs.

    >>> round(t_fixup_factor(12), 5)
    0.40825
    """
    return (3 * blocks) ** -0.25


@checked_arguments
def dt_fixup_factor(layers: Size, largest_norm: Annotated[float, Ge(0)]) -> float:
    """Return (N (4 mu^2 + 2 mu + 2))^(-1/2), for N new layers with inputs of norm <= mu.

    Exact. Xu et al. (2021), "Optimizing Deeper Transformers on Small Datasets", section 3.

    >>> [round(dt_fixup_factor(n, mu), 6) for n, mu in [(24, 10.0), (8, 10.0), (8, 1.0)]]
    [0.009937, 0.017211, 0.125]
    """
    return (layers * (4 * largest_norm**2 + 2 * largest_norm + 2)) ** -0.5
