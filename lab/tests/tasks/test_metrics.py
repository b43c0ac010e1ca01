"""BLEU and chrF: signatures, and texts without blanks."""

import pytest

from wellposed.errors import DataError
from wellposed_lab.tasks import metrics


def test_bleu_says_what_was_counted():
    references = ["the cat sat on a mat today .", "a dog ran across the field"]
    scores, signatures = metrics.score_texts(references, references, bleu_tokens="char")
    assert scores == pytest.approx({"bleu": 100.0, "chrf": 100.0})
    assert "tok:char" in signatures["bleu"]
    assert "nc:6" in signatures["chrf"]
    for hypotheses in (["a"], []):
        with pytest.raises(DataError, match="hypotheses for"):
            metrics.score_texts(hypotheses, [])


UNSPACED_TEXTS = {
    "Chinese": "猫坐在垫子上看书",
    "hiragana": "ねこがまっとのうえにすわっています",
    "katakana": "ネコガマットノウエニスワッテイル",
    "Japanese": "猫がマットの上に座っています",
    "Thai": "แมวนั่งอยู่บนเสื่อ",
    "Lao": "ແມວນັ່ງຢູ່ເທິງເສື່ອ",
    "Khmer": "ឆ្មាអង្គុយលើកន្ទេល",
    "Burmese": "ကြောင်သည်ဖျာပေါ်တွင်ထိုင်သည်",
    "Tibetan": "ཞི་མི་གདན་ཐོག་ལ་བསྡད་ཡོད།",
    "Yi": "ꀋꇖꂷꀕꌠꉬꑳꀀ",
    "Javanese": "ꦏꦸꦕꦶꦁꦭꦸꦁꦒꦸꦃ",
}


@pytest.mark.parametrize("script", UNSPACED_TEXTS)
def test_advice_for_texts_without_blanks_gives_100_to_identical_texts(script, caplog):
    texts = [UNSPACED_TEXTS[script]]
    metrics.score_texts(texts, texts, bleu_tokens="13a")
    (message,) = [r.getMessage() for r in caplog.records if "--bleu-tokens" in r.getMessage()]
    advised = message.partition("--bleu-tokens ")[2].split(", or ")
    assert ("zh" in advised) == (script == "Chinese")
    for tokens in advised:
        scores, _ = metrics.score_texts(texts, texts, bleu_tokens=tokens)
        assert scores["bleu"] == pytest.approx(100.0)
