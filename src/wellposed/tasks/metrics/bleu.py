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


def score_texts(
    hypotheses: Sequence[str], references: Sequence[str], *, bleu_tokens: str = "13a"
) -> TextScores:
    """Return corpus BLEU (Papineni et al. 2002) and chrF2 (Popović 2015) of ``hypotheses``, in
    0..100.

    Status: exact, by sacrebleu (Post 2018). One reference a hypothesis, in the same order.
    ``bleu_tokens`` says how
    BLEU cuts words: 13a for running text, none for text that is tokenised, char for characters. Not
    for one sentence.

    >>> scored = score_texts(["the cat sat on the mat"], ["the cat sat on a mat"])
    >>> round(scored.scores["bleu"], 2), scored.signatures["bleu"].split("|version")[0]
    (53.73, 'nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp')
    """
    if len(hypotheses) != len(references) or not references:
        raise DataError(
            f"{len(hypotheses)} hypotheses and {len(references)} references, expected as many, at"
            " least 1"
        )
    chrf = _library().CHRF()
    scored = {
        "bleu": corpus_bleu(hypotheses, references, tokenize=bleu_tokens),
        "chrf": (_score(chrf, hypotheses, references), str(chrf.get_signature())),
    }
    return TextScores(
        {name: score for name, (score, _) in scored.items()},
        {name: how for name, (_, how) in scored.items()},
    )


def corpus_bleu(
    hypotheses: Sequence[str], references: Sequence[str], **options: Any
) -> tuple[float, str]:
    """Return sacrebleu's corpus BLEU in 0..100 and its signature; ``options`` are those of its
    class."""
    # `force`: text tokenised beforehand is what some corpora hold; sacrebleu only warns about it.
    metric = _library().BLEU(force=True, **options)
    return _score(metric, hypotheses, references), str(metric.get_signature())


def _score(metric: Any, hypotheses: Sequence[str], references: Sequence[str]) -> float:
    return float(metric.corpus_score(list(hypotheses), [list(references)]).score)


def _library() -> Any:
    try:
        import sacrebleu.metrics
    except ImportError as error:
        raise missing_extra("sacrebleu", "train", "BLEU and chrF") from error
    return sacrebleu.metrics
