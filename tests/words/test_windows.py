"""Windows of words that vote (B15): all replacements tried, and votes moved freely."""

import copy
import functools
import itertools

import pytest
import torch
from tests.support.tokenizer_folders import bert_words, byte_level_bpe
from tests.words.test_words import replaced
from transformers import BertConfig, BertForSequenceClassification

from wellposed.errors import CheckpointError, ConfigError
from wellposed.models import LOGIT_SCALE, WindowsForSequenceClassification, load_saved_model
from wellposed.words import (
    WordCertificate,
    encode_words,
    read_in_windows,
    window_options,
    word_logits,
)

WORDS = ("oil", "win", "bank", "goal", "x")


@functools.cache
def bounds_of(words, limit=24):
    """A BERT that learnt to which of three classes the first word of a window belongs."""
    torch.manual_seed(0)
    tokenizer = bert_words(WORDS)
    sizes: dict = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"vocab_size": len(tokenizer), "intermediate_size": 16, "num_labels": 3}
    model = BertForSequenceClassification(BertConfig(max_position_embeddings=8, **sizes))
    windows = read_in_windows(model, tokenizer, [" ".join(WORDS)], words)
    bounds = WordCertificate(windows, tokenizer, max_length=limit)
    learning = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        numbers = torch.randint(0, 5, (32, words))
        ids = bounds.encode([" ".join(WORDS[n] for n in row) for row in numbers.tolist()])
        learning.zero_grad()
        logits = windows(input_ids=torch.stack(ids)).logits
        torch.nn.functional.cross_entropy(logits, numbers[:, 0] % 3).backward()
        learning.step()
    return WordCertificate(windows, tokenizer, max_length=limit)


def drawn(count, words, length=8):
    """Return texts that mostly repeat a window, so that many of them are certified for a change."""
    generator = torch.Generator().manual_seed(5)
    texts = []
    for number in range(count):
        window = [WORDS[n] for n in torch.randint(0, 5, (words,), generator=generator).tolist()]
        text = ((window if number % 2 else window[:1]) * length)[:length]
        position, word = (int(torch.randint(0, n, (), generator=generator)) for n in (length, 5))
        text[position : position + 1] = [WORDS[word]]
        texts.append(text)
    return texts


def answers(bounds, texts):
    with torch.no_grad():
        ids = bounds.encode([" ".join(text) for text in texts])
        return torch.cat([bounds.model(input_ids=row[None]).logits.argmax(-1) for row in ids])


def batch_of(bounds, text):
    (ids,) = bounds.encode([" ".join(text)])
    ids = ids[None]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.slow
@pytest.mark.parametrize("words", [1, 2, 3])
def test_no_replaced_words_change_a_certified_answer(words):
    """Try known and unknown words in each place or two, and every special token's string."""
    bounds = bounds_of(words)
    some = 0
    for text in drawn(6, words, 14):
        (result,) = bounds.hold([batch_of(bounds, text)], 2)
        k = result.replaceable
        some += k > 0
        others = replaced(text, k, (*WORDS, "unheard", "[PAD]"))
        assert (answers(bounds, others[:: 1 + len(others) // 150]) == result.predicted).all()
    assert some


def test_no_votes_of_k_windows_change_a_certified_answer_and_those_of_one_more_do():
    """Any k windows vote for another class alone, as for any reader of windows."""
    bounds = bounds_of(2)
    some = set()
    for text in drawn(8, 2, length=10):
        batch = batch_of(bounds, text)
        (result,) = bounds.hold([batch], 4)
        votes = bounds.model.votes(batch["input_ids"])[0].detach()
        label = result.predicted
        needed = []
        for target in {0, 1, 2} - {label}:
            for k in range(1, len(votes) + 1):
                for windows in map(list, itertools.combinations(range(len(votes)), k)):
                    changed = votes.clone()
                    changed[windows] = torch.nn.functional.one_hot(torch.tensor(target), 3).double()
                    ahead = changed.mean(0)[label] - changed.mean(0)[target]
                    needed += [k] if ahead <= 0 else []
        assert result.replaceable == min(needed) - 1
        some.add(result.replaceable)
    assert len(some) > 1


@pytest.mark.parametrize("words", [1, 2])
def test_an_attack_never_falls_below_the_certificate(words):
    bounds = bounds_of(words, 16)
    texts = drawn(6, words, 14)
    texts.append(["[PAD]"] * 14)  # words without tokens
    batches = [{**batch_of(bounds, text), "labels": answers(bounds, [text])} for text in texts]
    accuracy = bounds.accuracy_of(batches, [1, 7])
    assert accuracy.clean == 1
    assert all(s <= a for s, a in zip(accuracy.certified, accuracy.attacked, strict=True))
    assert accuracy.certified[0] > 0
    assert accuracy.attacked[1] < 1, "the attack turns some texts"
    (ids,) = bounds.encode(["oil win"])
    numbers = WordCertificate(bounds.model, bert_words("12345"), max_length=16).reader
    assert numbers.propose(ids, 0)(ids, 1), "of a vocabulary without letters"


def test_the_loss_reads_the_worst_votes_of_k_windows():
    votes = torch.tensor([[[0.7, 0.2, 0.1], [0.5, 0.3, 0.2], [0.0, 0.0, 0.0]]])
    logits = votes.sum(1).div(2) * LOGIT_SCALE
    batch = {"labels": torch.tensor([0])}
    reached = word_logits(logits, batch, None, 1.5, votes) / LOGIT_SCALE
    expected = [0.6, 0.25 + (1.5 + 0.5 * 1.2) / 2, 0.15 + (1.6 + 0.5 * 1.3) / 2]
    torch.testing.assert_close(reached, torch.tensor([expected]))


def test_windows_are_a_function_of_their_words_alone():
    tokenizer = bert_words(WORDS)
    (ids,) = encode_words(tokenizer, [["oil", "x", "oil", "unheard"]], 2)
    (oil,), (x,) = (encode_words(tokenizer, [[word]], 2) for word in ("oil", "x"))
    assert ids[:6] == [*oil, *x, *oil]
    assert len(ids) == 8
    expected = {"window_words": 2, "word_tokens": 1, "word_mark": -2, "frame": [[2], [3]]}
    assert window_options(tokenizer, ["oil win", "x"], 2) == expected
    bounds = bounds_of(2)
    alone = answers(bounds, [["oil", "x", "win"], ["win"]])
    batch = torch.stack(bounds.encode(["oil x win", "win win win"]))
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]])
    assert bounds.model(batch, mask).logits.argmax(-1).tolist() == alone.tolist()
    read = []
    inner = bounds.model.model
    hook = inner.register_forward_pre_hook(lambda *a: read.append(a[2]), with_kwargs=True)
    with torch.no_grad():
        votes = bounds.model.votes(batch, mask)
    hook.remove()
    assert [len(text) for text in bounds.reader.read(batch, mask)[1]] == [2, 1]
    assert torch.equal(votes[0, 1], votes[1, 0]), "a last window with one word"
    encoded = [tokenizer(text)["input_ids"] for text in ("win", "oil x")]
    assert [inputs["input_ids"].tolist()[0] for inputs in read] == encoded, "as the tokenizer's own"
    assert all(inputs["attention_mask"].all() for inputs in read), "and nothing reads padding"
    wider = WindowsForSequenceClassification.around(inner, 0, word_tokens=4)
    with pytest.raises(ConfigError, match="expected a multiple of 4"):
        wider(batch)
    with pytest.raises(ConfigError, match="takes token ids, not vectors"):
        bounds.model(inputs_embeds=torch.zeros(1, 4, 16))


def test_padding_before_a_text_is_not_read():
    """Pad on the left, as some tokenizers do in the batches of other loops."""
    bounds = bounds_of(2)
    ids, mask = (torch.tensor([row]) for row in ([3, 4, 5, 0, 0], [1, 1, 1, 0, 0]))
    ids = torch.stack([torch.where(mask == 1, -2, 0), ids], -1).flatten(1)
    mask = mask.repeat_interleave(2, 1)
    left = bounds.model.votes(ids.roll(4, 1), mask.roll(4, 1))
    assert torch.equal(left, bounds.model.votes(ids, mask))


def _hooked(model):
    model.register_forward_hook(lambda *a: None)


def _replaced(model):
    model.forward = model.forward


def _subclass(model):
    model.__class__ = type("Other", (WindowsForSequenceClassification,), {})


@pytest.mark.parametrize(
    ("change", "problem"),
    [(_hooked, "a hook or another"), (_replaced, "a hook or another"), (_subclass, "WordLevel")],
)
def test_votes_that_something_else_may_change_are_refused(change, problem):
    model = copy.deepcopy(bounds_of(1).model)
    change(model)
    with pytest.raises(ConfigError, match=problem):
        WordCertificate(model, bounds_of(1).tokenizer)


def test_a_tokenizer_without_padding_is_refused():
    with pytest.raises(ConfigError, match="no padding token"):
        read_in_windows(bounds_of(1).model.model, byte_level_bpe(["oil"]), ["oil"])


def test_a_saved_model_of_pairs_is_refused_in_one_line(tmp_path):
    model = copy.deepcopy(bounds_of(1).model)
    model.config.window_words = "pairs"
    model.save_pretrained(tmp_path)
    message = r"cannot be loaded: window_words = 'pairs': .*--certified-windows 1$"
    with pytest.raises(CheckpointError, match=message):
        load_saved_model(tmp_path)
