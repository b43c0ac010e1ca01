"""Windows read the ids that were encoded for them, and refuse all others by name; one long word does
not set the length of all."""

import functools
import logging

import pytest
import torch
from tests.support.tokenizer_folders import bert_words, byte_level_bpe
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorWithPadding,
    GPT2Config,
    GPT2ForSequenceClassification,
    PreTrainedTokenizerFast,
)

from wellposed.errors import ConfigError
from wellposed.models import (
    WellposedConfig,
    WellposedForSequenceClassification,
    WindowsForSequenceClassification,
)
from wellposed.words import WordCertificate, encode_words, read_in_windows, window_options

TEXTS = ["a good film with a happy end", "bad film", "the bad and the good film end"]
SIZES: dict = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def gpt2_tokens():
    tokenizer = byte_level_bpe([*TEXTS, *["a good bad film"] * 9], size=270)
    tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def bert_pieces():
    """Words of one token and of several, between special tokens."""
    tokenizer = byte_level_bpe(TEXTS, size=290)
    tokenizer.add_special_tokens({"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"})
    return tokenizer


TOKENIZERS = {
    "words": lambda: bert_words(sorted({word for text in TEXTS for word in text.split()})),
    "bytes": gpt2_tokens,
    "pieces": bert_pieces,
}


@functools.cache
def windows_of(kind):
    torch.manual_seed(0)
    tokenizer = TOKENIZERS[kind]()
    if kind == "bytes":
        config = GPT2Config(vocab_size=len(tokenizer), n_embd=16, n_layer=1, n_head=2, num_labels=2)
        config.pad_token_id = tokenizer.pad_token_id
        model = GPT2ForSequenceClassification(config)
    else:
        config = BertConfig(vocab_size=len(tokenizer), intermediate_size=16, **SIZES)
        model = BertForSequenceClassification(config)
    return read_in_windows(model, tokenizer, TEXTS).eval(), tokenizer


def padded(rows, pad, multiple, side="right"):
    """A batch of rows, padded to a multiple of the length of a word, so that its length fits."""
    longest = max(map(len, rows))
    length = -(-longest // multiple) * multiple
    ids = torch.full((len(rows), length), pad)
    mask = torch.zeros(len(rows), length).long()
    for row_index, row in enumerate(rows):
        part = slice(len(row)) if side == "right" else slice(length - len(row), length)
        ids[row_index, part] = torch.tensor(row)
        mask[row_index, part] = 1
    return {"input_ids": ids, "attention_mask": mask}


def own_windows(windows, tokenizer, special=True, side="right"):
    rows = tokenizer(TEXTS, add_special_tokens=special)["input_ids"]
    width = windows.config.word_tokens + 1
    return padded(rows, tokenizer.pad_token_id, width, side)


def of_other_windows(windows, tokenizer, tokens):
    """Encoded word by word, for a model that reads more or fewer tokens of a word."""
    rows = encode_words(tokenizer, [text.split() for text in TEXTS], tokens, -(tokens + 1))
    return padded(rows, tokenizer.pad_token_id, windows.config.word_tokens + 1)


def without_marks(windows, tokenizer):
    rows = encode_words(tokenizer, [text.split() for text in TEXTS], windows.config.word_tokens + 1)
    return padded(rows, tokenizer.pad_token_id, windows.config.word_tokens + 1)


OTHER = {
    "whole texts": own_windows,
    "without special tokens": lambda *model: own_windows(*model, special=False),
    "padded on the left": lambda *model: own_windows(*model, side="left"),
    "fewer tokens": lambda windows, tok: of_other_windows(
        windows, tok, (windows.config.word_tokens + 1) // 2 - 1 or 7
    ),
    "twice the tokens": lambda windows, tok: of_other_windows(
        windows, tok, 2 * windows.config.word_tokens + 1
    ),
    "marks missing": without_marks,
}
CALLS = {
    "forward": lambda windows, tokenizer, batch: windows(**batch),
    "forward without mask": lambda windows, tok, batch: windows(input_ids=batch["input_ids"]),
    "training": lambda windows, tokenizer, batch: windows.train()(
        **batch, labels=torch.zeros(3).long()
    ),
    "votes": lambda windows, tokenizer, batch: windows.votes(**batch),
    "hold": lambda windows, tokenizer, batch: WordCertificate(windows, tokenizer).hold([batch], 1),
    "accuracy_of": lambda windows, tokenizer, batch: WordCertificate(
        windows, tokenizer
    ).accuracy_of([{**batch, "labels": torch.zeros(3).long()}], [1]),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("ids", OTHER)
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_ids_of_another_encoding_are_refused_by_name(kind, ids, call):
    windows, tokenizer = windows_of(kind)
    batch = OTHER[ids](windows, tokenizer)
    with pytest.raises(ConfigError, match="were not encoded for this model's windows") as caught:
        CALLS[call](windows, tokenizer, batch)
    assert "WordCertificate(model, tokenizer).encode" in str(caught.value)
    windows.eval()


def test_a_length_that_does_not_fit_is_refused_in_the_same_words():
    windows, _ = windows_of("words")
    with pytest.raises(ConfigError, match="5 tokens, expected a multiple of 2") as caught:
        windows(torch.tensor([[2, 4, 5, 6, 3]]))
    assert "were not encoded for" in str(caught.value)
    assert ".encode(texts)" in str(caught.value)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_encoded_ids_are_read_however_they_are_padded(kind):
    """By the collator, on either side, with the mask of the ids or of the padding or without."""
    windows, tokenizer = windows_of(kind)
    rows = WordCertificate(windows, tokenizer).encode(TEXTS)
    pad = tokenizer.pad_token_id
    with torch.no_grad():
        alone = torch.cat([windows(input_ids=row[None]).logits for row in rows])
        for side in ("right", "left"):
            tokenizer.padding_side = side
            batch = DataCollatorWithPadding(tokenizer)([{"input_ids": row} for row in rows])
            ids = batch["input_ids"]
            width = windows.config.word_tokens + 1
            words = (ids.unflatten(1, (-1, width)) != pad).any(-1).repeat_interleave(width, 1)
            masks = [batch["attention_mask"], (ids != pad).long(), words.long(), words, None]
            for mask in masks:
                torch.testing.assert_close(windows(ids, mask).logits, alone)
        tokenizer.padding_side = "right"


def test_a_model_of_an_earlier_version_reads_words_without_marks():
    windows, tokenizer = windows_of("words")
    old = WindowsForSequenceClassification.around(
        windows.model, tokenizer.pad_token_id, word_tokens=1, frame=windows.config.frame
    ).eval()
    rows = WordCertificate(old, tokenizer).encode(TEXTS)
    assert [len(row) for row in rows] == [len(text.split()) for text in TEXTS]
    ids = pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
    marked = WordCertificate(windows, tokenizer).encode(TEXTS)
    with torch.no_grad():
        expected = torch.cat([windows(input_ids=row[None]).logits for row in marked])
        torch.testing.assert_close(old(ids, mask).logits, expected)


def test_one_long_word_is_cut_and_does_not_set_the_length_of_all(caplog):
    tokenizer = bert_pieces()
    long = "https://" + "ax" * 40
    plain = window_options(tokenizer, TEXTS, 1)["word_tokens"]
    with caplog.at_level(logging.WARNING, logger="wellposed.words"):
        options = window_options(tokenizer, [*TEXTS, f"film {long}"], 1)
    assert options["word_tokens"] <= 4 * plain
    longest = len(tokenizer(f" {long}", add_special_tokens=False)["input_ids"])
    assert longest > 4 * plain
    (message,) = caplog.messages
    assert f"1 of 18 train words are longer and are cut, the longest has {longest}" in message
    (row,) = encode_words(tokenizer, [["film", long]], options["word_tokens"], options["word_mark"])
    assert len(row) == 2 * (options["word_tokens"] + 1)


def test_words_of_about_one_length_are_never_cut(caplog):
    options = window_options(bert_pieces(), TEXTS * 100, 1)
    assert not caplog.messages
    sizes = [
        len(bert_pieces()(f" {w}", add_special_tokens=False)["input_ids"]) for w in TEXTS[0].split()
    ]
    assert options["word_tokens"] >= max(sizes)


@functools.cache
def bag_of_words():
    words = ["[PAD]", "[UNK]", *sorted({word for text in TEXTS for word in text.split()})]
    inner = Tokenizer(models.WordLevel({word: row for row, word in enumerate(words)}, "[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "split_special_tokens": True}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    bag = {"num_hidden_layers": 0, "norm": "none", "position": "none", "pooling": "mean"}
    sizes = {"vocab_size": len(words), "hidden_size": 4, "num_attention_heads": 1}
    return WellposedForSequenceClassification(WellposedConfig(**bag, **sizes)).eval(), tokenizer


DECODED = {kind: functools.partial(windows_of, kind) for kind in TOKENIZERS}
DECODED["bag of words"] = bag_of_words


@pytest.mark.parametrize("kind", DECODED)
def test_ids_of_encode_are_decoded_padded_or_not(kind):
    certificate = WordCertificate(*DECODED[kind]())
    ids = certificate.encode(TEXTS)
    assert certificate.decode(ids) == TEXTS
    assert certificate.decode(row.tolist() for row in ids) == TEXTS
    blank = certificate.tokenizer.pad_token_id
    assert certificate.decode(pad_sequence(ids, batch_first=True, padding_value=blank)) == TEXTS


@pytest.mark.parametrize("ids", ["whole texts", "marks missing", "twice the tokens"])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_decode_refuses_ids_of_another_encoding(kind, ids):
    windows, tokenizer = windows_of(kind)
    batch = OTHER[ids](windows, tokenizer)["input_ids"]
    decode = WordCertificate(windows, tokenizer).decode
    with pytest.raises(ConfigError, match="not encoded for this model's windows"):
        decode(batch)


def test_decode_shows_where_a_word_was_cut():
    windows, tokenizer = windows_of("bytes")
    certificate = WordCertificate(windows, tokenizer)
    [text] = certificate.decode(certificate.encode(["film badbadbadbadbadbadbadbadbadbad"]))
    first, second = text.split()
    assert first == "film"
    assert second != "bad" * 10
    assert ("bad" * 10).startswith(second)
