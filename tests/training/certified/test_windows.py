"""Windows of words that vote (B15): every replacement tried, windows free to move, and a user's own
checkpoint from training to the table."""

import functools
import itertools

import pytest
import torch
from tests.support.tokenizer_folders import bert_words
from transformers import BertConfig, BertForSequenceClassification

from wellposed.cli import main
from wellposed.errors import ConfigError
from wellposed.models import WindowsForSequenceClassification, load_saved_model
from wellposed.tasks.text.tokenizers import cut_windows, encode_windows
from wellposed.training.certified.windows import WindowBounds
from wellposed.training.certified.word_accuracy import word_accuracy
from wellposed.training.certified.words import hold_texts
from wellposed.training.loop.word_margin import word_logits

WORDS = ("oil", "win", "bank", "goal", "x")


@functools.cache
def bounds_of(words, limit=24):
    """A BERT that learnt which of three classes the first word of a window is of."""
    torch.manual_seed(words)
    tokenizer = bert_words(WORDS)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"vocab_size": len(tokenizer), "intermediate_size": 16, "num_labels": 3}
    model = BertForSequenceClassification(BertConfig(max_position_embeddings=8, **sizes))
    windows = WindowsForSequenceClassification.around(model, words, words + 2, 0)
    bounds = WindowBounds(windows, tokenizer, limit)
    learning = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        numbers = torch.randint(0, 5, (32, words))
        ids = [bounds.encode(" ".join(WORDS[n] for n in row)) for row in numbers.tolist()]
        logits = model(input_ids=torch.stack(ids)).logits
        learning.zero_grad()
        torch.nn.functional.cross_entropy(logits, numbers[:, 0] % 3).backward()
        learning.step()
    return WindowBounds(windows, tokenizer, limit)


def drawn(count, words, length=8):
    """Texts that mostly repeat a window, so that many of them hold a change."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for _ in range(count):
        window = [WORDS[n] for n in torch.randint(0, 5, (words,), generator=generator).tolist()]
        text = (window * length)[:length]
        place, word = (int(torch.randint(0, n, (), generator=generator)) for n in (length, 5))
        text[place : place + 1] = [WORDS[word]]
        found.append(text)
    return found


def answers(bounds, texts):
    with torch.no_grad():
        ids = [bounds.encode(" ".join(text))[None] for text in texts]
        return torch.cat([bounds.model(input_ids=each).logits.argmax(-1) for each in ids])


def batch_of(bounds, text):
    ids = bounds.encode(" ".join(text))[None]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.parametrize("words", [1, 2, 3])
def test_no_replaced_words_change_a_certified_answer(words):
    """Known and unknown words in every place or two, and every string of a special token."""
    bounds, some = bounds_of(words), 0
    for text in drawn(4, words, 6 * words):
        (held,) = hold_texts(bounds, [batch_of(bounds, text)], {"words": 2})
        k = held.held["words"]
        some += k > 0
        others = []
        for places in itertools.combinations(range(len(text)), k):
            for new in itertools.product((*WORDS, "unheard", "[PAD]"), repeat=k):
                other = list(text)
                for place, word in zip(places, new, strict=True):
                    other[place] = word
                others.append(other)
        assert (answers(bounds, others[:: 1 + len(others) // 150]) == held.predicted).all()
    assert some


def test_no_free_windows_change_a_certified_answer_under_ascent():
    """Stronger than words: the vectors of any k windows climb freely."""
    bounds, inner, climbed = bounds_of(2), bounds_of(2).model.model, 0
    table = inner.get_input_embeddings()
    for text in drawn(6, 2, length=10):
        batch = batch_of(bounds, text)
        (held,) = hold_texts(bounds, [batch], {"words": 5})
        windows = batch["input_ids"].view(-1, 4)
        k, label = held.held["words"], held.predicted
        if k < 1:
            continue
        votes = bounds.model.votes(batch["input_ids"])[0]
        weakest = (votes[:, label] - votes.sum(1) / 3).argsort(descending=True)
        for target in {0, 1, 2} - {label}:
            for count, turned in ((k, False), (len(windows), True)):
                vectors = table(windows).detach()
                moved = vectors[weakest[:count]].clone().requires_grad_()
                climb = torch.optim.Adam([moved], lr=0.1)
                for _ in range(80):
                    vectors = vectors.detach().index_copy(0, weakest[:count], moved)
                    mean = inner(inputs_embeds=vectors).logits.softmax(-1).mean(0)
                    climb.zero_grad()
                    (mean[label] - mean[target]).backward()
                    climb.step()
                assert turned or bool(mean[label] > mean[target])
                climbed += turned and bool(mean[label] < mean[target])
    assert climbed, "the ascent can turn what is not certified"


def one_away(text):
    found = {text[:i] + text[i + 1 :] for i in range(len(text))}
    for letter in "ox ":
        found |= {text[:i] + letter + text[i:] for i in range(len(text) + 1)}
        found |= {text[:i] + letter + text[i + 1 :] for i in range(len(text))}
    return found


@pytest.mark.parametrize("limit", [12, 6])
def test_single_words_hold_insertions_deletions_and_characters_too(limit):
    """With a limit of 6 every edit moves the cut as well."""
    bounds, some = bounds_of(1, limit), 0
    for text in drawn(6, 1, length=8):
        kinds = {"edits": 1, "characters": 1}
        kept = text[:limit]
        (held,) = hold_texts(bounds, [batch_of(bounds, kept)], kinds)
        some += sum(held.held.values())
        edited = [text[:i] + text[i + 1 :] for i in range(8)]
        edited += [[*text[:i], w, *text[i:]] for i in range(9) for w in WORDS]
        if held.held["edits"] > 0:
            assert (answers(bounds, edited) == held.predicted).all()
        if held.held["characters"] > 0:
            strings = sorted(one_away(" ".join(text)))[::5]
            assert (answers(bounds, [each.split() for each in strings]) == held.predicted).all()
    assert some
    (held,) = hold_texts(bounds_of(2), [batch_of(bounds_of(2), drawn(1, 2)[0])], {"edits": 1})
    assert held.held["edits"] == 0, "an inserted word shifts windows of two"


@pytest.mark.parametrize("words", [1, 2])
def test_an_attack_never_falls_below_the_certificate(words):
    bounds, texts = bounds_of(words), drawn(12, words, 5 * words)
    batches = [{**batch_of(bounds, text), "labels": answers(bounds, [text])} for text in texts]
    counts = {"words": [1, 2], "edits": [1], "characters": [1]}
    found = word_accuracy(bounds.model, bounds.tokenizer, batches, counts, limit=12, beam=2)
    assert found.clean == 1
    assert all(s <= a for s, a in zip(found.certified, found.attacked, strict=True))
    assert found.certified[0] > 0
    assert found.attacked[1] < 1
    assert ("--certified-windows 1" in found.table()) == (words > 1)


def test_the_loss_reads_the_worst_votes_of_k_windows():
    votes = torch.tensor([[[0.7, 0.2, 0.1], [0.5, 0.3, 0.2], [0.0, 0.0, 0.0]]])
    logits, batch = votes.sum(1).div(2).log(), {"labels": torch.tensor([0])}
    reached = word_logits(logits, batch, None, 1.5, votes).exp()
    expected = [0.6, 0.25 + (1.5 + 0.5 * 1.2) / 2, 0.15 + (1.6 + 0.5 * 1.3) / 2]
    torch.testing.assert_close(reached, torch.tensor([expected]))


def test_windows_are_a_function_of_their_words_alone():
    tokenizer = bert_words(WORDS)
    assert cut_windows(" oil  win x\tgoal oil", 2, 4) == ["oil win", "x goal"]
    (ids,) = encode_windows(tokenizer, [["oil win", "x", "oil win bank goal x"]], 5)
    assert ids[:5] == encode_windows(tokenizer, [["oil win"]], 5)[0]
    assert ids[10:] == encode_windows(tokenizer, [["oil win bank"]], 5)[0], "cut to 5 tokens"
    bounds = bounds_of(2)
    alone = answers(bounds, [["oil", "x"], ["win"]])
    batch = torch.stack([torch.cat([bounds.encode("oil x"), torch.zeros(4).long()]),
                         torch.cat([bounds.encode("win"), torch.zeros(4).long()])])  # fmt: skip
    mask = torch.ones_like(batch)
    mask[:, 4:] = 0
    assert bounds.model(batch, mask).logits.argmax(-1).tolist() == alone.tolist()
    with pytest.raises(ConfigError, match="not made of windows of 4"):
        bounds.model(batch[:, :3])
    with pytest.raises(ConfigError, match="token ids alone"):
        bounds.model(inputs_embeds=torch.zeros(1, 4, 16))


@pytest.fixture
def checkpoint(tmp_path):
    """A BERT of the user's, its tokenizer and texts."""
    config = BertConfig(vocab_size=9, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                        intermediate_size=16, max_position_embeddings=16)  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(tmp_path / "bert")
    bert_words(WORDS).save_pretrained(tmp_path / "bert")
    rows = "p\toil bank x oil x\nn\twin goal x goal win x\n" * 40
    (tmp_path / "train.tsv").write_text("label\ttext\n" + rows, encoding="utf-8")
    return tmp_path


@pytest.mark.slow
def test_a_checkpoint_of_the_user_gets_a_certificate_in_words(checkpoint, capsys):
    bert, run = str(checkpoint / "bert"), str(checkpoint / "run")
    data = ["--data", str(checkpoint / "train.tsv"), "--from", bert, "--tokenizer", f"hf:{bert}"]
    steps = "--steps 60 --eval-every 60 --checkpoint-every 60"
    small = [*steps.split(), "--batch-size", "8", "--quiet"]
    windows = ["--certified-windows", "2", "--learning-rate", "0.01", "--margin-loss", "words:1"]
    task = ["text_classification", *data, *small]
    assert main(["train", *task, *windows, "--out", run]) == 0
    model = load_saved_model(checkpoint / "run" / "final")
    assert (model.config.window_words, model.config.window_tokens) == (2, 4)
    capsys.readouterr()
    asked = ["--words", "1", "--edits", "1", "--examples", "6", "--text", "oil bank x oil"]
    assert main(["certify", run, *asked]) == 0
    shown = capsys.readouterr().out
    lines = [line.split() for line in shown.splitlines()]
    (row,) = [line[2:] for line in lines if line[:2] == ["words", "1"]]
    assert "0" < row[0] <= row[1]
    assert "no 0 replaced words" in shown or "oil bank" in shown
    assert main(["predict", run, "--text", "oil bank x oil bank x", "--certified"]) == 0
    label, _, count = capsys.readouterr().out.split("\t")
    assert (label, int(count) >= 1) == ("p", True)
    again = ["--from", str(checkpoint / "run" / "final"), "--tokenizer", f"hf:{bert}"]
    pairs = checkpoint / "out"
    for wrong, says in (
        ([*task[:3], *again, *windows[:2]], "as it was before its windows"),
        ([*task, "--from-scratch", "--variant", "t_fixup", *windows[:2]], "another variant"),
    ):
        assert main(["train", *wrong, "--out", str(pairs)]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.slow
def test_a_comparison_certifies_windows_of_our_own_models(tmp_path):
    words = "compare text_classification --data builtin --variants pre_ln --seeds 1 --steps 3"
    small = "--model.hidden-size 8 --model.num-hidden-layers 1 --model.num-attention-heads 2"
    asked = "--certified-windows 1 --certify-words 1 --max-length 6 --quiet"
    out = tmp_path / "runs"
    assert main([*words.split(), *small.split(), *asked.split(), "--out", str(out)]) == 0
    assert (out / "pre_ln" / "seed-0" / "certified_words.json").is_file()
