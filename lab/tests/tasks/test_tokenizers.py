"""Bulk encoding equals the tokenizer; tokenizers decode exactly, save and load; nothing unknown is silent;
the joint tokenizer of two languages."""

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tokenizer_folders import bert_words
from tests.support.words import python

from wellposed.errors import ConfigError
from wellposed.words import split_words
from wellposed_lab.tasks.task import build_task
from wellposed_lab.tasks.text.seq2seq_tokenizers import BOS_ID, EOS_ID, PAD_ID, build_pair_encoder
from wellposed_lab.tasks.text.tokenizers import (
    PAD,
    UNK,
    UNK_ID,
    WORD_PAD,
    WORD_UNK,
    ByteEncoder,
    CharacterEncoder,
    WordEncoder,
    build_encoder,
    load_tokenizer,
)

TEXTS = [
    "To be, or not to be\n\tthat is  the question.",
    "naïve café 日本語 😀 e\u0301 \u00a0\u2028\r\n",
    f"<unk> {PAD} {UNK} {WORD_PAD} [MASK] <s> </s>",
    " leading and trailing ",
    "\x00\x1c\x85\x7f",
]
BUILDERS = {
    "character": lambda: CharacterEncoder("".join(TEXTS)),
    "byte": ByteEncoder,
    "word": lambda: WordEncoder.from_texts(TEXTS, max_words=100),
}


def rows(encoder, texts):
    return [row.tolist() for row in encoder.encode(texts).ids]


@pytest.mark.parametrize("kind", BUILDERS)
def test_bulk_encoding_equals_the_tokenizer(kind):
    encoder = BUILDERS[kind]()
    tokenizer = encoder.tokenizer(max_length=512)
    texts = [*TEXTS, "", "unseen ΩΩ words"]
    assert rows(encoder, texts) == [tokenizer(text)["input_ids"] for text in texts]
    assert len(tokenizer) == encoder.vocab_size


@pytest.mark.parametrize("kind", BUILDERS)
def test_round_trip_through_auto_tokenizer(kind, tmp_path):
    from transformers import AutoTokenizer

    encoder = BUILDERS[kind]()
    encoder.tokenizer(max_length=77).save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    texts = [*TEXTS, "unseen ΩΩ words"]
    assert [loaded(text)["input_ids"] for text in texts] == rows(encoder, texts)
    assert loaded.model_max_length == 77
    pad, unk = (WORD_PAD, WORD_UNK) if kind == "word" else (PAD, UNK)
    assert (loaded.pad_token, loaded.pad_token_id) == (pad, 0)
    assert (loaded.unk_token, loaded.unk_token_id) == (unk, UNK_ID)
    if kind != "word":
        assert [loaded.decode(loaded(text)["input_ids"]) for text in TEXTS] == TEXTS


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=40))
def test_characters_and_bytes_of_any_text(text):
    encoded = CharacterEncoder(text).encode([text])
    assert not encoded.unknown
    assert encoded.full_lengths == [len(text)]
    assert [i - 2 for i in rows(ByteEncoder(), [text])[0]] == list(text.encode())


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet=st.characters(categories=["Zs", "Zl", "Zp", "Cc", "L"]), max_size=30))
def test_split_words_is_the_whitespace_split_of_the_tokenizer(text):
    from tokenizers.pre_tokenizers import WhitespaceSplit

    assert split_words(text) == [word for word, _ in WhitespaceSplit().pre_tokenize_str(text)]


def test_unknown_characters_and_words_are_counted():
    encoded = CharacterEncoder("abc").encode(["abxx", "cyx"])
    assert dict(encoded.unknown) == {"x": 3, "y": 1}
    described = {"count": 4, "distinct": 2, "most_frequent": {"x": 3, "y": 1}}
    assert encoded.unknown_description() == described
    assert encoded.ids.flat.tolist() == [2, 3, UNK_ID, UNK_ID, 4, UNK_ID, UNK_ID]
    words = WordEncoder(["a", "b"]).encode(["a c b", "c d"])
    assert dict(words.unknown) == {"c": 2, "d": 1}
    # The vocabulary is the most frequent, ties in alphabetical order.
    assert WordEncoder.from_texts(["b a c c", "d"], max_words=3).words == ["c", "a", "b"]


def test_truncation_keeps_the_first_tokens_and_reports_full_lengths():
    encoded = CharacterEncoder("abc").encode(["abc", "", "a", "cba"], max_length=2)
    assert [row.tolist() for row in encoded.ids] == [[2, 3], [], [2], [4, 3]]
    assert encoded.full_lengths == [3, 0, 1, 3]


def test_a_pretrained_tokenizer_keeps_its_special_tokens_when_it_truncates(tmp_path):
    bert_words(["one", "two", "three"]).save_pretrained(tmp_path)  # [CLS] before, [SEP] behind
    encoder = build_encoder(f"hf:{tmp_path}", [], max_words=1)
    encoded = encoder.encode(["one two three", "one zebra"], max_length=4)
    assert [row.tolist() for row in encoded.ids] == [[2, 4, 5, 3], [2, 4, 1, 3]]
    assert encoded.full_lengths == [5, 4]
    assert dict(encoded.unknown) == {"[UNK]": 1}
    assert (encoder.pad_id, encoder.vocab_size) == (0, 7)
    assert encoder.tokenizer(max_length=4).model_max_length == 4


def test_tokenizers_that_cannot_be_used_are_refused(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = models.WordLevel({"a": 0, "b": 1}, unk_token="b")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(tmp_path)
    for name, message in (
        ("chars", "tokenizer = 'chars', expected byte, character, word or hf:NAME"),
        ("hf:/no/such/folder", r"tokenizer 'hf:/no/such/folder' cannot be loaded.*give a folder"),
        (f"hf:{tmp_path}", "neither a pad nor an eos token"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_encoder(name, [], max_words=1)


PAIR_TEXTS = [
    "zwei junge männer , die &apos;s lesen .",
    "two young men are reading it .",
    'Raw "text", with marks: e.g. 3.5 %!',
    "young men , younger men , the youngest men",
] * 3


@pytest.mark.parametrize("kind", ["bpe", "char"])
def test_texts_come_back_and_the_saved_tokenizer_is_the_same(tmp_path, kind):
    from transformers import AutoTokenizer

    encoder = build_pair_encoder(kind, PAIR_TEXTS, vocab_size=120)
    tokenizer = encoder.tokenizer(max_length=50)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text, row in zip(PAIR_TEXTS, encoder.encode(PAIR_TEXTS).ids, strict=True):
        ids = row.tolist()
        assert ids[-1] == EOS_ID
        assert UNK_ID not in ids
        assert tokenizer(text)["input_ids"] == loaded(text)["input_ids"] == ids
        assert loaded.decode(ids, skip_special_tokens=True) == text
    special = (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id)
    assert special == (PAD_ID, BOS_ID, EOS_ID)
    assert loaded.model_max_length == 50
    assert encoder.vocab_size == len(loaded)


@pytest.mark.parametrize("kind", ["bpe", "char"])
def test_white_space_is_read_as_one_space_and_markup_as_characters(kind):
    tokenizer = build_pair_encoder(kind, PAIR_TEXTS, vocab_size=120).tokenizer(max_length=50)
    assert tokenizer("  two\t young ")["input_ids"] == tokenizer("two young")["input_ids"]
    assert tokenizer("</s>")["input_ids"].count(EOS_ID) == 1
    if kind == "char":
        encoder = build_pair_encoder(kind, PAIR_TEXTS, vocab_size=0)
        assert encoder.encode(["two ☃☃", "ž young"]).unknown == {"☃": 2, "ž": 1}


def test_frequent_pairs_are_merged_and_the_vocabulary_is_joint():
    encoder = build_pair_encoder("bpe", PAIR_TEXTS, vocab_size=120)
    lengths = encoder.encode(["young men", "zwei junge"]).ids.lengths.tolist()
    assert lengths[0] < lengths[1] + 4 < len("young men")
    assert encoder.vocab_size <= 120
    with pytest.raises(
        ConfigError, match=r"vocab_size = 10, but the texts have \d+ characters; expected at least"
    ):
        build_pair_encoder("bpe", PAIR_TEXTS, vocab_size=10)


def test_equal_texts_give_equal_vocabularies_in_every_process():
    """The merges of 400 pseudo-words, many of them tied in frequency, under two hash seeds."""
    code = (
        "import random, hashlib; from wellposed_lab.tasks.text.seq2seq_tokenizers import"
        " build_pair_encoder as b\nr = random.Random(0); t = [' '.join(''.join(r.choice('abcdefgh')"
        " for _ in range(5)) for _ in range(8)) for _ in range(50)]\nprint(hashlib.sha256(b('bpe',"
        " t, vocab_size=300).inner.to_str().encode()).hexdigest())"
    )
    digests = {
        python("-c", [code], env={**os.environ, "PYTHONHASHSEED": seed}, check=True).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


def test_words_and_marks_are_read_apart_as_a_language_model_of_them_was_trained(tmp_path):
    task = build_task("word_lm", {"limit_words": 500, "seq_len": 11})
    task.tokenizer.save_pretrained(tmp_path)
    read = load_tokenizer(str(tmp_path)).backend_tokenizer.pre_tokenizer
    pieces = read.pre_tokenize_str("Well, it's (almost) done.<eos>")
    assert " ".join(piece for piece, _ in pieces) == "Well , it ' s ( almost ) done . <eos>"
