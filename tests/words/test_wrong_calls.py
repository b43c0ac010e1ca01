"""Damaged window models, wrong tokenizers and other wrong calls in words are errors of ours that name the mistake."""

import json

import pytest
import torch
import transformers as hf
from tests.support.tokenizer_folders import bert_words

from wellposed.errors import CheckpointError, ConfigError
from wellposed.integrations import set_attention_
from wellposed.models import WindowsForSequenceClassification, load_saved_model
from wellposed.words import WordCertificate, read_in_windows

SIZES = {
    "vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "max_position_embeddings": 8,
}  # fmt: skip
WINDOWS = {"window_words": 1, "word_tokens": 2, "frame": [[1], [2]]}


def bert():
    return hf.BertForSequenceClassification(hf.BertConfig(**SIZES))


def windows():
    return WindowsForSequenceClassification.around(bert(), 0, **WINDOWS)


DAMAGED = [
    *(("frame", value) for value in ("x", 3, [], [[1]], [[1], [2], [3]], [1, 2], {})),
    *(("frame", [[token], []]) for token in ("a", -1, 1.5, None)),
    *(("word_tokens", value) for value in (0, -1, "x", None, 1.5, True)),
    *(("window_words", value) for value in (0, -1, None, 1.5)),
    *(("inner", value) for value in ("x", 3, [])),
    *(("frozen", value) for value in ("x", 3)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), DAMAGED)
def test_a_damaged_config_of_windows_is_refused_by_name(name, value, tmp_path):
    windows().save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), name: value}))
    with pytest.raises((CheckpointError, ConfigError), match=name):
        load_saved_model(tmp_path)


NO_TOKENIZERS = [
    "bert-base-uncased",
    None,
    3,
    hf.BertConfig(),
    torch.nn.Linear(2, 2),
    hf.PreTrainedTokenizerFast,
]


@pytest.mark.parametrize("tokenizer", NO_TOKENIZERS, ids=lambda value: type(value).__name__)
def test_no_tokenizer_is_refused(tokenizer):
    with pytest.raises(ConfigError, match="tokenizer: expected"):
        read_in_windows(bert(), tokenizer, ["a film"])
    with pytest.raises(ConfigError, match="tokenizer: expected"):
        WordCertificate(windows(), tokenizer)


CALLS = {
    "model: expected a sequence classifier": lambda tok: read_in_windows(
        torch.nn.Linear(2, 2), tok, ["a"]
    ),
    r"expected a model \(torch.nn.Module\), received str": lambda tok: read_in_windows(
        "bert", tok, ["a"]
    ),
    "texts: received one str": lambda tok: read_in_windows(bert(), tok, "a film"),
    "words = 0": lambda tok: read_in_windows(bert(), tok, ["a"], 0),
    "words = 'x'": lambda tok: read_in_windows(bert(), tok, ["a"], "x"),
    "max_length = -1": lambda tok: read_in_windows(bert(), tok, ["a"], max_length=-1),
    "WordCertificate: model": lambda tok: WordCertificate(torch.nn.Linear(2, 2), tok),
    "WordCertificate: expected a model": lambda tok: WordCertificate(3, tok),
}


@pytest.mark.parametrize("message", CALLS)
def test_a_wrong_call_in_words_is_refused(message):
    with pytest.raises(ConfigError, match=message):
        CALLS[message](bert_words(["a", "film"]))


@pytest.mark.parametrize(
    "name", [3, None, ["wellposed_l2"], "", "sdpa", torch.nn.Identity()], ids=repr
)
def test_a_wrong_name_of_attention_is_refused_and_changes_nothing(name):
    model = bert()
    before = model.config._attn_implementation
    with pytest.raises(ConfigError, match="unknown attention implementation"):
        set_attention_(model, name)
    assert model.config._attn_implementation == before
    with pytest.raises(ConfigError, match="set_attention_: needs a model"):
        set_attention_(name, "wellposed_l2")
