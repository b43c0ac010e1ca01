"""Small data sets in one folder, in which each recipe finds its own, and a small encoder."""

import gzip
import random

import pytest
import torch
from tests.support.minbert import write_minbert
from tests.support.words import Cli
from transformers import BertConfig, BertModel

from wellposed_studies.mcgrath2024.task import MinBertOptions, MinBertTask

WORDS = ["This", "movie", "is", "terrible", "but", "it", "has", "some", "good", "effects."]


@pytest.fixture
def cli(capsys):
    """Return the command, which one calls with words and a status and reads its output."""
    return Cli(capsys)


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Texts whose labels nothing tells, and running text."""
    rng = random.Random(0)
    folder = tmp_path_factory.mktemp("data")
    for name, labels in (("imdb", 2), ("ag_news", 4)):
        (folder / name).mkdir()
        for split, count in (("train", 24), ("valid", 8), ("test", 12)):
            rows = [f"{i % labels}\t{' '.join(rng.sample(WORDS, 8))}\n" for i in range(count)]
            (folder / name / f"{split}.tsv").write_text("".join(rows))
    text = " ".join(rng.choice(WORDS) for _ in range(1200)).encode()
    for name in ("ptb/ptb.char.train.txt.gz", "text/tinyshakespeare.txt.gz"):
        (folder / name).parent.mkdir()
        (folder / name).write_bytes(gzip.compress(text))
    return folder


@pytest.fixture(scope="session")
def minbert(tmp_path_factory):
    return write_minbert(tmp_path_factory.mktemp("minbert"))


@pytest.fixture(scope="session")
def task(minbert):
    return MinBertTask(MinBertOptions(str(minbert), vocab_size=120, max_length=16))


@pytest.fixture(scope="session")
def encoder(task, tmp_path_factory):
    """A folder with the weights and the tokenizer of a BERT of one layer."""
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(5)
    config = BertConfig(
        vocab_size=len(task.tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=96,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    task.tokenizer.save_pretrained(folder)
    return folder
