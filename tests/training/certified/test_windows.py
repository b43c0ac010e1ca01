"""Windows of words that vote (B15): every replacement tried, windows free to move, and a user's own
checkpoint from training to the table."""

import copy
import functools

import numpy as np
import pytest
import torch
from tests.support.tokenizer_folders import bert_words
from tests.training.certified.test_words import characters_away, replaced
from tokenizers import decoders, models, normalizers, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, BertModel

from wellposed.cli import main
from wellposed.errors import CheckpointError, ConfigError
from wellposed.models import SHARPNESS, WindowsForSequenceClassification, load_saved_model
from wellposed.tasks import build_task
from wellposed.tasks.text.tokenizers import WordEncoder
from wellposed.tasks.text.windows import WindowEncoder, encode_words
from wellposed.training.certified.windows import WindowBounds, least_sums
from wellposed.training.certified.word_accuracy import word_accuracy
from wellposed.training.certified.words import hold_texts
from wellposed.training.config import RunConfig, StartOptions
from wellposed.training.loop.build import build_start
from wellposed.training.loop.word_margin import word_logits

WORDS = ("oil", "win", "bank", "goal", "x")


@functools.cache
def bounds_of(words, limit=24):
    """A BERT that learnt which of three classes the first word of a window is of."""
    torch.manual_seed(0)
    tokenizer = bert_words(WORDS)
    sizes: dict = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"vocab_size": len(tokenizer), "intermediate_size": 16, "num_labels": 3}
    model = BertForSequenceClassification(BertConfig(max_position_embeddings=8, **sizes))
    frame = [[tokenizer.cls_token_id], [tokenizer.sep_token_id]]
    made = {"window_words": words, "word_tokens": 1, "frame": frame}
    windows = WindowsForSequenceClassification.around(model, 0, **made)
    bounds = WindowBounds(windows, tokenizer, limit)
    learning = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        numbers = torch.randint(0, 5, (32, words))
        ids = [bounds.encode(" ".join(WORDS[n] for n in row)) for row in numbers.tolist()]
        learning.zero_grad()
        logits = windows(input_ids=torch.stack(ids)).logits
        torch.nn.functional.cross_entropy(logits, numbers[:, 0] % 3).backward()
        learning.step()
    return WindowBounds(windows, tokenizer, limit)


def drawn(count, words, length=8):
    """Texts that mostly repeat a window, so that many of them hold a change."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for number in range(count):
        window = [WORDS[n] for n in torch.randint(0, 5, (words,), generator=generator).tolist()]
        text = ((window if number % 2 else window[:1]) * length)[:length]
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
    for text in drawn(6, words, 14):
        (held,) = hold_texts(bounds, [batch_of(bounds, text)], {"words": 2})
        k = held.held["words"]
        some += k > 0
        others = replaced(text, k, (*WORDS, "unheard", "[PAD]"))
        assert (answers(bounds, others[:: 1 + len(others) // 150]) == held.predicted).all()
    assert some


@pytest.mark.parametrize("words", [1, 2, 3])
@pytest.mark.parametrize("limit", [12, 7, 6])
@pytest.mark.parametrize("kind", ["edits", "characters"])
def test_the_least_sum_is_below_that_of_every_text_that_edits_can_make(words, limit, kind):
    """Margins drawn at random for every string of old words; a window with a new word has -1.

    Each edit is made, one after another, on a text longer than the limit, and the text cut.
    """
    generator = torch.Generator().manual_seed(limit)
    margins = {}

    def margin(window):
        drawn = 2 * float(torch.rand((), generator=generator)) - 1
        return -1.0 if -1 in window else margins.setdefault(window, drawn)

    def total(text):
        cut = text[:limit]
        return sum(margin(cut[at : at + words]) for at in range(0, len(cut), words))

    shapes = [(1, 1), (1, 0), (0, 1)] + [(1, 2), (2, 1)] * (kind == "characters")
    reached = [{tuple(range(7))}]
    for _ in range(2):
        reached.append({
            (*text[:place], *[-1] * added, *text[place + removed :])
            for text in reached[-1]
            for removed, added in shapes
            for place in range(len(text) + 1 - removed)
        })  # fmt: skip
    whole = tuple(range(7))[:limit]
    known = [[margin(whole[at : at + words])] for at in range(len(whole))]
    least = least_sums(np.array(known), words, 2, limit, spills=kind == "characters")[:, 0]
    found = [min(map(total, texts)) for texts in reached]
    assert least[0] == pytest.approx(found[0])
    for k in (1, 2):
        assert least[k] <= min(found[: k + 1]) + 1e-12
        if limit == 12 and kind == "edits":
            assert least[k] >= min(found[: k + 1]) - 1.0, "and not far below"


def test_no_free_windows_change_a_certified_answer_under_ascent():
    """Stronger than words: the vectors of any k windows climb freely."""
    bounds, inner, climbed = bounds_of(2), bounds_of(2).model.model, 0
    table = inner.get_input_embeddings()
    for text in drawn(6, 2, length=10):
        batch = batch_of(bounds, text)
        (held,) = hold_texts(bounds, [batch], {"words": 5})
        windows = batch["input_ids"].view(-1, 2)
        frame = windows.new_tensor([[2, 3]]).expand(len(windows), 2)
        windows = torch.cat([frame[:, :1], windows, frame[:, 1:]], 1)
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
                    mean = inner(inputs_embeds=vectors).logits.sigmoid().mean(0)
                    climb.zero_grad()
                    (mean[label] - mean[target]).backward()
                    climb.step()
                ahead = (mean[label] - mean[target]).item()
                assert turned or ahead > 0
                climbed += turned and ahead < 0
    assert climbed, "the ascent can turn what is not certified"


@pytest.mark.parametrize("limit", [24, 18])
@pytest.mark.parametrize("words", [1, 2, 3])
def test_no_inserted_deleted_or_mistyped_words_change_a_certified_answer(words, limit):
    """With a limit of 18 every edit moves the cut as well."""
    bounds, some = bounds_of(words, limit), 0
    for text in drawn(4, 1, length=20):
        kinds = {"edits": 1, "characters": 1}
        (held,) = hold_texts(bounds, [batch_of(bounds, text[:limit])], kinds)
        some += sum(max(k, 0) for k in held.held.values())
        edited = [text[:i] + text[i + 1 :] for i in range(len(text))]
        edited += [[*text[:i], w, *text[i:]] for i in range(len(text) + 1) for w in WORDS[:2]]
        if held.held["edits"] > 0:
            assert (answers(bounds, edited) == held.predicted).all()
        if held.held["characters"] > 0:
            strings = sorted(characters_away(" ".join(text), "ox "))[::11]
            assert (answers(bounds, [each.split() for each in strings]) == held.predicted).all()
    assert some


@pytest.mark.parametrize("words", [1, 2])
def test_an_attack_never_falls_below_the_certificate(words):
    bounds, texts = bounds_of(words, 16), drawn(6, words, 14)
    texts.append(["[PAD]"] * 14)  # words without a token
    batches = [{**batch_of(bounds, text), "labels": answers(bounds, [text])} for text in texts]
    counts = {"words": [1, 7], "edits": [1, 7], "characters": [1, 7]}
    found = word_accuracy(bounds.model, bounds.tokenizer, batches, counts, limit=16)
    assert found.clean == 1
    assert all(s <= a for s, a in zip(found.certified, found.attacked, strict=True))
    assert all(found.certified[k] > 0 for k in (0, 2, 4))
    assert all(found.attacked[k] < 1 for k in (1, 3, 5)), "every attack turns some texts"
    ids = bounds.encode("oil win")
    made = bounds.propose("characters", ids, 0)(ids, 1)
    assert {len(each) // bounds.tokens for each in made} == {1, 2, 3} - {1}
    full, pushed = (bounds.encode(first + "oil " * 15) for first in ("win ", "bank "))
    made = [each for kind in counts for each in bounds.propose(kind, full, 0)(pushed, 1)]
    assert {len(each) for each in made} == {16}, "a word that was pushed out comes back"
    numbers = WindowBounds(bounds.model, bert_words("12345"), 16)
    assert numbers.propose("words", ids, 0)(ids, 1), "of a vocabulary without letters"


READ_AS = {"olil o": "olil o", "OIL olill": "oil olil", "o-o oil": "o-o oil", "%o ##il ol": "%o ##il ol",
           "oeeee": "oee", "\u200bol": "ol"}  # fmt: skip


@pytest.mark.parametrize("text", READ_AS)
def test_mistyped_words_are_one_or_two_characters_from_a_text_that_reads_so(text):
    """Word pieces, lower case, words that are cut, unknown, or spelled with blanks, against every
    string that two edits can make."""
    tokenizer = bert_words(["o", "-", "##e", "##l", "##il"])
    inner = tokenizer.backend_tokenizer
    inner.model = models.WordPiece(tokenizer.get_vocab(), unk_token="[UNK]")
    inner.normalizer, inner.decoder = normalizers.BertNormalizer(), decoders.WordPiece()
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    bounds = WindowBounds(bounds_of(1).model, tokenizer, 8)
    bounds.tokens = bounds.model.config.word_tokens = 3
    reached, made = {READ_AS[text]}, [bounds.encode(text)]
    assert torch.equal(made[0], bounds.encode(READ_AS[text]))
    mistype = bounds.propose("characters", made[0], 0)
    for _ in range(2):
        reached = {other for each in reached for other in characters_away(each, "ex ")}
        made = [other for each in made for other in mistype(each, 1)]
        ids = encode_words(tokenizer, [each.split() for each in sorted(reached)], 3)
        assert {tuple(each.tolist()) for each in made} <= set(map(tuple, ids))
    assert made


def test_the_loss_reads_the_worst_votes_of_k_windows():
    votes = torch.tensor([[[0.7, 0.2, 0.1], [0.5, 0.3, 0.2], [0.0, 0.0, 0.0]]])
    logits, batch = votes.sum(1).div(2) * SHARPNESS, {"labels": torch.tensor([0])}
    reached = word_logits(logits, batch, None, 1.5, votes) / SHARPNESS
    expected = [0.6, 0.25 + (1.5 + 0.5 * 1.2) / 2, 0.15 + (1.6 + 0.5 * 1.3) / 2]
    torch.testing.assert_close(reached, torch.tensor([expected]))


def test_windows_are_a_function_of_their_words_alone():
    tokenizer = bert_words(WORDS)
    (ids,) = encode_words(tokenizer, [["oil", "x", "oil", "unheard"]], 2)
    (oil,), (x,) = (encode_words(tokenizer, [[word]], 2) for word in ("oil", "x"))
    assert ids[:6] == [*oil, *x, *oil]
    assert len(ids) == 8
    encoder = WindowEncoder(WordEncoder(WORDS), 2, ["oil win", "x"], 4)
    assert (encoder.tokens, encoder.frame, encoder.longest) == (1, [[], []], 2)
    bounds = bounds_of(2)
    alone = answers(bounds, [["oil", "x", "win"], ["win"]])
    batch = torch.stack([bounds.encode("oil x win"), torch.cat([bounds.encode("win")] * 3)])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    assert bounds.model(batch, mask).logits.argmax(-1).tolist() == alone.tolist()
    read = []
    inner = bounds.model.model
    hook = inner.register_forward_pre_hook(lambda *a: read.append(a[2]), with_kwargs=True)
    with torch.no_grad():
        votes = bounds.model.votes(batch, mask)
    hook.remove()
    assert [len(text) for text in bounds.read(batch, mask)[1]] == [2, 1]
    assert torch.equal(votes[0, 1], votes[1, 0]), "a last window with one word"
    whole = [tokenizer(text)["input_ids"] for text in ("win", "oil x")]
    assert [given["input_ids"].tolist()[0] for given in read] == whole, "as the tokenizer's own"
    assert all(given["attention_mask"].all() for given in read), "and nothing reads padding"
    wider = WindowsForSequenceClassification.around(inner, 0, word_tokens=2)
    with pytest.raises(ConfigError, match="not made of words of 2"):
        wider(batch)
    with pytest.raises(ConfigError, match="token ids alone"):
        bounds.model(inputs_embeds=torch.zeros(1, 4, 16))


def test_a_saved_model_of_pairs_is_refused_in_one_line(tmp_path):
    model = copy.deepcopy(bounds_of(1).model)
    model.config.window_words = "pairs"
    model.save_pretrained(tmp_path)
    said = r'cannot be loaded: window_words = "pairs": .*--certified-windows 1$'
    with pytest.raises(CheckpointError, match=said):
        load_saved_model(tmp_path)


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
    small = f"{steps} --batch-size 8 --quiet".split()
    windows = ["--certified-windows", "2", "--learning-rate", "0.01", "--margin-loss", "words:1"]
    task = ["text_classification", *data, *small]
    assert main(["train", *task, *windows, "--out", run]) == 0
    model = load_saved_model(checkpoint / "run" / "final")
    assert (model.config.window_words, model.config.word_tokens) == (2, 1)
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
    for text in (["--text", "oil " * 3000], []):
        assert main(["measure", run, *text]) == 0
        shown = capsys.readouterr()
        assert ("1 lines of more than 256 tokens were cut" in shown.err) == bool(text)
        assert ("token_embedding" in shown.out, "by name alone" in shown.out) == (True, False)
    again = ["--from", str(checkpoint / "run" / "final"), "--tokenizer", f"hf:{bert}"]
    for wrong, says in (
        ([*task[:3], *again, *windows[:2]], "as it was before its windows"),
        ([*task, "--from-scratch", "--variant", "t_fixup", *windows[:2]], "another variant"),
    ):
        assert main(["train", *wrong, "--out", str(checkpoint / "out")]) == 2
        assert says in capsys.readouterr().err


def test_a_frozen_body_is_read_from_a_file_and_what_was_drawn_is_told(checkpoint):
    bert = checkpoint / "bert"
    options = {"data": str(checkpoint / "train.tsv"), "tokenizer": f"hf:{bert}"}
    task = build_task("text_classification", {**options, "certified_windows": 1, "max_length": 16})

    def started(source, **how):
        start = StartOptions(str(source), frozen=True, **how)
        return build_start(RunConfig("text_classification", start=start), task)

    with pytest.raises(ConfigError, match=r"drawn at random: bert\.emb.*a folder with weights"):
        started(bert / "config.json")
    found = started(bert)
    learnt = [name for name, weight in found.model.named_parameters() if weight.requires_grad]
    assert list(found.new_weights) == learnt
    BertModel(BertConfig.from_pretrained(bert), add_pooling_layer=False).save_pretrained(bert)
    drawn = [f"model.{name}" for name in ("bert.pooler.dense", "classifier")]
    both = [f"{name}.{kind}" for name in drawn for kind in ("bias", "weight")]
    assert list(started(bert, new_head=True).new_weights) == [*both, *learnt]


@pytest.mark.slow
def test_a_frozen_checkpoint_is_read_once_a_window_and_stays_as_it_was(checkpoint, capsys):
    bert, run = str(checkpoint / "bert"), checkpoint / "run"
    task = ["text_classification", "--data", str(checkpoint / "train.tsv"), "--from", bert]
    steps = "--steps 40 --eval-every 40 --checkpoint-every 40 --batch-size 8 --learning-rate 0.01"
    frozen = f"{steps} --frozen --margin-loss words:1 --quiet --max-length 16".split()
    assert main(["train", *task, *frozen, "--out", str(run)]) == 2
    assert "give --certified-windows 1" in capsys.readouterr().err
    windows = ["--certified-windows", "1"]
    assert main(["train", *task, *frozen, *windows, "--from-scratch", "--out", str(run)]) == 2
    assert "leave one of the two out" in capsys.readouterr().err
    assert main(["train", *task, *frozen, *windows, "--out", str(run)]) == 0
    model = load_saved_model(run / "final")
    before = BertForSequenceClassification.from_pretrained(bert)
    for name, weight in before.base_model.state_dict().items():
        assert torch.equal(weight, model.model.base_model.state_dict()[name]), name
    ids = torch.tensor([[5, 7, 5, 8]])
    read, encoder = [], model.train().model.base_model
    encoder.register_forward_hook(lambda *a: read.append(len(a[2].last_hidden_state)))
    alone = encoder(torch.tensor([[2, 7, 3]])).last_hidden_state.mean(1)
    own = encoder.get_input_embeddings()(torch.tensor([7]))
    norm = torch.nn.functional.layer_norm
    made = torch.cat([norm(part, (16,)) for part in (alone, own)], 1)
    expected = model.eval().head(made).sigmoid()[0]
    for each in (model, model, copy.deepcopy(model).double()):
        torch.testing.assert_close(each.votes(ids)[0, 1].float(), expected)
    assert read == [1, 3, 3], "three words once, and once more in double precision"
    capsys.readouterr()
    assert main(["certify", str(run), "--words", "1", "--characters", "1", "--examples", "6"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    (row,) = [line[2:] for line in rows if line[:2] == ["words", "1"]]
    assert "0" < row[0] <= row[1]


@pytest.mark.slow
def test_a_comparison_certifies_windows_of_every_length_in_one_table(tmp_path, capsys):
    words = "compare text_classification --data builtin --seeds 2 --steps 3 --max-length 6"
    small = "--model.hidden-size 8 --model.num-hidden-layers 1 --model.num-attention-heads 2"
    asked = "--variants pre_ln,windows:2,windows:3 --certify-words 1 --certify 8 --quiet"
    out = tmp_path / "runs"
    assert main([*words.split(), *small.split(), *asked.split(), "--out", str(out)]) == 0
    table = capsys.readouterr().out
    for name in ("pre_ln", "windows:2", "windows:3"):
        assert any(line.split()[:1] == [name] for line in table.splitlines()), table
        assert (out / name.replace(":", "-") / "seed-1" / "certified_words.json").is_file()
    assert main(["compare", *words.split()[1:], "--variants", "windows:two"]) == 2
    assert "certified_windows" in capsys.readouterr().err
