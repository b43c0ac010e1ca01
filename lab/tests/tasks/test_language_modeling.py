"""Language modeling: texts, splits, tokens of every kind, each predicted once; bits per byte, entropies and
perplexities against slow sums; bad input."""

import math
from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tokenizer_folders import bert_words, byte_level_bpe

from wellposed.errors import DataError
from wellposed_lab.tasks.language_modeling import BlockDataset, encode_with_bytes
from wellposed_lab.tasks.task import build_task
from wellposed_lab.tasks.text.tokenizers import build_encoder

TEXT = "The naïve café — 10 € — 🙂 said: don't!\n\n  Two  spaces,\ttabs\nand 漢字 too.\n" * 30


@pytest.fixture
def folder(tmp_path):
    byte_level_bpe([TEXT], size=320).save_pretrained(tmp_path / "bpe")
    bert_words(["The", "said:", "too."]).save_pretrained(tmp_path / "words")
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path


def build(folder, tokenizer="bpe", **options):
    name = f"hf:{folder / tokenizer}" if (folder / tokenizer).is_dir() else tokenizer
    return build_task(
        "language_modeling",
        {"data": str(folder / "text.txt"), "tokenizer": name, "seq_len": 16, **options},
    )


@pytest.mark.parametrize("tokenizer", ["bpe", "words", "byte", "character"])
@pytest.mark.parametrize("piece", [10**6, 200])
def test_the_bytes_of_all_tokens_are_those_of_the_text(folder, tokenizer, piece, monkeypatch):
    monkeypatch.setattr("wellposed_lab.tasks.language_modeling.PIECE", piece)
    name = f"hf:{folder / tokenizer}" if (folder / tokenizer).is_dir() else tokenizer
    encoded = encode_with_bytes(build_encoder(name, [TEXT], max_words=1), TEXT)
    assert encoded.token_bytes.sum() == len(TEXT.encode())
    assert encoded.token_bytes.min() >= 0
    assert len(encoded.token_bytes) == len(encoded.ids.flat)


def test_metrics_are_a_slow_sum_over_the_text_whatever_the_batches(folder):
    task = build(folder)
    size = task.model_kwargs()["vocab_size"]
    table = torch.randn(size, size, dtype=torch.float64)
    blocks = task.dataset("valid")
    rows = [torch.tensor(block["input_ids"]) for block in blocks]
    tokens = sum(len(row) - 1 for row in rows)
    nats = -sum(
        float(table[row[:-1]].log_softmax(-1).gather(1, row[1:, None]).sum()) for row in rows
    )
    first = len(task.tokenizer.decode(rows[0][:1]).encode())
    bits = nats / math.log(2) / (int(task.description()["bytes"]["valid"]) - first)
    for members in (1, 3):
        batches = [
            task.collate([blocks[member] for member in batch])
            for batch in task.batches("valid", members, seed=0, epoch=0)
        ]
        sums = [task.metric_sums(table[batch["input_ids"]], batch) for batch in batches]
        totals = {
            name: tuple(map(sum, zip(*(batch_sums[name] for batch_sums in sums), strict=True)))
            for name in sums[0]
        }
        expected = (nats / tokens, math.exp(nats / tokens), bits)
        metrics = task.summarize(totals)
        assert tuple(metrics.values()) == pytest.approx(expected, rel=1e-4)  # sums of float32


def test_the_reference_is_the_entropy_of_the_tokens_of_valid(folder):
    task = build(folder, "byte")
    ids = [token for block in task.dataset("valid") for token in block["input_ids"][1:]]
    shares = [ids.count(token) / len(ids) for token in set(ids)]
    nats = -sum(share * math.log(share) for share in shares)
    reference = task.reference()
    assert reference["nats_per_token"] == pytest.approx(nats)
    assert reference["perplexity"] == pytest.approx(math.exp(nats))
    # Of a split character the first byte stands for all: the sum over the split is what is exact.
    counted = (
        int(task.description()["bytes"]["valid"])
        - task.collate([task.dataset("valid")[0]])["label_bytes"][0, 0]
    )
    assert reference["bits_per_byte"] == pytest.approx(nats * len(ids) / math.log(2) / int(counted))


def build_chars(data, **options):
    return build_task("char_lm", {"data": str(data), "seq_len": 32, **options})


def ids(task, split):
    """Join the blocks of a split, without their one-token overlap."""
    blocks = [block["input_ids"] for block in task.dataset(split)]
    return blocks[0] + [token for block in blocks[1:] for token in block[1:]]


def decoded(task, split):
    return str(task.tokenizer.decode(ids(task, split)))


def test_every_epoch_predicts_each_train_token_once_at_a_new_offset(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 99)
    task = build_chars(tmp_path / "text.txt", seq_len=20)
    firsts = set()
    for epoch in range(6):
        members = chain(*task.batches("train", 8, seed=0, epoch=epoch))
        blocks = list(map(task.dataset("train").bounds, members))
        predicted = chain(*(range(start + 1, stop) for start, stop in blocks))
        assert sorted(predicted) == list(range(1, len(task.dataset("train").tokens)))
        firsts.add(min(stop for _, stop in blocks))
    assert len(firsts) > 1


SPACED = "n o _ i t _ w a s n ' t \n < u n k > _ a _ b c d \n "


def test_spaced_text_is_mapped_back(tmp_path):
    for split in ("train", "valid", "test"):
        (tmp_path / f"x.char.{split}.txt").write_text(SPACED * 20)
    task = build_chars(tmp_path / "x.char.train.txt")
    assert decoded(task, "train") == "no it wasn't\n<unk> a bcd\n" * 20
    assert "train, valid, test" in task.description()["spaced_format"]
    plain = build_chars(tmp_path / "x.char.train.txt", format="plain")
    assert decoded(plain, "train") == SPACED * 20
    assert "spaced_format" not in plain.description()


def test_builtin_prose_is_english_deterministic_and_described():
    from wellposed_lab.tasks.data.texts import gather_prose

    text, identity = gather_prose()
    gather_prose.cache_clear()
    assert gather_prose() == (text, identity)
    assert 500_000 < len(text) < 2_000_000
    words = Counter(text.lower().split())
    assert {"the", "of", "to", "a", "is", "and"} <= {word for word, _ in words.most_common(12)}
    described = build_chars("builtin", limit_chars=5000).description()
    assert described.items() >= identity.items()
    assert described["missing_modules"] == []


def test_hub_texts_are_joined_by_line_feeds(monkeypatch):
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["one", "two\n", "three"] * 20})
    splits = {"train": rows, "test": rows}
    monkeypatch.setattr(datasets, "load_dataset", lambda *args: splits)
    task = build_chars("hf:name")
    assert decoded(task, "test") == "one\ntwo\nthree\n" * 20
    assert task.description()["cut_from_train"] == {"valid": "contiguous 5%"}
    splits["train"] = datasets.Dataset.from_dict({"body": ["a"]})
    with pytest.raises(DataError, match=r"hf:name \(train\): no column 'text'; it has body"):
        build_chars("hf:name")


def test_lines_are_examples_and_padding_has_no_loss(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} sheep{'!' * (i % 7)}\n" for i in range(300)))
    task = build_chars(path, examples="lines", seq_len=40)
    valid = task.dataset("valid")
    texts = [str(task.tokenizer.decode(line["input_ids"])) for line in valid]
    assert all(text.startswith("\n") and text.endswith("\n") for text in texts[1:-1])
    assert task.description()["examples"] == "lines"
    for epoch in (0, 1):
        order = chain(*task.batches("train", 8, seed=0, epoch=epoch))
        assert sorted(order) == list(range(len(task.dataset("train"))))
    batches = task.batches("valid", 4, seed=0, epoch=0)
    members = max(batches, key=lambda batch: len({len(texts[i]) for i in batch}))
    together = task.collate([valid[i] for i in members])
    assert (together["labels"] == -100).any()
    torch.manual_seed(0)
    classes = task.model_kwargs()["vocab_size"]
    logits = torch.randn(*together["input_ids"].shape, classes, dtype=torch.float64)
    padded = task.metric_sums(logits, together)["nats_per_char"]
    nats = 0.0
    count = 0
    for row, index in zip(logits, members, strict=True):
        ids = valid[index]["input_ids"]
        nats -= sum(float(row[t].log_softmax(-1)[ids[t + 1]]) for t in range(len(ids) - 1))
        count += len(ids) - 1
    assert padded == pytest.approx((nats, count))


@pytest.mark.parametrize(
    ("name", "text", "options", "message"),
    [
        (
            "char_lm",
            "a b c d e\n" * 60 + "a bc d\nx  y\n",
            {},
            "a.txt:61: .*: 'a bc d'(.|\n)*a.txt:62: ",
        ),
        ("char_lm", "abc" * 500, {"examples": "lines"}, "no line feed, .*; give examples='blocks'"),
        ("char_lm", "abc" * 500, {"seq_len": 1}, "seq_len = 1"),
        ("language_modeling", "abc" * 500, {"tokenizer": "word"}, "use the task word_lm"),
    ],
)
def test_texts_and_options_that_cannot_be_used(tmp_path, name, text, options, message):
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(ValueError, match=message):
        build_task(name, {"data": str(tmp_path / "a.txt"), **options})


@settings(max_examples=150, deadline=None)
@given(total=st.integers(2, 80), seq_len=st.integers(2, 20), data=st.data())
def test_each_token_is_predicted_once_after_its_own_predecessor(total, seq_len, data):
    blocks = BlockDataset(np.arange(total), seq_len=seq_len, where="text")
    offset = data.draw(st.integers(0, blocks.num_offsets - 1))
    predicted = []
    for index in blocks.indices(offset):
        tokens = blocks[index]["input_ids"]
        assert 2 <= len(tokens) == blocks.sizes(offset)[index] <= seq_len
        assert tokens == list(range(tokens[0], tokens[0] + len(tokens)))
        predicted += tokens[1:]
    assert predicted == list(range(1, total))
    every = [index for cut in range(blocks.num_offsets) for index in blocks.sizes(cut)]
    assert len(set(every)) == len(every)
    assert blocks[-1] == blocks[len(blocks) - 1]
    for index in set(range(max(every) + 2 * seq_len)) - {*every}:
        with pytest.raises(IndexError):
            blocks[index]


@pytest.mark.parametrize("text", ["ab\ncde\n\nf", "\n\n", "abcdefgh", "\na\nbcdefghi\n", "ab"])
@pytest.mark.parametrize("seq_len", [2, 3, 5, 50])
def test_every_token_but_the_first_is_predicted_once_within_its_line(text, seq_len):
    tokens = np.array([ord(character) for character in text])
    lines = BlockDataset(tokens, line_feed=ord("\n"), seq_len=seq_len, where="text")
    rows = [line["input_ids"] for line in lines]
    assert all(2 <= len(row) <= seq_len for row in rows)
    assert [token for row in rows for token in row[1:]] == tokens[1:].tolist()
    assert all(ord("\n") not in row[1:-1] for row in rows), "no line reaches into the next"
    if seq_len == 50:
        assert len(rows) == sum(
            len(line) > (number == 0) for number, line in enumerate(text.splitlines(keepends=True))
        )
    assert list(lines.sizes(0).values()) == list(map(len, rows))
    assert (lines.num_offsets, lines.indices(0)) == (1, list(range(len(rows))))


LINES = [" the cat <unk> N times ", " a dog 's bark ", "", " the dog sat "]


def build_words(data, **options):
    return build_task("word_lm", {"data": str(data), "seq_len": 6, **options})


def decoded_words(task, split):
    return task.tokenizer.convert_ids_to_tokens(ids(task, split))


@pytest.fixture
def folder_words(tmp_path):
    for split, lines in {"train": LINES * 5, "valid": LINES, "test": [" the parrot sat "]}.items():
        (tmp_path / f"ptb.{split}.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_words_and_ends_of_lines_are_those_of_the_file(folder_words):
    task = build_words(folder_words)
    expected = [word for line in LINES if line.strip() for word in [*line.split(), "<eos>"]]
    assert decoded_words(task, "train") == expected * 5
    assert decoded_words(task, "valid") == expected
    assert task.description()["words"]["train"] == 5 * len(expected)


def test_the_vocabulary_is_that_of_train_and_unknown_words_are_counted(folder_words):
    task = build_words(folder_words)
    assert task.model_kwargs()["vocab_size"] == 2 + 11
    described = task.description()["unknown_words"]
    assert described["test"] == {"count": 1, "distinct": 1, "most_frequent": {"parrot": 1}}
    assert described["valid"]["count"] == 0
    small = build_words(folder_words, max_words=3)
    assert small.model_kwargs()["vocab_size"] == 2 + 3
    assert {"<eos>", "the", "dog"} <= set(decoded_words(small, "train"))


@pytest.mark.parametrize(
    ("limit", "noun", "build"), [(9, "word", build_words), (100, "char", build_chars)]
)
def test_a_limit_cuts_train_alone(folder_words, limit, noun, build):
    full = build(folder_words)
    task = build(folder_words, **{f"limit_{noun}s": limit})
    all_tokens = full.dataset("train").tokens
    read = np.array(full.tokenizer.convert_ids_to_tokens(all_tokens.tolist()))[:limit]
    limited = task.dataset("train").tokens.tolist()
    assert task.tokenizer.convert_ids_to_tokens(limited) == read.tolist()
    assert len(task.dataset("valid").tokens) == len(full.dataset("valid").tokens)
    left_out = [value for name, value in task.description().items() if "left_out" in name]
    assert left_out == [len(all_tokens) - limit]
