"""BLEU and chrF: signatures, languages with and without blanks, texts that Moses tokenised."""

import pytest
from tests.support.refusal import refuses_data

from wellposed_lab.tasks import metrics
from wellposed_lab.tasks.task import build_task


def test_bleu_says_what_was_counted():
    references = ["the cat sat on a mat today .", "a dog ran across the field"]
    scores, signatures = metrics.score_texts(references, references, bleu_tokens="char")
    assert scores == pytest.approx({"bleu": 100.0, "chrf": 100.0})
    assert "tok:char" in signatures["bleu"]
    assert "nc:6" in signatures["chrf"]
    for hypotheses in (["a"], []):
        refuses_data("hypotheses for", metrics.score_texts, hypotheses, [])


# language, two texts, the first with its last word changed, the tokenizer of its name, that of its script
LANGUAGES = [
    ("en", "the cat sat on the mat .", "a dog runs over here", "the cat sat on the rug .", "13a", "13a"),
    ("zh_CN", "猫坐在垫子上看着狗", "今天天气很好啊", "猫坐在垫子上看着鸟", "zh", "zh"),
    ("ja", "ねこがマットのうえにすわる", "きょうはてんきがいい", "ねこがマットのうえにすわり", "char", "char"),
    ("kor", "고양이가 매트 위에 앉아 있다", "오늘 날씨가 아주 좋다", "고양이가 매트 위에 앉아 잔다", "char", "13a"),
    ("th", "แมวนั่งบนเสื่อ", "วันนี้อากาศดีมาก", "แมวนั่งบนเสือ", "char", "char"),
    ("hi", "बिल्ली चटाई पर बैठी है", "आज मौसम अच्छा है", "बिल्ली चटाई पर बैठी थी", "13a", "13a"),
    ("ru", "кошка сидит на своём коврике", "сегодня очень хорошая погода", "кошка сидит на своём полу", "13a", "13a"),
    ("ar", "القطة تجلس على السجادة الآن", "الطقس جميل جدا اليوم", "القطة تجلس على السجادة غدا", "13a", "13a"),
]  # fmt: skip


@pytest.mark.parametrize(("language", "text", "other", "near", "named", "by_script"), LANGUAGES)
def test_bleu_knows_equal_texts_of_every_language(
    language, text, other, near, named, by_script, monkeypatch
):
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)  # no MeCab
    wanted = [text, other]
    assert metrics.choose_bleu_tokens(language, wanted) == named
    assert metrics.choose_bleu_tokens("target", wanted) == by_script
    for tokens in (named, by_script, "auto"):
        equal, changed, different = (
            metrics.score_texts(said, wanted, bleu_tokens=tokens)[0]["bleu"]
            for said in (wanted, [near, other], [other, text])
        )
        assert equal == pytest.approx(100)
        assert equal > changed > max(different, 30)


def test_a_tokenizer_that_cuts_at_blanks_says_so_of_texts_without(caplog):
    metrics.score_texts(["猫坐在垫子上"], ["猫坐在垫子上"], bleu_tokens="13a")
    assert "give --bleu-tokens auto" in caplog.text


@pytest.mark.parametrize(("tokens", "says"), [("auto", True), ("13a", True), ("none", False)])
def test_texts_tokenised_by_moses_are_said(tokens, says, tmp_path, caplog):
    rows = [f"er sagt {k}\tit &apos;s {k} @-@ year" for k in range(60)]
    (tmp_path / "pairs.tsv").write_text("\n".join(["de\ten", *rows]))
    options = {"data": str(tmp_path / "pairs.tsv"), "src": "de", "tgt": "en", "vocab_size": 300}
    task = build_task("translation", {**options, "bleu_tokens": tokens})
    assert ("tokenised by Moses (&apos;" in caplog.text) is says
    assert task.description()["targets_tokenised_by_moses"] == {"valid": 3, "test": 3}
