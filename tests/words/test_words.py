"""Replaced words (B14) by independent routes: all replacements tried on small vocabularies."""

import itertools
import math

import pytest
import torch
from tests.certification.test_sum import classifier
from tests.support.tokenizer_folders import bert_words, byte_level_bpe, word_level
from tokenizers import normalizers
from tokenizers.pre_tokenizers import WhitespaceSplit

from wellposed.errors import ConfigError, DataError, NotLipschitzError, ShapeError
from wellposed.nn import ConvexResidual
from wellposed.words import WordAttack, WordCertificate, WordSwaps, word_logits

WORDS = ("a", "ab", "b", "abb", "ba", "bb")
KINDS = [
    {"blocks": 0},
    {"blocks": 0, "ball_embeddings": True, "unit_embeddings": False},
    {"blocks": 1},
    {"blocks": 2, "residual": "budget", "budget": 1.1},
]


def model_of(blocks=1, **options):
    """Return a model with weights of norm 1, whose branches leave some of each token."""
    cool = {"ball_temperature": 0.05} if options.get("attention", "ball") == "ball" else {}
    model = classifier(blocks, **{"vocab_size": 8, "position": "none", **cool, **options})
    for part in model.model.modules():
        if isinstance(part, torch.nn.Linear):
            part.weight.data /= torch.linalg.matrix_norm(part.weight.data, 2)
        if isinstance(part, ConvexResidual):
            part.logit.data -= 1.5
    return model


def tokenizer_of(words=WORDS, **special):
    made = word_level(words, "$A", **{"pad_token": "<| p |>", "unk_token": "<| u |>", **special})
    made.split_special_tokens = True
    return made


def framed_words(words):
    made = bert_words(words)
    made.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    return made


def lower_words():
    made = tokenizer_of()
    made.backend_tokenizer.normalizer = normalizers.Lowercase()
    return made


def certificate_of(limit=6, **options):
    return WordCertificate(model_of(**options), tokenizer_of(), max_length=limit)


def logits(certificate, texts):
    """Return the scores of texts one by one, without padding."""
    one_by_one = (torch.tensor([list(text)]) for text in texts)
    with torch.no_grad():
        return torch.cat([certificate.model(input_ids=ids).logits for ids in one_by_one])


def batch_of(texts, **more):
    longest = max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
    return {"input_ids": ids, "attention_mask": mask, **more}


def clear(certificate, count, tokens):
    """Return texts mostly of words that speak for one class, some with one word against it."""
    generator = torch.Generator().manual_seed(3)
    accepted = []
    for number in range(count):
        best = certificate.reader.along(number % 3).sum(1).argsort()
        positions = torch.randint(0, 2, (tokens,), generator=generator)
        text = best[positions].tolist()
        text[0] = int(best[-1]) if number % 2 else text[0]
        accepted.append(text)
    return accepted


def drawn(count, tokens=4, first=2):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(first, 8, (count, tokens), generator=generator).tolist()


def replaced(text, k, vocabulary=()):
    """Return every text with any k words replaced by any of the vocabulary."""
    others = []
    for positions in itertools.combinations(range(len(text)), k):
        for words in itertools.product(vocabulary or range(8), repeat=k):
            other = list(text)
            for position, word in zip(positions, words, strict=True):
                other[position] = word
            others.append(other)
    return others


def assert_unchanged(certificate, texts, answer):
    for _, same in itertools.groupby(sorted(texts, key=len), len):
        assert (logits(certificate, same).argmax(-1) == answer).all()


@pytest.mark.slow
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_no_k_words_change_a_certified_answer_and_without_blocks_k_plus_one_do(options):
    certificate = certificate_of(**options)
    exact = certificate.reader.exact
    some = 0
    assert exact == (options["blocks"] == 0)
    texts = clear(certificate, 12, 6)
    for text, result in zip(texts, certificate.hold([batch_of(texts)], 4), strict=True):
        k = result.replaceable
        assert 0 <= k <= 4
        assert_unchanged(certificate, replaced(text, min(k, 2)), result.predicted)
        some += k > 0
        if exact and k < 2:
            answers = logits(certificate, replaced(text, k + 1)).argmax(-1)
            assert (answers != result.predicted).any()
            ids = torch.tensor(text)
            vectors = certificate.reader.vectors
            swaps = WordSwaps(certificate.model, vectors, ids, result.predicted)
            attack = WordAttack(certificate.model, swaps)
            needed, turned = attack.fewest_edits(ids, result.predicted, 4)
            assert needed == k + 1 == int((turned != ids).sum())
    assert some


def test_padding_and_wrong_answers_and_all_words():
    certificate = certificate_of(blocks=0)
    texts = [*drawn(3), [2], []]
    alone = [certificate.hold([batch_of([t])], 9)[0].replaceable for t in texts[:4]]
    results = certificate.hold([batch_of(texts)], 9)
    assert [result.replaceable for result in results[:4]] == alone
    wrong = torch.tensor([(result.predicted + 1) % 3 for result in results])
    again = certificate.hold([batch_of(texts, labels=wrong)], 9)
    assert all(result.replaceable == -1 for result in again)
    with torch.no_grad():
        certificate.model.classifier.bias[1] = 100.0
    (far,) = certificate.hold([batch_of(texts[:1])], 9)
    assert far.replaceable == 9, "all words may be replaced"


@pytest.mark.parametrize("options", [{"position": "learned"}, {"is_causal": True}], ids=str)
@pytest.mark.parametrize("blocks", [0, 1])
def test_positions_and_causal_models_hold_replaced_words(blocks, options):
    certificate = certificate_of(blocks=blocks, **options)
    texts = drawn(4)
    results = certificate.hold([batch_of(texts)], 2)
    for text, result in zip(texts, results, strict=True):
        assert_unchanged(certificate, replaced(text, result.replaceable), result.predicted)


def test_accuracy_is_certified_then_attacked_on_texts_of_any_device_dtype_and_length():
    model = model_of(1).bfloat16()
    before = model.classifier.weight.clone()
    certificate = WordCertificate(model, tokenizer_of(), max_length=9)
    texts = [" ".join((*WORDS, "x", "y")[n - 2] for n in t) for t in clear(certificate, 20, 9)]
    ids = certificate.encode(texts)
    labels = logits(certificate, ids).argmax(-1)
    labels[::5] = (labels[::5] + 1) % 3
    asked = {"replaced": [1, 2], "beam": 2}
    accuracy = certificate.accuracy(texts, labels.tolist(), batch_size=7, **asked)
    assert accuracy.clean == pytest.approx(0.8)
    pairs = list(zip(accuracy.certified, accuracy.attacked, strict=True))
    assert all(sure <= upper <= accuracy.clean for sure, upper in pairs)
    assert pairs[0][0] > 0
    rows = [tuple(line.split()[:2]) for line in accuracy.table().splitlines()[2:]]
    assert rows == [("none", "0"), ("words", "1"), ("words", "2")]
    assert certificate.accuracy_of([batch_of(ids, labels=labels)], [1, 2], beam=2) == accuracy
    named = [f"LABEL_{label}" for label in labels.tolist()]
    longer = [f"{text} a" for text in texts]
    cut = certificate.accuracy(longer, named, batch_size=7, **asked)
    assert (cut.certified, cut.attacked) == (accuracy.certified, accuracy.attacked)
    assert "20 texts were cut to max_length = 9" in cut.table()
    assert torch.equal(model.classifier.weight, before), "the model is a copy"
    report = certificate.explain(texts[0], 9)
    assert report.replaceable == certificate.hold([batch_of(ids[:1])], 9)[0].replaceable
    assert report.needed is None or report.needed > report.replaceable
    assert len(report.shares) == 9


TWO = ["a b", "b"]


@pytest.mark.parametrize(
    ("texts", "labels", "asked", "error", "message"),
    [
        (TWO, [0], {}, DataError, "2 texts with 1 labels"),
        ([], [], {}, DataError, "0 texts"),
        (TWO, [0, 3], {}, DataError, "a number below 3"),
        (TWO, [0, "up"], {}, DataError, "a name of model.config.label2id"),
        (TWO, [0, 1.5], {}, DataError, "a number below 3"),
        (["a", " "], [0, 1], {}, ShapeError, "no word in text 1 of 2"),
        (TWO, [0, 1], {"replaced": [0]}, ConfigError, r"\[0\] words, expected increasing"),
        (TWO, [0, 1], {"replaced": [2, 1]}, ConfigError, r"\[2, 1\] words"),
        (TWO, [0, 1], {"replaced": [1.5]}, ConfigError, r"\[1.5\] words"),
        (TWO, [0, 1], {"replaced": {"words": 1}}, ConfigError, r"\['words'\] words"),
    ],
)
def test_bad_texts_labels_and_numbers_are_refused(texts, labels, asked, error, message):
    with pytest.raises(error, match=message):
        certificate_of(blocks=0).accuracy(texts, labels, **asked)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"norm": "post"}, NotLipschitzError, "LayerNorm|PostNorm"),
        ({"attention": "dot_product"}, NotLipschitzError, "no bound of DotProductAttention"),
        ({"pooling": "max"}, ConfigError, "pooling 'max'"),
        ({"problem_type": "multi_label_classification"}, ConfigError, "choose one label"),
    ],
)
def test_other_models_are_refused_with_the_reason(options, error, message):
    with pytest.raises(error, match=message):
        certificate_of(**options)


def test_a_model_without_a_bound_is_attacked_alone():
    model = model_of(1, attention="dot_product")
    certificate = WordCertificate(model, tokenizer_of(), max_length=6, required=False)
    accuracy = certificate.accuracy(["a b ab", "bb a"], [0, 1])
    assert accuracy.reason == "no bound in norm sum of DotProductAttention"
    assert "no certificate: no bound" in accuracy.table()
    assert not any(accuracy.certified)
    assert certificate.explain("a b", 3).shares == []


@pytest.mark.parametrize(
    ("tokenizer", "message"),
    [
        (lambda: byte_level_bpe(["a b"]), "BPE with ByteLevel"),
        (lambda: framed_words(["oil"]), "2 special tokens around"),
        (lambda: lower_words(), "between white space"),
        (
            lambda: word_level(WORDS, "$A", pad_token="a", unk_token="bb"),
            "finds a, bb inside words",
        ),
        (lambda: tokenizer_of((*WORDS, "new")), "9 tokens and the model's embedding 8 rows"),
    ],
)
def test_other_tokenizers_are_refused(tokenizer, message):
    with pytest.raises(ConfigError, match=message):
        WordCertificate(model_of(0), tokenizer(), max_length=9)


def test_other_changes_than_replaced_words_are_refused():
    certificate = certificate_of(blocks=0)
    for name in ("edited", "mistyped"):
        with pytest.raises(TypeError, match=name):
            certificate.accuracy(TWO, [0, 1], **{name: [1]})
    with pytest.raises(ConfigError, match="most"):
        certificate.explain("a b", {"words": 1, "characters": 1})
    with pytest.raises(ConfigError, match="most"):
        certificate.hold([], {"words": 1, "edits": 1})


def test_longer_texts_than_are_covered_are_refused():
    with pytest.raises(ShapeError, match="4 tokens"):
        certificate_of(3, blocks=0).hold([batch_of(drawn(1))], 1)


@pytest.mark.parametrize("words", [0.0, 1.0, 1.5, 2.0, 9.0])
@pytest.mark.parametrize("blocks", [0, 2])
def test_the_loss_reads_what_k_words_can_reach(blocks, words):
    """Without blocks the logits are those of the best replacements; with blocks they are above. All
    parameters have gradients."""
    model = model_of(blocks, ball_embeddings=True, unit_embeddings=False).double()
    texts = [*drawn(3), [5, 2]]
    batch = batch_of(texts, labels=torch.tensor([0, 1, 2, 0]))
    clean = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    reached = word_logits(clean, batch, model, words)
    labels = batch["labels"][:, None]
    torch.testing.assert_close(reached.gather(1, labels), clean.gather(1, labels))
    reader = WordCertificate(model, tokenizer_of(), max_length=4).reader
    for row, (text, label) in enumerate(zip(texts, batch["labels"].tolist(), strict=True)):
        gains = reader.gains(label, torch.tensor(text)).sort(0, descending=True).values
        count = int(min(words, len(text)))
        part = words - math.floor(words)
        moved = gains[:count].sum(0) + (part * gains[count] if count < len(text) else 0.0)
        moved[label] = 0.0
        expected = (clean[row] + moved / len(text)).detach()
        if blocks == 0:
            torch.testing.assert_close(reached[row].detach(), expected, atol=1e-7, rtol=1e-7)
        else:
            assert (reached[row] >= expected - 1e-7).all(), "weights have norm 1"
    if words:
        (reached - clean).sum().backward()
        learnt = dict(model.named_parameters())
        names = [n for n in learnt if n.endswith(("token.weight", "logit", "classifier.weight"))]
        assert all(learnt[n].grad is not None for n in names if "mix" not in n)


def test_a_model_without_such_a_loss_is_named():
    batch = batch_of(drawn(1), labels=torch.tensor([0]))
    model = model_of(1, attention="dot_product")
    with pytest.raises(ConfigError, match="DotProductAttention"):
        word_logits(torch.zeros(1, 3), batch, model, 1.0)
    with pytest.raises(ConfigError, match="received a Linear"):
        word_logits(torch.zeros(1, 3), batch, torch.nn.Linear(2, 2), 1.0)
