"""Translation: batches, losses, what is counted or refused, and scores of generated texts."""

import math
import random
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from wellposed.errors import ConfigError, DataError
from wellposed_lab.tasks.data.splits import SPLITS
from wellposed_lab.tasks.kinds.seq2seq import Decoding, generate_texts
from wellposed_lab.tasks.task import build_task
from wellposed_lab.tasks.text.seq2seq_tokenizers import BOS_ID, EOS_ID, PAD_ID

WORDS = {"eins": "one", "zwei": "two", "drei": "three", "vier": "four"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toy")
    draw = random.Random(0)
    for split, count in (("train", 60), ("val", 9), ("test", 8)):
        rows = [draw.choices(list(WORDS), k=draw.randint(1, 6)) for _ in range(count)]
        (folder / f"{split}.de").write_text("".join(" ".join(row) + "\n" for row in rows))
        english = [[WORDS[word] for word in row] for row in rows]
        (folder / f"{split}.en").write_text("".join(" ".join(row) + "\n" for row in english))
    return folder


def build(corpus, **options):
    defaults = {"src": "de", "tgt": "en", "vocab_size": 40, "max_tokens": 40}
    return build_task("translation", {"data": str(corpus), **defaults, **options})


def test_the_decoder_reads_what_it_has_to_predict_moved_by_one(corpus):
    task = build(corpus)
    batch = task.collate([task.dataset("train")[i] for i in range(4)])
    names = ("input_ids", "attention_mask", "decoder_input_ids", "labels")
    dtypes = {name: value.dtype for name, value in batch.items()}
    assert dtypes == dict.fromkeys(names, torch.int64)
    read = batch["decoder_input_ids"].tolist()
    predicted = batch["labels"].tolist()
    for row, labels in zip(read, predicted, strict=True):
        target = [token for token in labels if token != -100]
        assert target[-1] == EOS_ID
        assert row[: len(target)] == [BOS_ID, *target[:-1]]
        assert set(row[len(target) :]) <= {PAD_ID}
    rows = [example["labels"] for example in task.dataset("test")]
    texts = [task.tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    assert texts == (corpus / "test.en").read_text().splitlines()
    assert task.model_kwargs()["decoder_start_token_id"] == BOS_ID


def test_loss_and_perplexity_do_not_depend_on_batches(corpus):
    """The mean over all targets of -log p, token by token in float64."""
    task = build(corpus)
    size = task.model_kwargs()["vocab_size"]
    table = torch.randn(size, size, dtype=torch.float64)
    slow = [
        float(-table[before].log_softmax(-1)[token])
        for example in task.dataset("valid")
        for before, token in zip([BOS_ID, *example["labels"]], example["labels"], strict=False)
    ]
    for size in (2, 9):
        sums = []
        for members in task.batches("valid", size, seed=0, epoch=0):
            batch = task.collate([task.dataset("valid")[i] for i in members])
            logits = table[batch["decoder_input_ids"]]
            sums.append(task.metric_sums(logits, batch)["perplexity"])
            assert float(task.loss_sum(logits, batch)[0]) == pytest.approx(sums[-1][0])
        total, count = (math.fsum(column) for column in zip(*sums, strict=True))
        assert count == len(slow)
        expected = math.exp(math.fsum(slow) / len(slow))
        perplexity = task.summarize({"perplexity": (total, count)})["perplexity"]
        assert perplexity == pytest.approx(expected, rel=1e-5)
    tokens = Counter(token for example in task.dataset("valid") for token in example["labels"])
    entropy = math.log(len(slow)) - sum(n * math.log(n) for n in tokens.values()) / len(slow)
    assert task.reference() == pytest.approx({"loss": entropy, "perplexity": math.exp(entropy)})


@pytest.mark.parametrize("limit", [40, 64])
def test_token_batches_hold_their_limit_and_every_pair_once(corpus, limit):
    task = build(corpus, tokens_per_batch=limit)
    lengths = [max(len(row["input_ids"]), len(row["labels"])) for row in task.dataset("train")]
    batches = task.batches("train", 6, seed=3, epoch=1)
    assert sorted(index for batch in batches for index in batch) == list(range(60))
    for batch in batches:
        assert len(batch) <= 6
        assert len(batch) * max(lengths[i] for i in batch) <= limit
    assert batches == build(corpus, tokens_per_batch=limit).batches("train", 6, seed=3, epoch=1)
    assert batches != task.batches("train", 6, seed=3, epoch=2)
    assert task.batches("test", 6, seed=0, epoch=0) == task.batches("test", 6, seed=9, epoch=4)


def changed(corpus, folder, split, change):
    """Copy the corpus; ``change`` edits the lines of a split in each language."""
    for path in corpus.iterdir():
        lines = path.read_text().splitlines()
        if path.stem == split:
            change(lines, path.suffix)
        (folder / path.name).write_text("\n".join(lines) + "\n")


def test_long_pairs_are_refused_or_dropped_and_counted(corpus, tmp_path):
    def lengthen(lines, language):
        lines[4] = " ".join(lines[:9])

    changed(corpus, tmp_path, "train", lengthen)
    message = r"train: texts have more .*max_tokens = 25; raise (.|\n)*train\.de:5: \d+ t"
    with pytest.raises(DataError, match=message):
        build(tmp_path, max_tokens=25)
    task = build(tmp_path, max_tokens=25, overflow="drop")
    dropped = task.description()["train_pairs_dropped_as_too_long"]
    assert (dropped["pairs"], len(task.dataset("train"))) == (1, 59)
    assert dropped["longest"] > 25
    changed(corpus, tmp_path, "test", lengthen)
    with pytest.raises(DataError, match=r"test: texts have more .*or give overflow='drop'"):
        build(tmp_path, max_tokens=25)
    task = build(tmp_path, max_tokens=25, overflow="drop")
    assert task.description()["pairs_cut_as_too_long"] == {"valid": 0, "test": 1}
    most = max(task.lengths("train"))
    with pytest.raises(ConfigError, match=f"tokens_per_batch = {most}, expected at least 25"):
        build(tmp_path, max_tokens=25, overflow="drop", tokens_per_batch=most)
    row = task.dataset("test")[4]
    assert max(map(len, row.values())) == 25
    assert {row["labels"][-1]} == {task.dataset("test")[0]["labels"][-1]}, "the end token stays"
    uncut = (tmp_path / "test.en").read_text().splitlines()[4]
    assert vars(task)["_pairs"]["test"].target[4] == uncut, "what BLEU compares with"


def test_what_the_data_lacks_or_repeats_is_described(corpus, tmp_path):
    def repeat(lines, language):
        first = (corpus / f"train{language}").read_text().splitlines()[0]
        lines[:2] = ["☃ eins" if language == ".de" else "Ž one", first]

    changed(corpus, tmp_path, "test", repeat)
    described = build(tmp_path, limit_pairs=50).description()
    assert described["unknown_characters"]["test"] == {
        "source": {"count": 1, "distinct": 1, "most_frequent": {"☃": 1}},
        "target": {"count": 1, "distinct": 1, "most_frequent": {"Ž": 1}},
    }
    assert described["pairs_also_in_train"]["test"] >= 1
    assert described["train_pairs_left_out_by_limit_pairs"] == 10
    assert described["pairs"] == {"train": 50, "valid": 9, "test": 8}


class Oracle(torch.nn.Module):
    """An encoder-decoder that knows the right answers: `generate` looks the source up."""

    def __init__(self, task, spoil=0):
        super().__init__()
        self.device = torch.device("cpu")
        self.config = SimpleNamespace(max_position_embeddings=40, decoder_start_token_id=BOS_ID)
        self.widths = []
        rows = [row for split in SPLITS for row in task.dataset(split)]
        self.answers = {tuple(row["input_ids"]): row["labels"][spoil:] for row in rows}

    def generate(self, input_ids, attention_mask, **keywords):
        self.keywords = keywords
        self.widths.append(input_ids.shape[1])
        rows = [
            self.answers[tuple(row[mask == 1].tolist())]
            for row, mask in zip(input_ids, attention_mask, strict=True)
        ]
        padded = [torch.tensor([BOS_ID, *row]) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(padded, True, PAD_ID)


def test_generated_texts_are_scored_in_the_order_of_the_references(corpus):
    task = build(corpus, bleu_tokens="char", generate_beams=2, generate_length_penalty=0.6)
    right = Oracle(task).train()
    scores = task.generate_metrics(right, "test", batch_size=3)
    assert scores == pytest.approx({"bleu": 100.0, "chrf": 100.0})
    assert right.training
    assert right.widths == sorted(right.widths, reverse=True)
    assert (right.keywords["num_beams"], right.keywords["length_penalty"]) == (2, 0.6)
    assert right.keywords["max_new_tokens"] <= 40
    wrong = task.generate_metrics(Oracle(task, spoil=1), "test", batch_size=3)
    assert 0 < wrong["bleu"] < 100
    described = task.describe_generation()
    assert described["beams"] == 2
    assert "tok:char" in described["signatures"]["bleu"]


def test_the_length_penalty_of_gnmt_reaches_the_search(corpus):
    gnmt = {"generate_length_penalty": 0.6, "generate_length_penalty_form": "gnmt"}
    task = build(corpus, generate_beams=2, **gnmt)
    model = Oracle(task)
    task.generate_metrics(model, "test", batch_size=3)
    assert 7 ** model.keywords["length_penalty"] == pytest.approx((12 / 6) ** 0.6)
    described = task.describe_generation()
    assert (described["length_penalty"], described["length_penalty_form"]) == (0.6, "gnmt")


def small_model(task):
    from wellposed.models import build_model

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return build_model("wellposed", "seq2seq_lm", **sizes, **task.model_kwargs())


@pytest.mark.parametrize("beams", [1, 2])
def test_generation_tells_after_every_token_and_can_be_stopped(corpus, beams):
    class Stop(Exception):  # noqa: N818
        pass

    task = build(corpus, generate_beams=beams, generate_max_examples=4)
    model = small_model(task)
    notified = []
    generate = partial(task.generate_metrics, model, "valid", batch_size=2)
    assert generate(notify=lambda *n: notified.append(n)) == generate()
    assert sorted(set(notified)) == [(0, 4), (2, 4)]
    assert len(notified) > 2

    def stop(done, count):
        raise Stop

    with pytest.raises(Stop):
        task.generate_metrics(model.train(), "valid", batch_size=2, notify=stop)
    assert model.training


@pytest.mark.parametrize("beams", [1, 3])
def test_generation_with_a_real_model_gives_every_row_its_text(corpus, beams):
    """Batched by length, every row gets what it gets alone."""
    task = build(corpus)
    model = small_model(task).eval()
    rows = [task.dataset("test")[i]["input_ids"] for i in range(5)]
    decoding = Decoding(beams=beams, max_new_tokens=6)
    together = dict(generate_texts(model, task.tokenizer, rows, decoding, batch_size=5))
    assert sorted(together) == list(range(5))
    for index, row in enumerate(rows):
        alone = dict(generate_texts(model, task.tokenizer, [row], decoding, batch_size=1))
        assert alone == {0: together[index]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tgt": "fr"}, "languages that exist there: de, en"),
        ({"tokenizer": "word"}, "expected bpe, char or hf:NAME"),
        ({"generate_length_penalty_form": "gmnt"}, "form = 'gmnt', expected 'power' or 'gnmt'"),
    ],
)
def test_bad_options_are_refused(corpus, options, message):
    with pytest.raises((ConfigError, DataError), match=message):
        build(corpus, **options)
