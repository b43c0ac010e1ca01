"""Word-overlap scores: BLEU and chrF (sacrebleu), METEOR (nltk), ROUGE-L (rouge-score) and CIDEr;
nothing is downloaded."""

from __future__ import annotations

import functools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias

from wellposed.errors import ConfigError, DataError, ShapeError, import_extra

ORDERS = (1, 2, 3, 4)
SIGMA = 6.0
_PLAIN = re.compile(r"[a-z]{3,}")

Gram: TypeAlias = "tuple[str, ...]"
Weights: TypeAlias = "dict[Gram, float]"


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
    return import_extra("sacrebleu.metrics", "train", "BLEU and chrF")


@functools.lru_cache(maxsize=1 << 16)
def porter_stem(word: str) -> str:
    """Return the stem of a lower-case English word by the five steps of Porter (1980), of nltk.

    Words that are not three or more of the letters a to z are their own stem.

    Raises:
        ConfigError: nltk is not installed.

    >>> [porter_stem(word) for word in ("relational", "hopping", "cats", "cat", "42")]
    ['relat', 'hop', 'cat', 'cat', '42']
    """
    return _stemmer().stem(word) if _PLAIN.fullmatch(word) else word


@functools.cache
def _stemmer() -> Any:
    stemmer = import_extra("nltk.stem.porter", "train", "METEOR and CIDEr").PorterStemmer
    return stemmer(stemmer.ORIGINAL_ALGORITHM)


def meteor(
    hypothesis: Sequence[str],
    reference: Sequence[str],
    *,
    synonyms: Mapping[str, str] | None = None,
) -> float:
    """Return ``F (1 - penalty)`` with ``F = 10 P R / (R + 9 P)`` and ``penalty = 0.5 (chunks /
    matches)^3``.

    Status: exact, by nltk. Source: Banerjee & Lavie (2005, "METEOR: an automatic metric for MT
    evaluation"), with the modules exact, Porter stem and, where given, synonyms (the name of its
    group by word) in place of WordNet, which would have to be downloaded: values are lower than
    with it. nltk links a word that occurs twice to its last place, where the paper looks for the
    fewest crossings. This is not METEOR 1.5 (other weights, paraphrase tables).

    Takes lower-case words. Equal sentences of n words score 1 - 0.5 / n^3; no match, or an empty
    sentence, scores 0.

    >>> words = "the cat sat on the mat".split()
    >>> meteor(words, words) == 1 - 0.5 / 6**3
    True
    >>> round(meteor("the cats sat".split(), "the cat was sitting".split()), 4)
    0.4808
    """
    _stemmer()
    from nltk.translate.meteor_score import single_meteor_score

    # nltk asks for the synonyms of stems, as words are left by the module before.
    names = {porter_stem(word): porter_stem(group) for word, group in (synonyms or {}).items()}
    groups: dict[str, list[str]] = {}
    for word, group in names.items():
        groups.setdefault(group, [group]).append(word)

    def synsets(word: str) -> list[Any]:
        alike = groups.get(names.get(word, word), [])
        lemmas = [SimpleNamespace(name=functools.partial(str, each)) for each in alike]
        return [SimpleNamespace(lemmas=lambda: lemmas)]

    tools: dict[str, Any] = {
        "stemmer": SimpleNamespace(stem=porter_stem),
        "wordnet": SimpleNamespace(synsets=synsets),
    }
    return float(single_meteor_score(reference, hypothesis, preprocess=str, **tools))


@functools.cache
def _rouge_scorer() -> Any:
    library = import_extra("rouge_score.rouge_scorer", "train", "ROUGE-L", package="rouge-score")
    return library.RougeScorer(["rougeL"], tokenizer=SimpleNamespace(tokenize=str.split))


def rouge_l(hypothesis: Sequence[str], reference: Sequence[str], *, beta: float = 1.2) -> float:
    """Return ``(1 + beta^2) R P / (R + beta^2 P)`` with ``P = LCS / |hypothesis|`` and ``R = LCS /
    |reference|``.

    Status: exact, in [0, 1]; P and R are rouge-score's. Source: Lin (2004, "ROUGE", eq. 2-4), who
    leaves beta open; 1.2 is that of the evaluation suite (Sharma et al. 2017) with which Zhang et
    al. (2021) made their Table 4. Infinity gives recall alone. Words hold no white space.

    >>> round(rouge_l("police kill the gunman".split(), "police killed the gunman".split(), beta=1.0), 4)
    0.75
    """
    if not beta > 0:
        raise ConfigError(f"rouge_l: beta = {beta!r}, expected a positive number")
    found = _rouge_scorer().score(" ".join(reference), " ".join(hypothesis))["rougeL"]
    precision, recall = found.precision, found.recall
    if beta == math.inf or not recall:
        return float(recall)
    return (1 + beta**2) * recall * precision / (recall + beta**2 * precision)


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
    so a value belongs to a set: the same pair scores differently in another one, and a set of one
    pair scores 0, as every weight is 0. Orders n for which a sentence has no n-gram of positive weight count as 0, as
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
    wanted = [_grams(words, stem=stemmed) for words in references]
    documents = Counter(gram for counts in wanted for gram in counts)
    rarity = {gram: math.log(len(references) / count) for gram, count in documents.items()}
    unseen = math.log(max(1, len(references)))
    scores = []
    for words, reference, counts in zip(hypotheses, references, wanted, strict=True):
        said, held = (
            {gram: count * rarity.get(gram, unseen) for gram, count in each.items()}
            for each in (_grams(words, stem=stemmed), counts)
        )
        cosines = (_cosine(said, held, order, clip=not stemmed) for order in ORDERS)
        apart = len(words) - len(reference)
        scale = 1.0 if stemmed else 10 * math.exp(-(apart**2) / (2 * SIGMA**2))
        scores.append(scale * math.fsum(cosines) / len(ORDERS))
    return scores


def _grams(words: Sequence[str], *, stem: bool) -> Counter[Gram]:
    words = [porter_stem(word) for word in words] if stem else list(words)
    return Counter(tuple(words[i : i + n]) for n in ORDERS for i in range(len(words) - n + 1))


def _cosine(said: Weights, wanted: Weights, order: int, *, clip: bool) -> float:
    """Return the cosine of the weights of the grams of one order."""
    said, wanted = ({g: w for g, w in each.items() if len(g) == order} for each in (said, wanted))
    norms = math.hypot(*said.values()) * math.hypot(*wanted.values())
    if norms == 0:
        return 0.0
    pairs = [(weight, wanted[gram]) for gram, weight in said.items() if gram in wanted]
    return min(1.0, math.fsum((min(pair) if clip else pair[0]) * pair[1] for pair in pairs) / norms)
