"""Character language modelling: texts, splits, token accounting over epochs, entropy, bad input."""

import math
from collections import Counter
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.refusal import bad_config, bad_data, refused

from wellposed.tasks import build_task
from wellposed.tasks.data.texts import looks_spaced
from wellposed.tasks.language_modeling import BlockDataset, LineDataset

TEXT = "".join(f"Line {i}: the quick brown fox jumps over the lazy dog.\n" for i in range(200))


def build(data, **options):
    return build_task("char_lm", {"data": str(data), "seq_len": 32, **options})


def decoded(task, split):
    """Join the blocks of a split, without their one-token overlap, back into its text."""
    blocks = [block["input_ids"] for block in task.dataset(split)]
    ids = blocks[0] + [token for block in blocks[1:] for token in block[1:]]
    return str(task.tokenizer.decode(ids))


@pytest.fixture
def text_file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def test_one_file_is_cut_contiguously_into_90_5_5(text_file):
    task = build(text_file)
    parts = [decoded(task, split) for split in ("train", "valid", "test")]
    assert "".join(parts) == TEXT
    assert [round(len(part) / len(TEXT), 3) for part in parts] == [0.9, 0.05, 0.05]
    described = task.description()
    assert described["splits"] == "one file"
    assert described["cut_from_train"] == {"valid": "contiguous 5%", "test": "contiguous 5%"}


def test_every_epoch_predicts_each_train_token_once_at_a_new_offset(text_file):
    task = build(text_file, seq_len=20)
    tokens = task.dataset("train").tokens.tolist()
    firsts = set()
    for epoch in range(6):
        members = chain(*task.batches("train", 8, seed=0, epoch=epoch))
        blocks = list(map(task.dataset("train").bounds, members))
        predicted = chain(*(range(start + 1, stop) for start, stop in blocks))
        assert sorted(predicted) == list(range(1, len(tokens)))
        firsts.add(min(stop for _, stop in blocks))
    assert len(firsts) > 1


def test_totals_over_a_split_count_every_character_but_the_first(text_file):
    task = build(text_file)
    totals = (0.0, 0.0)
    for indices in task.batches("valid", 3, seed=0, epoch=0):
        batch = task.collate([task.dataset("valid")[i] for i in indices])
        logits = torch.zeros(*batch["input_ids"].shape, 7)
        few = {**batch, "labels": batch["labels"].clamp(max=6)}
        sums = task.metric_sums(logits, few)["nats_per_char"]
        totals = (totals[0] + sums[0], totals[1] + sums[1])
    assert totals[1] == len(decoded(task, "valid")) - 1
    metrics = task.summarize({"nats_per_char": totals})
    assert metrics["nats_per_char"] == pytest.approx(math.log(7), rel=1e-5)
    assert metrics["bits_per_char"] == pytest.approx(math.log2(7), rel=1e-5)


def test_limit_chars_cuts_train_alone_and_is_described(text_file):
    full, task = build(text_file), build(text_file, limit_chars=1000)
    assert decoded(task, "train") == decoded(full, "train")[:1000]
    described, whole = task.description(), full.description()["characters"]
    assert described["characters"]["valid"] == whole["valid"]
    assert described["train_characters_left_out_by_limit_chars"] == whole["train"] - 1000


SPACED = "n o _ i t _ w a s n ' t \n < u n k > _ a _ b c d \n "


def test_spaced_text_is_mapped_back(tmp_path):
    for split in ("train", "valid", "test"):
        (tmp_path / f"x.char.{split}.txt").write_text(SPACED * 20)
    task = build(tmp_path / "x.char.train.txt")
    assert decoded(task, "train") == "no it wasn't\n<unk> a bcd\n" * 20
    assert "train, valid, test" in task.description()["spaced_format"]
    plain = build(tmp_path / "x.char.train.txt", format="plain")
    assert decoded(plain, "train") == SPACED * 20
    assert "spaced_format" not in plain.description()


@pytest.mark.parametrize(
    ("text", "spaced"),
    [
        (SPACED, True),
        ("a b c d\n\n e f g h \n", True),
        ("plain text\n", False),
        ("a b c d\nplain\n", False),
        ("a\nb\nc\n", False),
        ("1 2\n3 4\n", False),
        ("", False),
    ],
)
def test_detection_of_the_spaced_format(text, spaced):
    assert looks_spaced(text) is spaced


def test_malformed_spaced_lines_are_named(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("a b c d e\n" * 60 + "a bc d\nx  y\n")
    says = f"{path}:61: expected single characters separated by single spaces: 'a bc d'"
    with refused(says, f"{path}:62: ", "give format='plain'"):
        build(path)
    assert build(path, format="plain").description()["characters"]["train"] > 0


def test_builtin_prose_is_english_deterministic_and_described():
    from wellposed.tasks.data.texts import gather_prose

    text, identity = gather_prose()
    gather_prose.cache_clear()
    assert gather_prose() == (text, identity)
    assert 500_000 < len(text) < 2_000_000
    words = Counter(text.lower().split())
    assert {"the", "of", "to", "a", "is", "and"} <= {word for word, _ in words.most_common(12)}
    described = build("builtin", limit_chars=5000).description()
    assert described.items() >= identity.items()
    assert described["missing_modules"] == []
    with bad_config(match="option test: only with data=FILE"):
        build("builtin", test="a.txt")


def test_hub_texts_are_joined_by_line_feeds(monkeypatch):
    import datasets

    rows = datasets.Dataset.from_dict({"text": ["one", "two\n", "three"] * 20})
    splits = {"train": rows, "test": rows}
    monkeypatch.setattr(datasets, "load_dataset", lambda *args: splits)
    task = build("hf:name")
    assert decoded(task, "test") == "one\ntwo\nthree\n" * 20
    assert task.description()["cut_from_train"] == {"valid": "contiguous 5%"}
    splits["train"] = datasets.Dataset.from_dict({"body": ["a"]})
    with bad_data(match=r"hf:name \(train\): no column 'text'; it has body"):
        build("hf:name")


def test_lines_are_examples_and_padding_has_no_loss(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{i} sheep{'!' * (i % 7)}\n" for i in range(300)))
    task = build(path, examples="lines", seq_len=40)
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
    whole = task.metric_sums(logits, together)["nats_per_char"]
    nats, count = 0.0, 0
    for row, index in zip(logits, members, strict=True):
        ids = valid[index]["input_ids"]
        nats -= sum(float(row[t].log_softmax(-1)[ids[t + 1]]) for t in range(len(ids) - 1))
        count += len(ids) - 1
    assert whole == pytest.approx((nats, count))


def test_lines_need_a_line_feed(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("abc" * 500)
    with bad_data(match="no line feed, so it is one line; give examples='blocks'"):
        build(path, examples="lines")


# Blocks and lines -----------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(total=st.integers(2, 80), seq_len=st.integers(2, 20), data=st.data())
def test_each_token_is_predicted_once_after_its_own_predecessor(total, seq_len, data):
    blocks = BlockDataset(np.arange(total), seq_len=seq_len, where="text")
    offset = data.draw(st.integers(0, blocks.num_offsets - 1))
    predicted = []
    for index in blocks.indices(offset):
        tokens = blocks[index]["input_ids"]
        assert 2 <= len(tokens) <= seq_len
        assert tokens == list(range(tokens[0], tokens[0] + len(tokens)))
        predicted += tokens[1:]
    assert predicted == list(range(1, total))


@settings(max_examples=50, deadline=None)
@given(total=st.integers(2, 60), seq_len=st.integers(2, 12))
def test_indices_of_different_offsets_are_different_and_outsiders_are_refused(total, seq_len):
    blocks = BlockDataset(np.arange(total), seq_len=seq_len, where="text")
    assert blocks.indices(0) == list(range(len(blocks)))
    every = [index for offset in range(blocks.num_offsets) for index in blocks.indices(offset)]
    assert len(every) == len(set(every))
    for index in set(range(max(every) + 2 * seq_len)) - set(every):
        with pytest.raises(IndexError):
            blocks[index]


def test_sequence_behaviour():
    blocks = BlockDataset(np.arange(10), seq_len=4, where="text")
    assert len(blocks) == 3
    assert blocks[-1] == blocks[2]
    assert blocks[1:] == [blocks[1], blocks[2]]
    for offset in range(blocks.num_offsets):
        cut = {index: len(blocks[index]["input_ids"]) for index in blocks.indices(offset)}
        assert blocks.sizes(offset) == cut


def test_too_short_text_and_block_are_refused():
    with bad_data(match=r"valid\.txt: 1 tokens, expected at least 2"):
        BlockDataset(np.arange(1), seq_len=4, where="valid.txt")
    with bad_config(match="seq_len = 1"):
        BlockDataset(np.arange(9), seq_len=1, where="valid.txt")


@pytest.mark.parametrize("text", ["ab\ncde\n\nf", "\n\n", "abcdefgh", "\na\nbcdefghi\n", "ab"])
@pytest.mark.parametrize("seq_len", [2, 3, 5, 50])
def test_every_token_but_the_first_is_predicted_once_within_its_line(text, seq_len):
    tokens = np.array([ord(character) for character in text])
    lines = LineDataset(tokens, line_feed=ord("\n"), seq_len=seq_len, where="text")
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
