"""ROUGE-L (Lin 2004): the longest common subsequence of two sentences as an F measure."""

from __future__ import annotations

from collections.abc import Sequence

from wellposed.errors import ConfigError


def rouge_l(hypothesis: Sequence[str], reference: Sequence[str], *, beta: float = 1.2) -> float:
    """Return ``(1 + beta^2) R P / (R + beta^2 P)`` with ``P = LCS / |hypothesis|`` and ``R = LCS /
    |reference|``.

    Status: exact, in [0, 1]. Source: Lin (2004, "ROUGE", eq. 2-4), who leaves beta open; 1.2 is
    that of the evaluation suite (Sharma et al. 2017) with which Zhang et al. (2021) made their
    Table 4. Infinity gives recall alone.

    >>> round(rouge_l("police kill the gunman".split(), "police killed the gunman".split(), beta=1.0), 4)
    0.75
    """
    if not beta > 0:
        raise ConfigError(f"rouge_l: beta = {beta!r}, expected a positive number")
    common = longest_common_subsequence(hypothesis, reference)
    if common == 0:
        return 0.0
    precision, recall = common / len(hypothesis), common / len(reference)
    if beta == float("inf"):
        return recall
    return (1 + beta**2) * recall * precision / (recall + beta**2 * precision)


def longest_common_subsequence(first: Sequence[str], second: Sequence[str]) -> int:
    """Return the length of the longest sequence that both hold in this order, with gaps.

    >>> longest_common_subsequence("abcbdab", "bdcaba")
    4
    """
    row = [0] * (len(second) + 1)
    for word in first:
        diagonal = 0
        for index, other in enumerate(second, start=1):
            above = row[index]
            row[index] = diagonal + 1 if word == other else max(above, row[index - 1])
            diagonal = above
    return row[-1]
