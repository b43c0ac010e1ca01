"""CIDEr and CIDEr-D (Vedantam et al. 2015): cosines of n-gram counts weighted by how rare an n-gram
is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal, TypeAlias

from wellposed.errors import ShapeError
from wellposed.tasks.metrics.stem import porter_stem

ORDERS = (1, 2, 3, 4)
SIGMA = 6.0

Gram: TypeAlias = "tuple[str, ...]"
Weights: TypeAlias = "dict[Gram, float]"


def cider(
    hypotheses: Sequence[Sequence[str]],
    references: Sequence[Sequence[str]],
    *,
    variant: Literal["cider", "cider_d"] = "cider",
) -> list[float]:
    """Return per pair the mean over n = 1..4 of the cosine of tf-idf weighted n-gram counts.

    The weight of an n-gram is its count times ``log(pairs / max(1, references that hold it))``.
    ``"cider"`` is eq. 1-3 of Vedantam et al. (2015): words are stemmed (Porter), the cosine is
    plain, values are in [0, 1]. ``"cider_d"`` is their CIDEr-D, which the coco-caption code and the
    suite of Sharma et al. (2017) print as "CIDEr": no stemming, the hypothesis' weights clipped to
    the reference's in the product, times ``exp(-(difference in length)^2 / (2 6^2))``, times 10.

    Status: exact. One reference a hypothesis, both as words. The references also fix the weights,
    so a value belongs
    to a set: the same pair scores differently in another one, and a set of one pair scores 0, as
    every weight is 0. Orders n for which a sentence has no n-gram of positive weight count as 0, as
    in the authors' code.

    >>> said = ["a cat sat on the mat".split(), "he can swim very well".split()]
    >>> cider(said, said), cider(said, said, variant="cider_d")
    ([1.0, 1.0], [10.0, 10.0])
    """
    if len(hypotheses) != len(references):
        raise ShapeError(
            f"cider: {len(hypotheses)} hypotheses and {len(references)} references; expected as"
            " many"
        )
    stemmed = variant == "cider"
    said = [_grams(words, stem=stemmed) for words in hypotheses]
    wanted = [_grams(words, stem=stemmed) for words in references]
    documents = Counter(gram for counts in wanted for gram in counts)
    scores = []
    for hypothesis, reference, first, second in zip(
        said, wanted, hypotheses, references, strict=True
    ):
        pair = (
            _weigh(hypothesis, documents, len(references)),
            _weigh(reference, documents, len(references)),
        )
        if stemmed:
            scores.append(_mean_cosine(*pair, clip=False))
        else:
            fit = math.exp(-((len(first) - len(second)) ** 2) / (2 * SIGMA**2))
            scores.append(10 * fit * _mean_cosine(*pair, clip=True))
    return scores


def _grams(words: Sequence[str], *, stem: bool) -> Counter[Gram]:
    words = [porter_stem(word) for word in words] if stem else list(words)
    return Counter(tuple(words[i : i + n]) for n in ORDERS for i in range(len(words) - n + 1))


def _weigh(counts: Counter[Gram], documents: Counter[Gram], total: int) -> dict[int, Weights]:
    weights: dict[int, Weights] = {n: {} for n in ORDERS}
    for gram, count in counts.items():
        weights[len(gram)][gram] = count * math.log(total / max(1, documents[gram]))
    return weights


def _mean_cosine(
    hypothesis: dict[int, Weights], reference: dict[int, Weights], *, clip: bool
) -> float:
    return math.fsum(_cosine(hypothesis[n], reference[n], clip=clip) for n in ORDERS) / len(ORDERS)


def _cosine(hypothesis: Weights, reference: Weights, *, clip: bool) -> float:
    norms = math.hypot(*hypothesis.values()) * math.hypot(*reference.values())
    if norms == 0:
        return 0.0
    pairs = [(weight, reference[gram]) for gram, weight in hypothesis.items() if gram in reference]
    return min(1.0, math.fsum((min(pair) if clip else pair[0]) * pair[1] for pair in pairs) / norms)
