"""Metrics of generated text against values worked by hand (in the comments), brute force, and
their properties."""

import gzip
import math

import numpy as np
import pytest
import sacrebleu

from wellposed.errors import ConfigError, DataError, ShapeError
from wellposed_lab.tasks.data import files
from wellposed_studies.tasks import dialogue_scores as metrics
from wellposed_studies.tasks import vectors


def test_meteor_by_hand():
    # All 6 words match: P = R = F = 1. The last "the" takes the last one, so no two links that are
    # neighbours are so in both: 6 chunks, penalty 0.5 (6/6)^3.
    def scored(hypothesis, wanted, expected):
        score = metrics.meteor(metrics.words_of(hypothesis), metrics.words_of(wanted))
        assert score == pytest.approx(expected, abs=1e-12)

    scored("on the mat sat the cat", "the cat sat on the mat", 0.5)
    # P = 6/7, R = 1, F = (60/7) / (61/7); [the cat] [sat on the mat]: penalty 0.5 (2/6)^3 = 1/54.
    scored("the cat was sat on the mat", "the cat sat on the mat", 60 / 61 * 53 / 54)
    # the cats sat / the cat was sitting. Equal: the = the, cats ~ cat by stem; sat and sitting (sit)
    # differ. m = 2, P = 2/3, R = 2/4, F = 10/3 / (1/2 + 6) = 20/39; one chunk: penalty 0.5 / 8;
    # 20/39 x 15/16 = 0.480769.
    scored("the cats sat", "the cat was sitting", 20 / 39 * 15 / 16)
    # one word of three, reference of one: P = 1/3, R = 1, F = (10/3) / (1 + 3) = 5/6, penalty 1/2.
    scored("well yes sir", "yes", 5 / 12)
    # 2 matches in 2 chunks, P = R = F = 2/3, penalty 1/2: synonyms do not count.
    scored("a big dog", "a large dog", 1 / 3)


@pytest.mark.parametrize(
    ("hypothesis", "expected"),
    [
        # Lin (2004): S1 police killed the gunman, S2 police kill the gunman, S3 the gunman kill
        # police: LCS(S1, S2) = 3, P = R = F = 3/4; LCS(S1, S3) = 2 (the gunman), F = 1/2.
        ("police kill the gunman", 3 / 4),
        ("the gunman kill police", 1 / 2),
        # P = 2/2, R = 2/4, beta^2 = 1.44: 2.44 x 0.5 / (0.5 + 1.44) = 1.22 / 1.94.
        ("the gunman", 1.22 / 1.94),
    ],
)
def test_rouge_l_by_hand(hypothesis, expected):
    wanted = ["police", "killed", "the", "gunman"]
    assert metrics.rouge_l(hypothesis.split(), wanted) == pytest.approx(expected)


def test_cider_by_hand():
    # References: "a b" and "a c"; log 2 = L. df(a) = 2, so a weighs 0; b, c, ab, ac weigh L each.
    # Pair 1: hypothesis "a b" is its reference: cosine 1 for n = 1 (b alone) and n = 2 (ab), none
    # for n = 3, 4: 1/2. Pair 2: hypothesis "a c c" against "a c". n = 1: {c: 2L} and {c: L}: cosine
    # 1. n = 2: {ac: L, cc: L} and {ac: L} (cc is in no reference, df counted as 1): 1 / sqrt 2. n =
    #   3: the reference has none: 0. Mean (1 + 0.70711)/4.
    hypotheses = [["a", "b"], ["a", "c", "c"]]
    wanted = [["a", "b"], ["a", "c"]]
    assert metrics.cider(hypotheses, wanted) == pytest.approx([0.5, (1 + math.sqrt(0.5)) / 4])


def test_cider_of_one_pair_is_zero_and_numbers_must_agree():
    assert metrics.cider([["a", "b"]], [["a", "b"]]) == [0.0]
    with pytest.raises(ShapeError, match="2 hypotheses for 1 references"):
        metrics.cider([["a"], ["b"]], [["a"]])


def test_the_number_of_references_of_cider_is_told():
    """A perfect reply of k words has k quarters of the score, and of one reply alone nothing."""
    replies = ["a", "b c", "d e f", "g h i j k"]
    words = [reply.split() for reply in replies]
    assert metrics.cider(words, words) == pytest.approx([0.25, 0.5, 0.75, 1.0])
    for count in (1, 4):
        details = metrics.dialogue_scores(replies[-count:], replies[-count:]).details
        assert f"weights of {count} references" in details["cider"]


def test_bleu_does_not_depend_on_the_order_of_references_and_its_zero_is_explained(caplog):
    """That of torchmetrics does if two are equally near in length; both are 0 without four words."""
    torchmetrics = pytest.importorskip("torchmetrics.functional.text")
    reply = "a b c d e"
    references = ["a b c d", "a b c d e f"]
    theirs = [
        float(torchmetrics.bleu_score([reply], [refs])) for refs in (references, references[::-1])
    ]
    ours = [
        sacrebleu.corpus_bleu([reply], [[text] for text in refs]).score
        for refs in (references, references[::-1])
    ]
    assert theirs[0] != theirs[1]
    assert ours[0] == ours[1]
    assert float(torchmetrics.bleu_score(["a b c"], [["a b c"]], smooth=True)) == 0
    scores = metrics.dialogue_scores(["a b c"], ["a b c"]).scores
    assert (round(scores["bleu_1"]), scores["bleu_4"]) == (100, 0)
    (line,) = [record.message for record in caplog.records if "BLEU is 0" in record.message]
    assert "no reference has 4 words" in line


ROWS = {"a": [3, 0], "b": [0, 4], "c": [-6, 1], "z": [0, 0]}
VECTORS = vectors.WordVectors({word: np.array(row, np.float32) for word, row in ROWS.items()}, 2)


def _scores(first, second):
    return vectors.embedding_scores([first], [second], VECTORS)[0]


def test_embedding_metrics_by_hand():
    # a b against a: sum (3, 4) with (3, 0): 3/5. Extrema (3, 4) too: 3/5. Greedy: a takes 1, b
    # takes 0: mean 1/2; back: a takes 1: (1/2 + 1) / 2 = 3/4.
    expected = {"embedding_average": 0.6, "vector_extrema": 0.6, "greedy_matching": 0.75}
    assert _scores(["a", "b"], ["a"]) == pytest.approx(expected)
    # a b c against b: sum (-3, 5): 5 / sqrt 34. Extrema: -6 beats 3, 4: (-6, 4): 4 / sqrt 52.
    # Greedy: a 0, b 1, c 1/sqrt 37: mean (1 + 0.164399)/3; back 1.
    expected = {
        "embedding_average": 5 / math.sqrt(34),
        "vector_extrema": 4 / math.sqrt(52),
        "greedy_matching": ((1 + 1 / math.sqrt(37)) / 3 + 1) / 2,
    }
    assert _scores(["a", "b", "c"], ["b"]) == pytest.approx(expected, rel=1e-6)


def test_words_without_a_vector_are_left_out_and_counted():
    hypotheses = [["a", "who"], ["who"], []]
    wanted = [["a"], ["b"], ["a"]]
    scores, counts = vectors.embedding_scores(hypotheses, wanted, VECTORS)
    assert scores == pytest.approx(dict.fromkeys(metrics.VECTOR_METRICS, 1 / 3))
    assert counts == {"words": 6, "words_without_a_vector": 2, "pairs_without_vectors": 2}


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
@pytest.mark.parametrize("header", ["", "3 2\n"])
def test_word_vectors_of_both_text_formats(tmp_path, pack, header):
    path = tmp_path / ("v.txt.gz" if pack is gzip.compress else "v.txt")
    path.write_bytes(pack((header + "the 0.5 -1\nat name 1 2\n. . 3 4e-1\n").encode()))
    read = vectors.read_word_vectors(path)
    assert (len(read.rows), read.width) == (3, 2)
    assert read.lookup(["the", "at name", "who"]).tolist() == [[0.5, -1.0], [1.0, 2.0]]


EXPECTED = "v.txt:2: expected a word of its own and 2 numbers, received "


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a 1 2\nb 1\n", f"{EXPECTED}'b 1'"),
        *(
            (b"a 1 2\n" + more, EXPECTED)
            for more in (b"b 1 2 3", b"b nan 1 2", b"b 1 x", b"b 1 nan", b"a 1 2")
        ),
        (b"3 2\na 1 2\n", "v.txt:1: says 3 words, the file holds 1"),
        (b"2 2\n", "v.txt:1: says 2 words, the file holds 0"),
        (b"2 " + b"9" * 5000 + b"\nthe 1 2\n", "v.txt:1: "),
        (b"the 1 1e300\n", "v.txt:1: .*received .the 1 1e300"),
        (b"", "v.txt:1: expected a word and its numbers"),
        (b"a 1 2\n\xe9 1 2\n", "v.txt:2: not UTF-8"),
    ],
)
def test_malformed_vectors_are_named_by_line(tmp_path, content, message):
    (tmp_path / "v.txt").write_bytes(content)
    with pytest.raises(DataError, match=message):
        vectors.read_word_vectors(tmp_path / "v.txt")


def test_places_without_vectors_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "BOMB_BYTES", 1 << 16)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(b"a 1\n" + b"b" * (1 << 22)))
    with pytest.raises(DataError, match="bytes unpack to more than 100"):
        vectors.read_word_vectors(tmp_path / "bomb.gz")
    (tmp_path / "cut.gz").write_bytes(gzip.compress(b"a 1 2\n" * 2000)[:30])
    for name, message in (
        ("vec.txt", "no such file"),
        (".", "is a folder"),
        ("cut.gz", "cut short"),
    ):
        with pytest.raises(DataError, match=message):
            vectors.read_word_vectors(tmp_path / name)


def test_sentence_cosine_by_hand():
    # (1, 0) and (1, 1): 1/sqrt 2; the empty hypothesis counts 0: mean half of it.
    rows = {"x": [1.0, 0.0], "y": [1.0, 1.0]}
    encode = lambda texts: [rows[text] for text in texts]  # noqa: E731
    score = vectors.sentence_cosine(["x", " "], ["y", "x"], encode)
    assert score == pytest.approx(math.sqrt(0.5) / 2)
    with pytest.raises(ShapeError, match="for 2 sentences"):
        vectors.sentence_cosine(["x"], ["y"], lambda _: [[1.0]])


def test_any_hugging_face_encoder_gives_sentence_vectors_free_of_padding(tmp_path):
    from transformers import BertConfig, BertModel

    from wellposed_lab.tasks.text.tokenizers import WordEncoder

    config = BertConfig(
        vocab_size=10,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    BertModel(config).save_pretrained(tmp_path)
    WordEncoder(["a", "b", "c"]).tokenizer(max_length=16).save_pretrained(tmp_path)
    encode = vectors.hf_sentence_encoder(str(tmp_path), batch_size=2)
    together = encode(["a", "a b c", "b"])
    alone = encode(["a"])
    assert together.shape == (3, 8)
    np.testing.assert_allclose(together[0], alone[0], atol=1e-5)
    assert vectors.sentence_cosine(["a b"], ["a b"], encode) == pytest.approx(1.0)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        vectors.hf_sentence_encoder(str(tmp_path / "none"))


FILES = {"vectors": VECTORS, "sentence_encoder": lambda texts: [[1.0]] * len(texts)}


def test_all_nine_by_name_with_their_files_and_four_named_as_missing_without():
    hypotheses = ["a b .", "c"]
    wanted = ["a b .", "c a"]
    full = metrics.dialogue_scores(hypotheses, wanted, **FILES)
    assert set(full.scores) == set(metrics.DIALOGUE_METRICS)
    assert len(metrics.DIALOGUE_METRICS) == 9
    assert not full.not_computed
    assert full.details["words_without_a_vector"] == 2
    bare = metrics.dialogue_scores(hypotheses, wanted)
    assert set(bare.not_computed) == {"sentence_cosine", *metrics.VECTOR_METRICS}
    assert {name: full.scores[name] for name in bare.scores} == bare.scores


def test_bleu_by_hand():
    # 5 words, 4 of them right: 4/5; reference of 7 words: brevity exp(1 - 7/5).
    result = metrics.dialogue_scores(["i am fine .", "no"], ["I am fine.", "not at all"])
    assert result.scores["bleu_1"] == pytest.approx(100 * 0.8 * math.exp(-0.4), abs=1e-9)
    # orders 2, 3, 4: 3/3, 2/2, 1/1 of the first sentence.
    assert result.scores["bleu_4"] == pytest.approx(100 * 0.8**0.25 * math.exp(-0.4), abs=1e-9)
    assert "tok:13a" in result.details["bleu_4"]


def test_empty_replies_score_zero_everywhere():
    result = metrics.dialogue_scores(["", ""], ["a b", "c"], **FILES)
    assert set(result.scores.values()) == {0.0}
    assert result.details["empty_hypotheses"] == 2
    with pytest.raises(ShapeError, match="0 hypotheses"):
        metrics.dialogue_scores([], [])
