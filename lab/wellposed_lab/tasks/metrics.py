"""Scores of generated texts: BLEU and chrF, by sacrebleu."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from typing import Any

from wellposed.errors import DataError, import_extra
from wellposed_lab.tasks.text.tokenizers import HAN, UNSPACED


def score_texts(
    hypotheses: Sequence[str], references: Sequence[str], *, bleu_tokens: str = "13a"
) -> tuple[dict[str, float], dict[str, str]]:
    """Return corpus BLEU (Papineni et al. 2002) and chrF2 (Popović 2015) up to 100; signatures.

    Status: exact, by sacrebleu (Post 2018), with one reference each. ``bleu_tokens``: 13a for
    running text, none for tokenised text, char for characters, zh for Chinese alone. Not for
    one sentence.

    >>> scores, signatures = score_texts(["the cat sat on the mat"], ["the cat sat on a mat"])
    >>> round(scores["bleu"], 2), signatures["bleu"].split("|version")[0]
    (53.73, 'nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp')
    """
    if len(hypotheses) != len(references) or not references:
        raise DataError(f"{len(hypotheses)} hypotheses for {len(references)} references")
    if bleu_tokens in ("13a", "intl", "none") and unspaced_share(references) > 0.5:
        logging.getLogger("wellposed_lab.tasks").warning(
            "BLEU with the tokenizer %s splits words at blanks, and these texts have none, so the"
            " score is not meaningful; give --bleu-tokens char%s",
            bleu_tokens,
            ", or zh" if is_chinese(references) else "",
        )
    bleu, signature = corpus_bleu(hypotheses, references, tokenize=bleu_tokens)
    chrf, form = _scored(_library().CHRF(), hypotheses, references)
    return {"bleu": bleu, "chrf": chrf}, {"bleu": signature, "chrf": form}


def is_chinese(texts: Sequence[str]) -> bool:
    """Return whether most letters without blanks are Han: sacrebleu's zh cuts no other script."""
    text = "".join(texts)
    unspaced = re.findall(f"[{UNSPACED}]", text)
    return len(re.findall(f"[{HAN}]", text)) > 0.8 * len(unspaced) > 0.0


def unspaced_share(texts: Sequence[str]) -> float:
    """Return the fraction of letters in scripts without blanks."""
    text = "".join(texts)
    return len(re.findall(f"[{UNSPACED}]", text)) / max(1, sum(map(str.isalpha, text)))


def corpus_bleu(
    hypotheses: Sequence[str], references: Sequence[str], **options: Any
) -> tuple[float, str]:
    """Return sacrebleu's corpus BLEU in 0..100 and its signature, with ``options`` of its class.

    A warning is logged if it is 0 for any hypotheses, as no reference is long enough.
    """
    metric = _library().BLEU(**options)
    scored = _scored(metric, hypotheses, references)
    if scored[0] == 0:
        wanted = list(references)
        totals = metric.corpus_score(wanted, [wanted]).totals
        if totals[-1] == 0:
            logging.getLogger("wellposed_lab.tasks").warning(
                "BLEU is 0 for any text, as no reference has %d words; read another score",
                len(totals),
            )
    return scored


def _scored(metric: Any, hypotheses: Sequence[str], wanted: Sequence[str]) -> tuple[float, str]:
    score = metric.corpus_score(list(hypotheses), [list(wanted)]).score
    return float(score), str(metric.get_signature())


def _library() -> Any:
    return import_extra("sacrebleu.metrics", "translation", "BLEU and chrF")
