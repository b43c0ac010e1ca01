"""BLEU and chrF: signatures, and texts without blanks."""

import pytest
from tests.support.refusal import refuses_data

from wellposed_lab.tasks import metrics


def test_bleu_says_what_was_counted():
    references = ["the cat sat on a mat today .", "a dog ran across the field"]
    scores, signatures = metrics.score_texts(references, references, bleu_tokens="char")
    assert scores == pytest.approx({"bleu": 100.0, "chrf": 100.0})
    assert "tok:char" in signatures["bleu"]
    assert "nc:6" in signatures["chrf"]
    for hypotheses in (["a"], []):
        refuses_data("hypotheses for", metrics.score_texts, hypotheses, [])


def test_a_tokenizer_that_cuts_at_blanks_says_so_of_texts_without(caplog):
    metrics.score_texts(["猫坐在垫子上"], ["猫坐在垫子上"], bleu_tokens="13a")
    assert "give --bleu-tokens char, or zh" in caplog.text
