"""The joint tokenizer: round trips, saved and loaded, the same everywhere, unknown characters
counted."""

import os
import subprocess
import sys

import pytest
from tests.support.refusal import bad_config

from wellposed.tasks.text.seq2seq_tokenizers import (
    BOS_ID,
    EOS_ID,
    PAD_ID,
    UNK_ID,
    build_pair_encoder,
)

TEXTS = [
    "zwei junge männer , die &apos;s lesen .",
    "two young men are reading it .",
    'Raw "text", with marks: e.g. 3.5 %!',
    "young men , younger men , the youngest men",
] * 3


@pytest.mark.parametrize("kind", ["bpe", "char"])
def test_texts_come_back_and_the_saved_tokenizer_is_the_same(tmp_path, kind):
    from transformers import AutoTokenizer

    encoder = build_pair_encoder(kind, TEXTS, vocab_size=120)
    tokenizer = encoder.tokenizer(max_length=50)
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text, row in zip(TEXTS, encoder.encode(TEXTS).ids, strict=True):
        ids = row.tolist()
        assert ids[-1] == EOS_ID
        assert UNK_ID not in ids
        assert tokenizer(text)["input_ids"] == loaded(text)["input_ids"] == ids
        assert loaded.decode(ids, skip_special_tokens=True) == text
    assert (loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id) == (
        PAD_ID,
        BOS_ID,
        EOS_ID,
    )
    assert loaded.model_max_length == 50
    assert encoder.vocab_size == len(loaded)


@pytest.mark.parametrize("kind", ["bpe", "char"])
def test_white_space_is_read_as_one_space_and_markup_as_characters(kind):
    tokenizer = build_pair_encoder(kind, TEXTS, vocab_size=120).tokenizer(max_length=50)
    assert tokenizer("  two\t young ")["input_ids"] == tokenizer("two young")["input_ids"]
    assert tokenizer("</s>")["input_ids"].count(EOS_ID) == 1


def test_unknown_characters_are_counted_and_named():
    encoder = build_pair_encoder("char", TEXTS, vocab_size=0)
    found = encoder.encode(["two ☃☃", "ž young"])
    assert found.unknown_description() == {
        "count": 3,
        "distinct": 2,
        "most_frequent": {"☃": 2, "ž": 1},
    }
    assert found.ids.flat.tolist().count(UNK_ID) == 3


def test_frequent_pairs_are_merged_and_the_vocabulary_is_joint():
    encoder = build_pair_encoder("bpe", TEXTS, vocab_size=120)
    lengths = encoder.encode(["young men", "zwei junge"]).ids.lengths.tolist()
    assert lengths[0] < lengths[1] + 4 < len("young men")
    assert encoder.vocab_size <= 120


def test_a_vocabulary_below_the_characters_is_refused():
    with bad_config(match=r"vocab_size = 10, but the texts hold \d+ characters; expected at least"):
        build_pair_encoder("bpe", TEXTS, vocab_size=10)


def test_equal_texts_give_equal_vocabularies_in_every_process():
    """The merges of 400 pseudo-words, many of them tied in frequency, under two hash seeds."""
    code = (
        "import random, hashlib; from wellposed.tasks.text.seq2seq_tokenizers import"
        " build_pair_encoder as b\nr = random.Random(0); t = [' '.join(''.join(r.choice('abcdefgh')"
        " for _ in range(5)) for _ in range(8)) for _ in range(50)]\nprint(hashlib.sha256(b('bpe',"
        " t, vocab_size=300).inner.to_str().encode()).hexdigest())"
    )
    out = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(out) == 1
