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
    """Return the stem of a lower-case English word by the five steps of Porter (1980), of nltk.

    Words that are not three or more of the letters a to z are their own stem.

    >>> [porter_stem(word) for word in ("relational", "hopping", "cats", "cat", "42")]
    ['relat', 'hop', 'cat', 'cat', '42']
    """
    return _stemmer().stem(word) if _PLAIN.fullmatch(word) else word


@functools.cache
def _stemmer() -> Any:
    from nltk.stem.porter import PorterStemmer  # it takes over a second

    return PorterStemmer(PorterStemmer.ORIGINAL_ALGORITHM)


def meteor(hypothesis: Sequence[str], reference: Sequence[str]) -> float:
    """Return ``F (1 - penalty)`` with ``F = 10 P R / (R + 9 P)`` and ``penalty = 0.5 (chunks /
    matches)^3``.

    Status: exact, by nltk. Source: Banerjee & Lavie (2005, "METEOR: an automatic metric for MT
    evaluation"), with the modules exact and Porter stem, without synonyms: WordNet would have to be
    downloaded, and values are lower than with it. nltk links a word that occurs twice to its last
    place, where the paper looks for the fewest crossings. This is not METEOR 1.5 (other weights, paraphrase tables).

    Takes lower-case words. Equal sentences of n words score 1 - 0.5 / n^3; no match, or an empty
    sentence, scores 0.

    >>> words = "the cat sat on the mat".split()
    >>> meteor(words, words) == 1 - 0.5 / 6**3
    True
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
    """Return ``(1 + beta^2) R P / (R + beta^2 P)``, beta = 1.2, with ``P = LCS / |hypothesis|`` and
    ``R = LCS / |reference|``.

    Status: exact, in [0, 1]; P and R are rouge-score's. Source: Lin (2004, "ROUGE", eq. 2-4), who
    leaves beta open; 1.2 is that of the evaluation suite (Sharma et al. 2017) with which Zhang et
    al. (2021) made their Table 4. Words hold no white space.

    >>> round(rouge_l("police kill the gunman".split(), "police killed the gunman".split()), 4)
    0.75
    """
    found = _rouge_scorer().score(" ".join(reference), " ".join(hypothesis))["rougeL"]
    precision, recall = found.precision, found.recall
    if not recall:
        return 0.0
    return (1 + BETA**2) * recall * precision / (recall + BETA**2 * precision)


def cider(hypotheses: Sequence[Sequence[str]], references: Sequence[Sequence[str]]) -> list[float]:
    """Return per pair the mean over n = 1..4 of the cosine of tf-idf weighted n-gram counts.

    The weight of an n-gram is its count times ``log(pairs / max(1, references that hold it))``.
    Eq. 1-3 of Vedantam et al. (2015): words are stemmed (Porter), the cosine is plain, values are in
    [0, 1]. It is not their CIDEr-D, which the coco-caption code and the suite of Sharma et al. (2017)
    print as "CIDEr".

    Status: exact. One reference a hypothesis, both as words. The references also fix the weights,
    so a value belongs to a set: the same pair scores differently in another one, and a set of one
    pair scores 0, as every weight is 0. Orders n for which a sentence has no n-gram of positive weight count as 0, as
    in the authors' code.

    >>> said = ["a cat sat on the mat".split(), "he can swim very well".split()]
    >>> cider(said, said)
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
        said, held = (
            {gram: count * rarity.get(gram, unseen) for gram, count in each.items()}
            for each in (_grams(words), counts)
        )
        cosines = (_gram_cosine(said, held, order) for order in ORDERS)
        scores.append(math.fsum(cosines) / len(ORDERS))
    return scores


def _grams(words: Sequence[str]) -> Counter[Gram]:
    words = [porter_stem(word) for word in words]
    return Counter(tuple(words[i : i + n]) for n in ORDERS for i in range(len(words) - n + 1))


def _gram_cosine(said: Weights, wanted: Weights, order: int) -> float:
    """Return the cosine of the weights of the grams of one order."""
    said, wanted = ({g: w for g, w in each.items() if len(g) == order} for each in (said, wanted))
    norms = math.hypot(*said.values()) * math.hypot(*wanted.values())
    if norms == 0:
        return 0.0
    pairs = [(weight, wanted[gram]) for gram, weight in said.items() if gram in wanted]
    return min(1.0, math.fsum(math.prod(pair) for pair in pairs) / norms)


OVERLAP_METRICS = ("bleu_1", "bleu_4", "meteor", "rouge_l", "cider")
"""The measures of generated replies that need no file."""
VECTOR_METRICS = ("embedding_average", "vector_extrema", "greedy_matching")
"""Need word vectors."""
SENTENCE_METRIC = "sentence_cosine"
"""Needs a sentence encoder."""
DIALOGUE_METRICS = (*OVERLAP_METRICS, SENTENCE_METRIC, *VECTOR_METRICS)


@functools.cache
def _word_pattern() -> re.Pattern[str]:
    every = map(chr, range(sys.maxunicode + 1))
    marks = re.escape("".join(each for each in every if unicodedata.category(each)[0] == "M"))
    letter = rf"(?:(?![{UNSPACED}])\w|[{marks}])"
    return re.compile(rf"[{UNSPACED}][{marks}]*|{letter}+(?:['’]{letter}+)*|[^\w\s]")


def words_of(text: str) -> list[str]:
    """Return the lower-case words and punctuation marks of a text, an apostrophe inside a word
    kept; of scripts without blanks, each letter with its marks.

    >>> words_of("I'm fine , and you?"), words_of("हिन्दी 你好")
    (["i'm", 'fine', ',', 'and', 'you', '?'], ['हिन्दी', '你', '好'])
    """
    return _word_pattern().findall(text.lower())


@dataclass(frozen=True)
class DialogueScores:
    """The measures in percent, and how they were made."""

    scores: Mapping[str, float]
    """By name of `DIALOGUE_METRICS`, those that could be computed; all times 100."""
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
) -> DialogueScores:
    """Return the nine measures of Zhang et al. (2021, Table 4) of replies against one reference
    each, in percent.

    BLEU-1 and BLEU-4 are sacrebleu's corpus BLEU up to order 1 and 4 (lower case, 13a or of scripts
    without blanks char, its default smoothing; signatures in ``details``). METEOR, ROUGE-L (beta
    1.2), CIDEr and the three of word vectors are means over pairs on the words of `words_of`; see
    `meteor`, `rouge_l`, `cider`, `embedding_scores`. ``sentence_cosine`` replaces SkipThought.

    Status: exact; each differs from the paper's suite as its own page says (METEOR is not METEOR
    1.5, SkipThought is replaced), so that rows of one table compare with each other and not with
    the paper's.

    Args:
        hypotheses: generated replies; empty ones count as 0 in every measure.
        references: the replies of the data, in the same order.
        vectors: of `read_word_vectors`; without it three measures are named in ``not_computed``.
        sentence_encoder: from n sentences to an (n, width) array; without it one measure is.

    Raises:
        ShapeError: other numbers of hypotheses and references, or none.

    Cost: some 10 ms a hundred pairs without the encoder.

    >>> found = dialogue_scores(["i am fine .", "no"], ["i am fine .", "not at all"])
    >>> round(found.scores["bleu_1"], 1), round(found.scores["rouge_l"], 1), list(found.not_computed)
    (53.6, 50.0, ['sentence_cosine', 'embedding_average', 'vector_extrema', 'greedy_matching'])
    """
    if len(hypotheses) != len(references) or not references:
        raise ShapeError(f"{len(hypotheses)} hypotheses for {len(references)} references")
    said, wanted = [words_of(text) for text in hypotheses], [words_of(text) for text in references]
    pairs, count = list(zip(said, wanted, strict=True)), len(references)
    details: dict[str, Any] = {
        "meteor": "nltk, Banerjee & Lavie 2005; exact, Porter stem, no WordNet",
        "rouge_l": "rouge-score, beta 1.2",
        "cider": "Vedantam et al. 2015; stemmed, one reference",
        "empty_hypotheses": sum(not words for words in said),
    }
    scores = {
        "meteor": sum(meteor(*pair) for pair in pairs) / count,
        "rouge_l": sum(rouge_l(*pair) for pair in pairs) / count,
        "cider": sum(cider(said, wanted)) / count,
    }
    tokens = "char" if unspaced_share(references) > 0.5 else "13a"
    if unspaced_share(references):
        details["words"] = "each letter of a script without blanks is a word"
    for order in (1, 4):
        how = {"max_ngram_order": order, "lowercase": True, "tokenize": tokens}
        score, signature = corpus_bleu(hypotheses, references, **how)
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
