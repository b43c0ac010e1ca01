"""Language modeling with any tokenizer: every byte counted once, bits per byte against a slow
sum."""

import math

import numpy as np
import pytest
import torch
import transformers
from tests.support.refusal import bad_config
from tests.support.tokenizer_folders import bert_words, byte_level_bpe

from wellposed.tasks import SPLITS, build_task
from wellposed.tasks.language_modeling import encode_with_bytes
from wellposed.tasks.text.tokenizers import build_encoder

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
    monkeypatch.setattr("wellposed.tasks.language_modeling.PIECE", piece)
    name = f"hf:{folder / tokenizer}" if (folder / tokenizer).is_dir() else tokenizer
    found = encode_with_bytes(build_encoder(name, [TEXT], max_words=1), TEXT)
    assert found.token_bytes is not None
    assert found.token_bytes.sum() == len(TEXT.encode())
    assert found.token_bytes.min() >= 0
    assert len(found.token_bytes) == len(found.ids.flat)


def test_whole_tokens_of_a_byte_level_tokenizer_stand_for_their_own_bytes(folder):
    encoder = build_encoder(f"hf:{folder / 'bpe'}", [TEXT], max_words=1)
    found = encode_with_bytes(encoder, TEXT)
    assert found.token_bytes is not None
    tokenizer = encoder.tokenizer(max_length=1)
    assert tokenizer.decode(found.ids.flat.tolist()) == TEXT
    # The bytes written so far, from the byte-level alphabet; inside a character they run behind,
    # never ahead.
    pieces = tokenizer.convert_ids_to_tokens(found.ids.flat.tolist())
    written, counted = np.cumsum([len(piece) for piece in pieces]), np.cumsum(found.token_bytes)
    assert ((counted >= written) & (counted <= written + 3)).all()
    starts = {len(TEXT[:index].encode()) for index in range(len(TEXT) + 1)}
    at_characters = np.array([size in starts for size in written.tolist()])
    assert (counted[at_characters] == written[at_characters]).all()


def test_metrics_are_a_slow_sum_over_the_text_whatever_the_batches(folder):
    task = build(folder)
    config = transformers.GPT2Config(
        vocab_size=task.model_kwargs()["vocab_size"], n_embd=8, n_layer=1, n_head=2, n_positions=16
    )
    model = transformers.GPT2LMHeadModel(config).eval().double()
    blocks = task.dataset("valid")
    nats = 0.0
    with torch.no_grad():
        for block in blocks:
            ids = torch.tensor([block["input_ids"]])
            chosen = model(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])
            nats -= float(chosen.sum())
    text_bytes = int(task.description()["bytes"]["valid"])
    first = len(task.tokenizer.decode(blocks[0]["input_ids"][:1]).encode())
    tokens = sum(len(block["input_ids"]) - 1 for block in blocks)
    for size in (1, 3):
        totals = {}
        for members in task.batches("valid", size, seed=0, epoch=0):
            batch = task.collate([blocks[member] for member in members])
            with torch.no_grad():
                logits = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            for name, (total, count) in task.metric_sums(logits, batch).items():
                before = totals.get(name, (0.0, 0.0))
                totals[name] = (before[0] + total, before[1] + count)
        found = task.summarize(totals)
        # Sums of float32 logits: relative error of some 1e-6.
        assert found["nats_per_token"] == pytest.approx(nats / tokens, rel=1e-5)
        assert found["perplexity"] == pytest.approx(math.exp(nats / tokens), rel=1e-4)
        assert found["bits_per_byte"] == pytest.approx(
            nats / math.log(2) / (text_bytes - first), rel=1e-5
        )


def test_the_reference_is_the_entropy_of_the_tokens_of_valid(folder):
    task = build(folder, "byte")
    ids = [token for block in task.dataset("valid") for token in block["input_ids"][1:]]
    shares = [ids.count(token) / len(ids) for token in set(ids)]
    nats = -sum(share * math.log(share) for share in shares)
    found = task.reference()
    assert found["nats_per_token"] == pytest.approx(nats)
    assert found["perplexity"] == pytest.approx(math.exp(nats))
    # Of a split character the first byte stands for all: the sum over the split is what is exact.
    counted = (
        int(task.description()["bytes"]["valid"])
        - task.collate([task.dataset("valid")[0]])["label_bytes"][0, 0]
    )
    assert found["bits_per_byte"] == pytest.approx(nats * len(ids) / math.log(2) / int(counted))


def test_the_tokenizer_and_what_it_loses_are_described(folder):
    task = build(folder, "words")
    described = task.description()
    assert described["unknown_tokens"]["train"]["most_frequent"].keys() == {"[UNK]"}
    assert described["bytes_per_token"] == "by position, from the tokenizer's offsets"
    assert described["tokenizer"]["kind"].startswith("hf:")
    assert {len(task.lengths(split)) > 0 for split in SPLITS} == {True}
    with bad_config(match="use the task word_lm"):
        build(folder, "word")
