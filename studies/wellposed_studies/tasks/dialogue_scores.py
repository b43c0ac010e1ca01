"""Nine measures of replies (Zhang et al. 2021, Table 4): BLEU (sacrebleu), METEOR (nltk), ROUGE-L
(rouge-score), CIDEr, and those of `wellposed_studies.tasks.vectors`."""

from __future__ import annotations

import functools
import math
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias

from wellposed.errors import ShapeError
from wellposed_lab.tasks.metrics import corpus_bleu, unspaced_share
from wellposed_lab.tasks.text.tokenizers import UNSPACED
from wellposed_studies.tasks.vectors import WordVectors, embedding_scores, sentence_cosine

ORDERS = (1, 2, 3, 4)
BETA = 1.2
_PLAIN = re.compile(r"[a-z]{3,}")

Gram: TypeAlias = "tuple[str, ...]"
Weights: TypeAlias = "dict[Gram, float]"


@functools.lru_cache(maxsize=1 << 16)
def porter_stem(word: str) -> str:
    """Return nltk's Porter (1980) stem of a word of three or more letters a to z, else the word.

    >>> [porter_stem(word) for word in ("relational", "hopping", "cats", "cat", "42")]
    ['relat', 'hop', 'cat', 'cat', '42']
    """
    return _stemmer().stem(word) if _PLAIN.fullmatch(word) else word


@functools.cache
def _stemmer() -> Any:
    from nltk.stem.porter import PorterStemmer  # it takes over a second

    return PorterStemmer(PorterStemmer.ORIGINAL_ALGORITHM)


def meteor(hypothesis: Sequence[str], reference: Sequence[str]) -> float:
    """Return ``F (1 - 0.5 (chunks / matches)^3)`` with ``F = 10 P R / (R + 9 P)``.

    Status: exact, by nltk, for lower-case words. Source: Banerjee & Lavie (2005, "METEOR: an
    automatic metric for MT evaluation"), modules exact and Porter stem. Without synonyms (WordNet
    is a download), so lower than with them. nltk matches a repeated word at its last place; the
    paper minimises crossings. This is not METEOR 1.5. No match, or an empty sentence, scores 0.

    >>> round(meteor("the cats sat".split(), "the cat was sitting".split()), 4)
    0.4808
    """
    from nltk.translate.meteor_score import single_meteor_score

    tools: dict[str, Any] = {
        "stemmer": SimpleNamespace(stem=porter_stem),
        "wordnet": SimpleNamespace(synsets=lambda _: []),
    }
    return float(single_meteor_score(reference, hypothesis, preprocess=str, **tools))


@functools.cache
def _rouge_scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(["rougeL"], tokenizer=SimpleNamespace(tokenize=str.split))


def rouge_l(hypothesis: Sequence[str], reference: Sequence[str]) -> float:
    """Return ``(1 + b^2) R P / (R + b^2 P)`` with b = 1.2, and P and R as in Lin (2004).

    ``P = LCS / |hypothesis|``, ``R = LCS / |reference|``. Status: exact, in [0, 1], by rouge-score;
    words have no white space. Source: Lin (2004, "ROUGE", eq. 2-4), who leaves b open; the suite of
    Sharma et al. (2017), used by Zhang et al. (2021), has 1.2.

    >>> round(rouge_l("police kill the gunman".split(), "police killed the gunman".split()), 4)
    0.75
    """
    score = _rouge_scorer().score(" ".join(reference), " ".join(hypothesis))["rougeL"]
    precision = score.precision
    recall = score.recall
    if not recall:
        return 0.0
    return (1 + BETA**2) * recall * precision / (recall + BETA**2 * precision)


def cider(hypotheses: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> list[float]:
    """Return per pair the mean over n = 1..4 of the cosine of tf-idf weighted n-gram counts.

    An n-gram weighs its count times ``log(pairs / max(1, references with it))``. Status: exact, one
    reference a hypothesis. Source: eq. 1-3 of Vedantam et al. (2015), with Porter stems and a plain
    cosine, in [0, 1]. This is not CIDEr-D, which coco-caption and Sharma et al. (2017) print as
    "CIDEr". Weights depend on all references; with one pair, and for orders without an n-gram of
    positive weight, they and the score are 0, as in the authors' code.

    >>> replies = ["a cat sat on the mat".split(), "he can swim very well".split()]
    >>> cider(replies, replies)
    [1.0, 1.0]
    """
    if len(hypotheses) != len(references):
        raise ShapeError(f"cider: {len(hypotheses)} hypotheses for {len(references)} references")
    wanted = list(map(_grams, references))
    documents = Counter(gram for counts in wanted for gram in counts)
    rarity = {gram: math.log(len(references) / count) for gram, count in documents.items()}
    unseen = math.log(max(1, len(references)))
    scores = []
    for words, counts in zip(hypotheses, wanted, strict=True):
        ours, theirs = (
            {gram: count * rarity.get(gram, unseen) for gram, count in side.items()}
            for side in (_grams(words), counts)
        )
        cosines = (_gram_cosine(ours, theirs, order) for order in ORDERS)
        scores.append(math.fsum(cosines) / len(ORDERS))

    return scores


def _grams(words: Sequence[str]) -> Counter[Gram]:
    words = [porter_stem(word) for word in words]
    return Counter(tuple(words[i : i + n]) for n in ORDERS for i in range(len(words) - n + 1))


def _gram_cosine(ours: Weights, wanted: Weights, order: int) -> float:
    ours, wanted = ({g: w for g, w in side.items() if len(g) == order} for side in (ours, wanted))
    norms = math.hypot(*ours.values()) * math.hypot(*wanted.values())
    if norms == 0:
        return 0.0
    pairs = [(weight, wanted[gram]) for gram, weight in ours.items() if gram in wanted]
    return min(1.0, math.fsum(math.prod(pair) for pair in pairs) / norms)


OVERLAP_METRICS = ("bleu_1", "bleu_4", "meteor", "rouge_l", "cider")
"""Measures that need no file."""
VECTOR_METRICS = ("embedding_average", "vector_extrema", "greedy_matching")
"""Measures that need word vectors."""
SENTENCE_METRIC = "sentence_cosine"
"""Measure that needs a sentence encoder."""
DIALOGUE_METRICS = (*OVERLAP_METRICS, SENTENCE_METRIC, *VECTOR_METRICS)


@functools.cache
def _word_pattern() -> re.Pattern[str]:
    every = map(chr, range(sys.maxunicode + 1))
    marks = re.escape("".join(char for char in every if unicodedata.category(char)[0] == "M"))
    letter = rf"(?:(?![{UNSPACED}])\w|[{marks}])"
    return re.compile(rf"[{UNSPACED}][{marks}]*|{letter}+(?:['’]{letter}+)*|[^\w\s]")


def words_of(text: str) -> list[str]:
    """Return the lower-case words and marks; in scripts without blanks each letter is a word.

    >>> words_of("I'm fine , and you?"), words_of("हिन्दी 你好")
    (["i'm", 'fine', ',', 'and', 'you', '?'], ['हिन्दी', '你', '好'])
    """
    return _word_pattern().findall(text.lower())


@dataclass(frozen=True)
class DialogueScores:
    """Measures in percent, and how they were computed."""

    scores: Mapping[str, float]
    """Computed measures by name (`DIALOGUE_METRICS`), times 100."""
    not_computed: Mapping[str, str]
    """Missing input of each other measure, by name."""
    details: Mapping[str, Any]
    """Signatures of BLEU, words without a vector, variants of METEOR, ROUGE-L and CIDEr."""


def dialogue_scores(
    hypotheses: Sequence[str],
    references: Sequence[str],
    *,
    vectors: WordVectors | None = None,
    sentence_encoder: Callable[[Sequence[str]], Any] | None = None,
) -> DialogueScores:
    """Return the nine measures of Zhang et al. (2021, Table 4), in percent, one reference a reply.

    BLEU-1 and BLEU-4 are sacrebleu's corpus BLEU (lower case, 13a, or char for scripts without
    blanks; default smoothing). The others are means over pairs on the words of `words_of`: see
    `meteor`, `rouge_l`, `cider` and `embedding_scores`. ``sentence_cosine`` replaces SkipThought.

    Status: exact, but each differs from the paper's suite as its docstring says. Compare rows of
    one table with each other, not with the paper. Cost: 10 ms per hundred pairs, and the encoder.

    Args:
        hypotheses: generated replies; empty ones count as 0 in every measure.
        references: the replies of the data, in the same order.
        vectors: from `read_word_vectors`; without it three measures are in ``not_computed``.
        sentence_encoder: from n sentences to an (n, width) array; without it one measure is.

    Raises:
        ShapeError: different numbers of hypotheses and references, or none.

    >>> scores = dialogue_scores(["i am fine .", "no"], ["i am fine .", "not at all"]).scores
    >>> round(scores["bleu_1"], 1), round(scores["rouge_l"], 1)
    (53.6, 50.0)
    """
    if len(hypotheses) != len(references) or not references:
        raise ShapeError(f"{len(hypotheses)} hypotheses for {len(references)} references")
    ours = [words_of(text) for text in hypotheses]
    wanted = [words_of(text) for text in references]
    pairs = list(zip(ours, wanted, strict=True))
    count = len(references)
    details: dict[str, Any] = {
        "meteor": "nltk, Banerjee & Lavie 2005; exact, Porter stem, no WordNet",
        "rouge_l": "rouge-score, beta 1.2",
        "cider": f"Vedantam et al. 2015; stemmed, one reference, weights of {count} references",
        "empty_hypotheses": sum(not words for words in ours),
    }
    scores = {
        "meteor": sum(meteor(*pair) for pair in pairs) / count,
        "rouge_l": sum(rouge_l(*pair) for pair in pairs) / count,
        "cider": sum(cider(ours, wanted)) / count,
    }
    tokens = "char" if unspaced_share(references) > 0.5 else "13a"
    if unspaced_share(references):
        details["words"] = "each letter of a script without blanks is a word"

    for order in (1, 4):
        options = {"max_ngram_order": order, "lowercase": True, "tokenize": tokens}
        score, signature = corpus_bleu(hypotheses, references, **options)
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
        similar, counts = embedding_scores(ours, wanted, vectors)
        scores |= similar
        details |= counts

    return DialogueScores({name: 100 * value for name, value in scores.items()}, missing, details)
