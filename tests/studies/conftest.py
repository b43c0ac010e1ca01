"""The three labelled sets of McGrath (2024), as tests write them, and an encoder to fine-tune on
them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.mcgrath2024 import TINY
from tests.support.minbert import write_minbert
from transformers import BertConfig, BertModel

from wellposed.tasks.data.minbert import read_minbert
from wellposed_studies.mcgrath2024.encoders import EncodedSets, encode_sets


@pytest.fixture(scope="session")
def minbert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_minbert(tmp_path_factory.mktemp("minbert"))


@pytest.fixture(scope="session")
def sets(minbert: Path) -> EncodedSets:
    return encode_sets(read_minbert(minbert), TINY)


@pytest.fixture(scope="session")
def encoder(sets: EncodedSets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the weights and the tokenizer of a BERT of one layer."""
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(5)
    model = BertModel(
        BertConfig(vocab_size=len(sets.tokenizer), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                   intermediate_size=16, max_position_embeddings=16)
    )  # fmt: skip
    model.save_pretrained(folder)
    sets.tokenizer.save_pretrained(folder)
    return folder
