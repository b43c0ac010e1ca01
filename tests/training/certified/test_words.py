"""Changed words and characters (B14) by independent routes: every change tried, on vocabularies
small enough."""

import itertools
import json
import math
import re
from pathlib import Path

import pytest
import torch
from tests.certification.test_sum import classifier
from tests.support.tokenizer_folders import bert_words, word_level
from tokenizers.pre_tokenizers import WhitespaceSplit

from wellposed.attack import WordAttack, WordSwaps
from wellposed.cli import main
from wellposed.cli.prediction.labels import label_lines
from wellposed.errors import ConfigError, DataError, NotLipschitzError, ShapeError
from wellposed.nn import ConvexResidual
from wellposed.report import build_report
from wellposed.tasks.text.tokenizers import CharacterEncoder, WordEncoder
from wellposed.training import load_run_model
from wellposed.training.certified.characters import CharacterEdits
from wellposed.training.certified.record import WORDS_NAME, read_words
from wellposed.training.certified.windows import read_texts
from wellposed.training.certified.word_accuracy import word_accuracy
from wellposed.training.certified.words import bound_words, hold_texts
from wellposed.training.folder.result import read_result
from wellposed.training.loop.word_margin import word_logits

WORDS = ("a", "ab", "b", "abb", "ba", "bb")
KINDS = [
    {"blocks": 0},
    {"blocks": 0, "ball_embeddings": True, "unit_embeddings": False},
    {"blocks": 1},
    {"blocks": 2, "residual": "budget", "budget": 1.1},
]


def model_of(blocks=1, **options):
    """With weights of norm 1, and shares of branches that leave some of each token."""
    cool = {"ball_temperature": 0.05} if options.get("attention", "ball") == "ball" else {}
    model = classifier(blocks, **{"vocab_size": 8, "position": "none", **cool, **options})
    for part in model.model.modules():
        if isinstance(part, torch.nn.Linear):
            part.weight.data /= torch.linalg.matrix_norm(part.weight.data, 2)
        if isinstance(part, ConvexResidual):
            part.logit.data -= 1.5
    return model


def logits(bounds, texts):
    """Scores of texts one by one, without padding."""
    with torch.no_grad():
        return torch.cat([bounds.model(input_ids=torch.tensor([list(t)])).logits for t in texts])


def batch_of(texts, **more):
    longest = max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
    return {"input_ids": ids, "attention_mask": mask, **more}


def clear(bounds, count, tokens):
    """Texts mostly of the words that speak for one class, some with one word against it."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for number in range(count):
        label = number % 3
        best = (bounds.vectors @ bounds.directions(label).mT).sum(1).argsort()
        places = torch.randint(0, 2, (tokens,), generator=generator)
        text = best[places].tolist()
        text[0] = int(best[-1]) if number % 2 else text[0]
        found.append(text)
    return found


def drawn(count, tokens=4, first=2):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(first, 8, (count, tokens), generator=generator).tolist()


def replaced(text, k, vocabulary=()):
    """Every text with any k words replaced by any of the vocabulary."""
    found = []
    for places in itertools.combinations(range(len(text)), k):
        for words in itertools.product(vocabulary or range(8), repeat=k):
            other = list(text)
            for place, word in zip(places, words, strict=True):
                other[place] = word
            found.append(other)
    return found


def edited(text):
    """Every text one inserted, deleted or replaced word away."""
    found = {text[:i] + text[i + 1 :] for i in range(len(text)) if len(text) > 1}
    for word in range(8):
        found |= {(*text[:i], word, *text[i:]) for i in range(len(text) + 1)}
        found |= {(*text[:i], word, *text[i + 1 :]) for i in range(len(text))}
    return found


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_no_k_words_change_a_certified_answer_and_without_blocks_k_plus_one_do(options):
    bounds = bound_words(model_of(**options), seq_len=6)
    assert bounds.exact == (options["blocks"] == 0)
    texts = clear(bounds, 12, 6)
    held = hold_texts(bounds, [batch_of(texts)], {"words": 4})
    some = 0
    for text, found in zip(texts, held, strict=True):
        k = found.held["words"]
        assert 0 <= k <= 4
        answers = logits(bounds, replaced(text, min(k, 2))).argmax(-1)
        assert (answers == found.predicted).all()
        some += k > 0
        if bounds.exact and k < 2:
            answers = logits(bounds, replaced(text, k + 1)).argmax(-1)
            assert (answers != found.predicted).any()
            swaps = WordSwaps(bounds.model, bounds.vectors, torch.tensor(text), found.predicted)
            attack = WordAttack(bounds.model, swaps)
            needed, turned = attack.fewest_edits(torch.tensor(text), found.predicted, 4)
            assert needed == k + 1
            assert int((turned != torch.tensor(text)).sum()) == needed
    assert some


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_no_inserted_deleted_or_replaced_words_change_a_certified_answer(options):
    bounds = bound_words(model_of(**options), seq_len=8)
    texts = clear(bounds, 8, 7)
    held = hold_texts(bounds, [batch_of(texts)], {"edits": 2})
    for text, found in zip(texts, held, strict=True):
        reached = {tuple(text)}
        for _ in range(min(found.held["edits"], 2)):
            reached |= {other for each in reached for other in edited(each)}
        some = sorted(reached)[:: 1 + len(reached) // 1000]
        by_length = [[t for t in some if len(t) == n] for n in {len(t) for t in some}]
        for same in by_length:
            assert (logits(bounds, same).argmax(-1) == found.predicted).all()
    assert any(found.held["edits"] for found in held)


def of_words(bounds, limit=16):
    tokenizer = WordEncoder(WORDS).tokenizer(max_length=limit)
    return CharacterEdits.of(bounds.model, tokenizer, limit), tokenizer


def characters_away(text, letters="abx "):
    """Every text one character away, over an alphabet with a letter that no word has."""
    found = {text[:i] + text[i + 1 :] for i in range(len(text))}
    for letter in letters:
        found |= {text[:i] + letter + text[i:] for i in range(len(text) + 1)}
        found |= {text[:i] + letter + text[i + 1 :] for i in range(len(text))}
    return found


@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("limit", [16, 5])
def test_no_changed_characters_change_a_certified_answer(options, limit):
    """Strings are edited and tokenized again, cut as in training; unknown words and double blanks
    are there."""
    bounds = bound_words(model_of(**options), seq_len=16)
    characters, tokenizer = of_words(bounds, limit)
    certified = 0
    for text in ("abb ba bb abb ab", "ab  ba xa a abb b", "bb bb ba bb", "a a a ab b abb"):
        ids = tokenizer(text)["input_ids"][:limit]
        (found,) = hold_texts(bounds, [batch_of([ids])], {"characters": 2}, characters)
        reached = {text}
        for _ in range(found.held["characters"]):
            certified += 1
            reached |= {other for each in reached for other in characters_away(each)}
        cut = {tuple(tokenizer(t)["input_ids"][:limit]) for t in reached}
        for n in {len(t) for t in cut}:
            same = [t for t in cut if len(t) == n]
            assert (logits(bounds, same).argmax(-1) == found.predicted).all()
    assert certified or limit == 5 or options["blocks"]


@pytest.mark.parametrize(("limit", "held"), [(5, 1), (16, 2)])
def test_a_word_that_edits_push_out_of_a_text_is_counted(limit, held):
    """Two blanks in two of four words: the last word is then behind the cut at 5."""
    model = model_of(0, unit_embeddings=False)
    names = ("model.embeddings.token.weight", "classifier.weight", "classifier.bias")
    table, head, bias = (model.get_parameter(name).data for name in names)
    table[:] = head[:] = bias[:] = 0
    # Class 1 wins where the sum of the words, and of two special tokens, is above 0.
    table[:6, 0] = torch.tensor([0, -10, 1, 1, -1.2, -10])
    head[1, 0], bias[2] = 1, -99
    tokenizer = WordEncoder(["a", "c", "ac", "long"]).tokenizer(max_length=limit)
    characters = CharacterEdits.of(model, tokenizer, limit)
    ids, cut = (tokenizer(t)["input_ids"][:limit] for t in ("ac ac ac long", "a c a c ac long"))
    told = [int(logits(characters.bounds, [each]).argmax()) for each in (ids, cut)]
    assert told == [0, limit == 5]
    (found,) = hold_texts(characters.bounds, [batch_of([ids])], {"characters": 3}, characters)
    assert found.held["characters"] == held


def test_what_one_character_makes_is_what_the_tokenizer_reads():
    """Looked-up outcomes of known words, one of which may be a special token, against every string
    one character away."""
    model, special = model_of(0), word_level(WORDS[:5], "$A", pad_token="bb", unk_token="[UNK]")
    assert len(special("abba")["input_ids"]) == 3, "one character may make three words"
    with pytest.raises(ConfigError, match=r"finds bb, \[UNK\] inside words"):
        CharacterEdits.of(model, special, 16)
    special.split_special_tokens = True
    plain = WordEncoder(WORDS).tokenizer(max_length=16)
    for tokenizer, text in itertools.product((plain, special), ("abb ba", "a b bb", "ab")):
        characters = CharacterEdits.of(model, tokenizer, 16)
        ids = tokenizer(text)["input_ids"]
        mine = {tuple(t.tolist()) for t in characters.proposals(torch.tensor(ids), 0, label=1)}
        short = {tuple(tokenizer(t)["input_ids"]) for t in characters_away(text)} - {(), tuple(ids)}
        assert short <= mine


def test_words_of_a_text_are_found_by_an_attack_and_never_above_it():
    bounds = bound_words(model_of(1), seq_len=16)
    _, tokenizer = of_words(bounds)
    texts = clear(bounds, 20, 9)
    labels = logits(bounds, texts).argmax(-1)
    labels[::5] = (labels[::5] + 1) % 3
    counts = {"words": [1, 2], "edits": [1], "characters": [1, 2]}
    batches = [batch_of(texts, labels=labels)]
    found = word_accuracy(bounds.model, tokenizer, batches, counts, limit=16, beam=2)
    assert found.clean == pytest.approx(0.8)
    pairs = list(zip(found.certified, found.attacked, strict=True))
    assert all(sure <= seen <= found.clean for sure, seen in pairs)
    assert pairs[0][0] > 0
    assert [line.split()[:2] for line in found.table().splitlines()[2:]] == [
        ["none", "0"], ["words", "1"], ["words", "2"], ["edits", "1"], ["characters", "1"], ["characters", "2"],
    ]  # fmt: skip


def test_an_attack_by_edits_proposes_texts_one_word_away_of_every_kind():
    bounds = bound_words(model_of(0), seq_len=5)
    text = (2, 3, 4, 5)
    for within, lengths in ((5, {3, 4, 5}), (4, {3, 4})):
        swaps = WordSwaps(bounds.model, bounds.vectors, torch.tensor(text), 0, edits_within=within)
        found = {tuple(each.tolist()) for each in swaps(torch.tensor(text), 1)}
        assert {len(each) for each in found} == lengths
        assert found <= {each[:within] for each in edited(text)} | {text}
    assert {len(each) for each in swaps(torch.tensor((6, 2, 3, 4)), 1)} == {4}, "5 would come back"


def test_padding_and_wrong_answers_and_all_words():
    bounds = bound_words(model_of(0), seq_len=6)
    texts = [*drawn(3), [2], []]
    alone = [hold_texts(bounds, [batch_of([t])], {"words": 9})[0].held for t in texts[:4]]
    held = hold_texts(bounds, [batch_of(texts)], {"words": 9})
    assert [h.held for h in held[:4]] == alone
    wrong = torch.tensor([(h.predicted + 1) % 3 for h in held])
    again = hold_texts(bounds, [batch_of(texts, labels=wrong)], {"words": 9, "edits": 1})
    assert all(set(h.held.values()) == {-1} for h in again)
    with torch.no_grad():
        bounds.model.classifier.bias[1] = 100.0
    (far,) = hold_texts(bounds, [batch_of(texts[:1])], {"words": 9, "edits": 9})
    assert far.held == {"words": 9, "edits": 3}, "all words may be replaced, not all be deleted"


@pytest.mark.parametrize("blocks", [0, 1])
def test_positions_and_causal_models_hold_replaced_words_alone(blocks):
    for options in ({"position": "learned"}, {"is_causal": True}):
        bounds = bound_words(model_of(blocks, **options), seq_len=6)
        texts = drawn(4)
        held = hold_texts(bounds, [batch_of(texts)], {"words": 2, "edits": 1})
        for text, found in zip(texts, held, strict=True):
            assert found.held["edits"] == 0
            answers = logits(bounds, replaced(text, found.held["words"])).argmax(-1)
            assert (answers == found.predicted).all()


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"norm": "post"}, NotLipschitzError, "LayerNorm|PostNorm"),
        ({"attention": "dot_product"}, NotLipschitzError, "no bound of DotProductAttention"),
        ({"pooling": "max"}, ConfigError, "pooling 'max'"),
    ],
)
def test_other_models_are_refused_with_the_reason(options, error, says):
    with pytest.raises(error, match=says):
        bound_words(model_of(1, **options), seq_len=6)


def test_other_tokenizers_and_longer_texts_are_refused():
    model = model_of(0)
    bounds = bound_words(model, seq_len=3)
    with pytest.raises(ShapeError, match="4 tokens"):
        hold_texts(bounds, [batch_of(drawn(1))], {"words": 1})
    with pytest.raises(ConfigError, match="between white space"):
        CharacterEdits.of(model, CharacterEncoder("abc").tokenizer(max_length=9), 9)
    dropping = WordEncoder(WORDS, drop="(").tokenizer(max_length=9)
    with pytest.raises(ConfigError, match="between white space"):
        CharacterEdits.of(model, dropping, 9)
    framed = bert_words(["oil", "fell"])
    framed.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    with pytest.raises(ConfigError, match="2 special tokens around"):
        CharacterEdits.of(model, framed, 9)
    with pytest.raises(ConfigError, match="9 tokens and the model's embedding 8 rows"):
        read_texts(model, WordEncoder((*WORDS, "new")).tokenizer(max_length=9), 9)


def test_of_classes_that_are_level_the_first_is_told_and_holds_against_nothing():
    model = model_of(0)
    torch.nn.utils.vector_to_parameters(torch.zeros(27), model.classifier.parameters())
    tokenizer = WordEncoder(WORDS).tokenizer(max_length=9)
    assert list(label_lines(model, tokenizer, ["a b"], 1, certified=True)) == ["LABEL_0\t0.3333\t0"]


@pytest.mark.parametrize("words", [0.0, 1.0, 1.5, 2.0, 9.0])
@pytest.mark.parametrize("blocks", [0, 2])
def test_the_loss_reads_what_k_words_can_reach(blocks, words):
    """Without blocks the logits are those of the best replacements; with them they lie above, and
    everything has a gradient."""
    model = model_of(blocks, ball_embeddings=True, unit_embeddings=False).double()
    texts = [*drawn(3), [5, 2]]
    batch = batch_of(texts, labels=torch.tensor([0, 1, 2, 0]))
    clean = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    reached = word_logits(clean, batch, model, words)
    labels = batch["labels"][:, None]
    torch.testing.assert_close(reached.gather(1, labels), clean.gather(1, labels))
    bounds = bound_words(model, seq_len=4)
    for row, (text, label) in enumerate(zip(texts, batch["labels"].tolist(), strict=True)):
        gains = bounds.gains(label, torch.tensor(text)).sort(0, descending=True).values
        whole, part = int(min(words, len(text))), words - math.floor(words)
        moved = gains[:whole].sum(0) + (part * gains[whole] if whole < len(text) else 0.0)
        moved[label] = 0.0
        least = (clean[row] + moved / len(text)).detach()
        if blocks == 0:
            torch.testing.assert_close(reached[row].detach(), least, atol=1e-7, rtol=1e-7)
        else:
            assert (reached[row] >= least - 1e-7).all(), "weights have norm 1"
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


def test_the_command_counts_words_of_a_run_and_names_what_it_cannot(tmp_path, capsys):
    rows = [f"{p}\t{word} {word} film {word} x\n" for p, word in (("p", "good"), ("n", "bad"))]
    (tmp_path / "train.tsv").write_text("label\ttext\n" + "".join(rows * 40), encoding="utf-8")
    run = str(tmp_path / "run")
    typed = "--steps 30 --eval-every 30 --checkpoint-every 30 --batch-size 8 --quiet --max-length 9"
    sizes = "--model.hidden-size 8 --model.num-hidden-layers 0 --model.num-attention-heads 1"
    train = ["train", "text_classification", "--data", str(tmp_path / "train.tsv")]
    words = [*typed.split(), *sizes.split(), "--variant", "lipschitz", "--margin-loss", "words:1"]
    assert main([*train, *words, "--out", run]) == 0
    model, _ = load_run_model(Path(run))
    assert model.config.ball_embeddings
    assert model.config.position == "none"
    lines = (tmp_path / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    rows_of_valid = [row for row in map(json.loads, lines) if row["split"] == "valid"]
    assert all(row["accuracy_held"] <= row["accuracy"] for row in rows_of_valid)
    (numbers,) = read_result(Path(run)).result["results"].values()
    capsys.readouterr()
    kinds = ["--words", "1,2", "--edits", "1", "--characters", "1", "--examples", "999"]
    assert main(["certify", run, *kinds, "--text", "good bad good film"]) == 0
    shown = capsys.readouterr().out
    lines = re.findall(r"^(words|edits|characters) +(\d) +(\S+) +(\S+)$", shown, re.MULTILINE)
    table = {(kind, k): shares for kind, k, *shares in lines}
    assert table["words", "1"] == table["words", "1"][:1] * 2, "exact: certified is attacked"
    assert float(table["words", "1"][0]) == pytest.approx(numbers["accuracy_held,test"], abs=1e-4)
    assert len(table) == 4
    assert all(sure <= seen for sure, seen in table.values())
    assert "4 words" in shown
    assert "the words that carry it" in shown
    assert main(["certify", run, "--text", "good \u7535\u5f71 bad"]) == 0
    carried = capsys.readouterr().out.split("the words that carry it")[1]
    assert "\u7535\u5f71" in carried, "an unknown word is shown as it was typed"
    assert main(["predict", run, "--text", "good good film good x", "--certified"]) == 0
    label, _, count = capsys.readouterr().out.split("\t")
    assert (label, int(count) >= 1) == ("p", True)
    for wrong, says in (
        (["--words", "0"], "whole numbers"),
        (["--words", "2,1"], "increasing"),
        (["--words", "1", "--examples", "0"], "--examples >= 1"),
        (["--text", " "], "no word"),
    ):
        assert main(["certify", run, *wrong]) == 2
        assert says in capsys.readouterr().err


def test_a_model_without_a_certificate_is_attacked_and_told_why(capsys, tmp_path):
    out = str(tmp_path / "plain")
    words = "train text_classification --data builtin --variant pre_ln --steps 2 --quiet"
    small = "--model.hidden-size 16 --model.num-hidden-layers 1 --model.num-attention-heads 2"
    assert main([*words.split(), *small.split(), "--out", out]) == 0
    asked = ["--words", "1", "--examples", "4", "--text", "send a message to the mail server"]
    capsys.readouterr()
    assert main(["certify", out, *asked]) == 0
    said = capsys.readouterr().out
    assert "no certificate: no bound in norm sum of DotProductAttention" in said
    assert re.search(r"words +1 +none +[01]\.\d{4}\n", said)
    assert re.search(r"the attack (needs \d+: \w+ -> \w+|finds none)", said)


def test_a_comparison_counts_words_and_the_report_draws_them(tmp_path):
    out = tmp_path / "runs"
    words = "compare text_classification --data builtin --variants lipschitz,rezero --seeds 1"
    small = "--model.hidden-size 8 --model.num-hidden-layers 1 --model.num-attention-heads 2"
    asked = "--steps 4 --quiet --certify 4 --certify-words 1,3"
    assert main([*f"{words} {small} {asked}".split(), "--out", str(out)]) == 0
    for variant in ("lipschitz", "rezero"):
        folder = out / variant / "seed-0"
        date = str(read_result(folder).result["date"])
        found = read_words(folder, run_date=date)
        assert (found.counts, found.split, found.examples) == ([0, 1, 3], "test", 4)
        assert all(sure <= seen for sure, seen in zip(found.certified, found.attacked, strict=True))
        metrics = zip(("words@1,test", "words@3,test"), found.certified[1:], strict=True)
        assert found.metrics() == dict(metrics)
        assert len(found.shown) == 4
        if variant == "rezero":
            assert found.certified[1:] == [0.0, 0.0]
            assert not any("certified" in each for each in found.shown)
        with pytest.raises(DataError, match="measure it again"):
            read_words(folder, run_date="another")
    page = build_report([out], tmp_path / "report.html").read_text("utf-8")
    assert "replaced words" in page
    assert "certified against any 3 words" in page
    (out / "lipschitz" / "seed-0" / WORDS_NAME).write_text('{"format": 1}')
    with pytest.raises(DataError, match=WORDS_NAME):
        read_words(out / "lipschitz" / "seed-0", run_date=date)
