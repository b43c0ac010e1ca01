"""BLEU against the formula of Papineni et al. worked by hand, signatures, and counts that
differ."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from wellposed.errors import DataError
from wellposed.tasks.metrics.bleu import score_texts

HYPOTHESES = ["the cat sat on the mat today", "a dog ran across the green field"]
REFERENCES = ["the cat sat on a mat today .", "a dog ran across the field"]


def bleu(hypotheses: list[str], references: list[str]) -> float:
    """Return 100 exp(min(0, 1 - r/c)) prod_n p_n^(1/4), with clipped counts over the corpus."""
    precisions = []
    for n in range(1, 5):
        matched = total = 0
        for hypothesis, reference in zip(hypotheses, references, strict=True):
            grams = [
                Counter(zip(*(words.split()[i:] for i in range(n)), strict=False))
                for words in (hypothesis, reference)
            ]
            matched += sum((grams[0] & grams[1]).values())
            total += sum(grams[0].values())
        precisions.append(matched / total)
    c, r = (sum(len(text.split()) for text in texts) for texts in (hypotheses, references))
    return 100 * math.exp(min(0.0, 1 - r / c)) * math.prod(precisions) ** 0.25


def test_bleu_is_that_of_the_paper() -> None:
    assert score_texts(HYPOTHESES, REFERENCES).scores["bleu"] == pytest.approx(
        bleu(HYPOTHESES, REFERENCES), abs=1e-9
    )


def test_signatures_say_what_was_counted() -> None:
    scored = score_texts(HYPOTHESES, REFERENCES, bleu_tokens="char")
    assert "tok:char" in scored.signatures["bleu"]
    assert "nc:6" in scored.signatures["chrf"]
    assert score_texts(REFERENCES, REFERENCES).scores == pytest.approx(
        {"bleu": 100.0, "chrf": 100.0}
    )


@pytest.mark.parametrize(("hypotheses", "references"), [(["a"], []), ([], [])])
def test_texts_without_partners_are_refused(hypotheses: list[str], references: list[str]) -> None:
    with pytest.raises(DataError, match="expected as many"):
        score_texts(hypotheses, references)
