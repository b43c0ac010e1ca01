"""The nine scores of generated replies of Zhang et al. (2021, Table 4)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wellposed.errors import ShapeError
from wellposed.tasks.metrics.embedding import WordVectors, embedding_scores, sentence_cosine
from wellposed.tasks.metrics.overlap import cider, corpus_bleu, meteor, rouge_l

OVERLAP_METRICS = ("bleu_1", "bleu_4", "meteor", "rouge_l", "cider")
"""The measures of generated replies that need no file."""
VECTOR_METRICS = ("embedding_average", "vector_extrema", "greedy_matching")
"""Need word vectors."""
SENTENCE_METRIC = "sentence_cosine"
"""Needs a sentence encoder."""
DIALOGUE_METRICS = (*OVERLAP_METRICS, SENTENCE_METRIC, *VECTOR_METRICS)
_WORD = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")


def words_of(text: str) -> list[str]:
    """Return the lower-case words and punctuation marks of a text, an apostrophe inside a word
    kept.

    >>> words_of("I'm fine , and you?")
    ["i'm", 'fine', ',', 'and', 'you', '?']
    """
    return _WORD.findall(text.lower())


@dataclass(frozen=True)
class DialogueScores:
    """The measures in percent, and how they were made."""

    scores: Mapping[str, float]
    """By name of `DIALOGUE_METRICS`, those that could be computed, and ``cider_d``; all times
    100."""
    not_computed: Mapping[str, str]
    """What the others need, by name."""
    details: Mapping[str, Any]
    """Signatures of BLEU, words without a vector, variants of METEOR, ROUGE-L and CIDEr."""


def dialogue_scores(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    vectors: WordVectors | None = None,
    sentence_encoder: Callable[[Sequence[str]], Any] | None = None,
    synonyms: Mapping[str, str] | None = None,
) -> DialogueScores:
    """Return the nine measures of Zhang et al. (2021, Table 4) of replies against one reference
    each, in percent.

    BLEU-1 and BLEU-4 are sacrebleu's corpus BLEU up to order 1 and 4 (tokenizer 13a, lower case,
    its default smoothing; signatures in ``details``). METEOR, ROUGE-L (beta 1.2), CIDEr and the
    three of word vectors are means over pairs on the words of `words_of`; see `meteor`, `rouge_l`,
    `cider`, `embedding_scores`. ``sentence_cosine`` replaces SkipThought. ``cider_d``, a tenth
    number, is what the paper's evaluation suite calls CIDEr.

    Status: exact; each differs from the paper's suite as its own page says (METEOR is not METEOR
    1.5, SkipThought is replaced), so that rows of one table compare with each other and not with
    the paper's.

    Args:
        hypotheses: generated replies; empty ones count as 0 in every measure.
        references: the replies of the data, in the same order.
        vectors: of `read_word_vectors`; without it three measures are named in ``not_computed``.
        sentence_encoder: from n sentences to an (n, width) array; without it one measure is.
        synonyms: as in `meteor`.

    Raises:
        ShapeError: other numbers of hypotheses and references, or none.
        ConfigError: sacrebleu is not installed.

    Cost: some 10 ms a hundred pairs without the encoder.

    >>> found = dialogue_scores(["i am fine .", "no"], ["i am fine .", "not at all"])
    >>> round(found.scores["bleu_1"], 1), round(found.scores["rouge_l"], 1), list(found.not_computed)
    (53.6, 50.0, ['sentence_cosine', 'embedding_average', 'vector_extrema', 'greedy_matching'])
    """
    if len(hypotheses) != len(references) or not references:
        raise ShapeError(
            f"dialogue_scores: {len(hypotheses)} hypotheses and {len(references)} references;"
            " expected as many of each, one at least"
        )
    said, wanted = [words_of(text) for text in hypotheses], [words_of(text) for text in references]
    pairs, count = list(zip(said, wanted, strict=True)), len(references)
    modules = "synonyms of the user" if synonyms else "no WordNet"
    details: dict[str, Any] = {
        "meteor": f"nltk, Banerjee & Lavie 2005; exact, Porter stem, {modules}",
        "rouge_l": "rouge-score, beta 1.2",
        "cider": "Vedantam et al. 2015; stemmed, one reference",
        "empty_hypotheses": sum(not words for words in said),
    }
    scores = {
        "meteor": sum(meteor(*pair, synonyms=synonyms) for pair in pairs) / count,
        "rouge_l": sum(rouge_l(*pair) for pair in pairs) / count,
        "cider": sum(cider(said, wanted)) / count,
        "cider_d": sum(cider(said, wanted, variant="cider_d")) / count,
    }
    for order in (1, 4):
        score, signature = corpus_bleu(
            hypotheses, references, max_ngram_order=order, lowercase=True
        )
        scores[f"bleu_{order}"] = score / 100
        details[f"bleu_{order}"] = f"{signature}|max_ngram_order:{order}"
    missing: dict[str, str] = {}
    if sentence_encoder is None:
        missing[SENTENCE_METRIC] = "needs a sentence encoder"
    else:
        scores[SENTENCE_METRIC] = sentence_cosine(hypotheses, references, sentence_encoder)
    if vectors is None:
        missing |= dict.fromkeys(VECTOR_METRICS, "needs word vectors")
    else:
        similar, counts = embedding_scores(said, wanted, vectors)
        scores |= similar
        details |= counts
    return DialogueScores({name: 100 * value for name, value in scores.items()}, missing, details)
