"""Corpus BLEU and chrF of `sacrebleu`, each with the signature that makes the number repeatable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wellposed.errors import DataError, missing_extra


@dataclass(frozen=True)
class TextScores:
    """Scores in 0..100 by name, and the signature of each."""

    scores: dict[str, float]
    signatures: dict[str, str]


def score_texts(hypotheses: Sequence[str], references: Sequence[str], *, bleu_tokens: str = "13a") -> TextScores:
    """Return corpus BLEU (Papineni et al. 2002) and chrF2 (Popović 2015) of ``hypotheses``, in 0..100.

    Status: exact, by sacrebleu (Post 2018). One reference per hypothesis, in the same order.

    Args:
        hypotheses, references: as many texts.
        bleu_tokens: how BLEU cuts words: 13a for running text, none for text that is tokenised, char for characters.

    Raises:
        DataError: another number of references, or none at all.
        ConfigError: `sacrebleu` is not installed.

    Cost: some 5,000 sentences a second. Not for a single sentence: BLEU is a corpus score.

    >>> scored = score_texts(["the cat sat on the mat"], ["the cat sat on a mat"])
    >>> round(scored.scores["bleu"], 2), scored.signatures["bleu"].split("|version")[0]
    (53.73, 'nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp')
    """
    if len(hypotheses) != len(references) or not references:
        raise DataError(f"{len(hypotheses)} hypotheses and {len(references)} references, expected as many, at least 1")
    try:
        from sacrebleu.metrics.bleu import BLEU
        from sacrebleu.metrics.chrf import CHRF
    except ImportError as error:
        raise missing_extra("sacrebleu", "train", "BLEU and chrF") from error
    # `force`: text tokenised beforehand is what some corpora hold; sacrebleu only warns about it.
    metrics: dict[str, Any] = {"bleu": BLEU(tokenize=bleu_tokens, force=True), "chrf": CHRF()}
    scores = {
        name: float(metric.corpus_score(list(hypotheses), [list(references)]).score) for name, metric in metrics.items()
    }
    return TextScores(scores, {name: str(metric.get_signature()) for name, metric in metrics.items()})
