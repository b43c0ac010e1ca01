"""Scores of generated texts: BLEU and chrF, by sacrebleu."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from wellposed.errors import DataError, import_extra
from wellposed_lab.tasks.text.tokenizers import HAN, UNSPACED

_CHINESE, _JAPANESE, _KOREAN = ("zh", "zho", "cmn", "yue"), ("ja", "jpn"), ("ko", "kor")
BLEU_TOKENS = dict.fromkeys(_CHINESE, "zh")
BLEU_TOKENS |= dict.fromkeys(_JAPANESE, "ja-mecab") | dict.fromkeys(_KOREAN, "ko-mecab")
"""Sacrebleu's tokenizer by language."""
MECAB = {"ja-mecab": "MeCab", "ko-mecab": "mecab_ko"}
"""What those tokenizers import."""


def score_texts(
    hypotheses: Sequence[str], references: Sequence[str], *, bleu_tokens: str = "13a"
) -> tuple[dict[str, float], dict[str, str]]:
    """Return corpus BLEU (Papineni et al. 2002) and chrF2 (Popović 2015) of ``hypotheses``, in
    0..100, and the signature of each.

    Status: exact, by sacrebleu (Post 2018). One reference a hypothesis, in the same order.
    ``bleu_tokens`` says how BLEU cuts words: 13a for running text, none for text that is tokenised,
    char for characters, auto as `choose_bleu_tokens`. Not for one sentence.

    >>> scores, signatures = score_texts(["the cat sat on the mat"], ["the cat sat on a mat"])
    >>> round(scores["bleu"], 2), signatures["bleu"].split("|version")[0]
    (53.73, 'nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp')
    """
    if len(hypotheses) != len(references) or not references:
        raise DataError(f"{len(hypotheses)} hypotheses for {len(references)} references")
    if bleu_tokens == "auto":
        bleu_tokens = choose_bleu_tokens("", references)
    if bleu_tokens in ("13a", "intl", "none") and unspaced_share(references) > 0.5:
        logging.getLogger("wellposed_lab.tasks").warning(
            "BLEU with the tokenizer %s cuts words at blanks, and these texts have none between"
            " words: its score says little; give --bleu-tokens auto",
            bleu_tokens,
        )
    bleu, how = corpus_bleu(hypotheses, references, tokenize=bleu_tokens)
    chrf, form = _scored(_library().CHRF(), hypotheses, references)
    return {"bleu": bleu, "chrf": chrf}, {"bleu": how, "chrf": form}


def choose_bleu_tokens(language: str, references: Sequence[str]) -> str:
    """Return sacrebleu's tokenizer for a language, named as ``zh`` or ``zho_Hans``; of another name,
    or where MeCab is not installed, by the script of the texts.

    >>> choose_bleu_tokens("de", ["eine Katze"]), choose_bleu_tokens("target", ["แมวนั่ง"])
    ('13a', 'char')
    """
    tokens = BLEU_TOKENS.get(re.split("[-_]", language.lower())[0])
    if tokens is None and unspaced_share(references) > 0.5:
        tokens = "zh" if unspaced_share(references, HAN) > 0.5 else "char"
    missing = tokens in MECAB and find_spec(MECAB[tokens]) is None
    return "char" if missing else tokens or "13a"


def unspaced_share(texts: Sequence[str], letters: str = UNSPACED) -> float:
    """Return the share of letters that are of scripts without blanks."""
    whole = "".join(texts)
    return len(re.findall(f"[{letters}]", whole)) / max(1, sum(map(str.isalpha, whole)))


def corpus_bleu(
    hypotheses: Sequence[str], references: Sequence[str], **options: Any
) -> tuple[float, str]:
    """Return sacrebleu's corpus BLEU in 0..100 and its signature; ``options`` are those of its
    class."""
    # `force`: text tokenised beforehand is what some corpora hold; sacrebleu only warns about it.
    return _scored(_library().BLEU(force=True, **options), hypotheses, references)


def _scored(metric: Any, said: Sequence[str], wanted: Sequence[str]) -> tuple[float, str]:
    score = metric.corpus_score(list(said), [list(wanted)]).score
    return float(score), str(metric.get_signature())


def _library() -> Any:
    return import_extra("sacrebleu.metrics", "lab", "BLEU and chrF")
