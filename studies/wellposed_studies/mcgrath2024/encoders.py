"""McGrath (2024): the three sets as token ids, and the encoder with three heads that reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import CheckpointError, ConfigError, missing_extra
from wellposed.tasks.data.minbert import EncodedRows, MinBertSet, encode_rows, train_word_pieces
from wellposed.tasks.text.tokenizers import has_tokenizer
from wellposed_studies.mcgrath2024.multitask_options import MultiTaskOptions

OUTPUTS = {"sst": 5, "para": 1, "sts": 1}


@dataclass(frozen=True)
class EncodedSets:
    """The three sets as token ids, the tokenizer that made them, and what to say about them."""

    train: dict[str, EncodedRows]
    valid: dict[str, EncodedRows]
    tokenizer: Any
    description: dict[str, Any]


def encode_sets(sets: Mapping[str, MinBertSet], options: MultiTaskOptions) -> EncodedSets:
    """Encode the first ``train_rows`` of every set and all valid rows with one tokenizer.

    Raises:
        ConfigError: the tokenizer of ``options.encoder`` cannot be loaded, or cannot pad.
    """
    length = options.max_length
    kept = {name: data.train.first(options.train_rows) for name, data in sets.items()}
    own = options.encoder and _own_tokenizer(options.encoder)
    if own:
        tokenizer: Any = _tokenizer(own)
    else:
        texts = [
            text for rows in kept.values() for sentences in rows.sentences for text in sentences
        ]
        tokenizer = train_word_pieces(texts, vocab_size=options.vocab_size, max_length=length)
    train = {name: encode_rows(rows, tokenizer, max_length=length) for name, rows in kept.items()}
    valid = {
        name: encode_rows(data.valid, tokenizer, max_length=length) for name, data in sets.items()
    }
    description = {
        name: {
            "train_rows": len(train[name]),
            "train_rows_available": len(data.train),
            "valid_rows": len(valid[name]),
            "rows_cut": train[name].cut + valid[name].cut,
            "files": list(data.files),
        }
        for name, data in sets.items()
    }
    return EncodedSets(train, valid, tokenizer, description)


def batch_of(
    rows: EncodedRows, indices: Sequence[int], pad_id: int
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the padded columns of the rows ``indices`` and their labels."""
    columns = {}
    for name, column in rows.columns.items():
        picked = [torch.tensor(column[index]) for index in indices]
        padding = pad_id if name == "input_ids" else 0
        columns[name] = nn.utils.rnn.pad_sequence(picked, batch_first=True, padding_value=padding)
    return columns, torch.tensor([rows.labels[index] for index in indices])


class MultiTaskModel(nn.Module):
    """Return ``head(dropout(encoder(x)[:, 0]))``: the [CLS] token of one encoder through the head
    of a set.

    Args:
        encoder: any Hugging Face encoder; its first token stands for the row.
        dropout: before the heads.

    >>> from transformers import BertConfig, BertModel
    >>> encoder = BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8))
    >>> MultiTaskModel(encoder)("sst", {"input_ids": torch.zeros(3, 4, dtype=torch.long)}).shape
    torch.Size([3, 5])
    """

    def __init__(self, encoder: nn.Module, dropout: float = 0.1) -> None:
        super().__init__()
        self.encoder = encoder
        self.dropout = nn.Dropout(dropout)
        config: Any = encoder.config
        self.heads = nn.ModuleDict(
            {name: nn.Linear(config.hidden_size, count) for name, count in OUTPUTS.items()}
        )

    def forward(self, name: str, batch: Mapping[str, Tensor]) -> Tensor:
        """Return the logits of the head ``name``."""
        return self.heads[name](self.dropout(self.encoder(**batch).last_hidden_state[:, 0]))


def build_multitask_model(options: MultiTaskOptions, tokenizer: Any) -> MultiTaskModel:
    """Return the model of ``options``: a small BERT with fresh weights, or the encoder it names,
    and fresh heads."""
    if options.encoder is not None:
        return MultiTaskModel(_encoder(options.encoder, options, tokenizer), options.dropout)
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=options.hidden_size,
        num_hidden_layers=options.num_hidden_layers,
        num_attention_heads=options.num_attention_heads,
        intermediate_size=4 * options.hidden_size,
        max_position_embeddings=options.max_length,
        hidden_dropout_prob=options.dropout,
        attention_probs_dropout_prob=0.0,  # with it, attention on a CPU leaves its fused kernel
        pad_token_id=tokenizer.pad_token_id,
    )
    return MultiTaskModel(BertModel(config, add_pooling_layer=False), options.dropout)


def _own_tokenizer(encoder: str) -> str | None:
    """Return where the tokenizer of ``encoder`` is; None for a ``config.json`` without one beside
    it."""
    if not Path(encoder).is_file():
        return encoder
    folder = Path(encoder).parent
    return str(folder) if has_tokenizer(folder) else None


def _tokenizer(name: str) -> Any:
    from wellposed.models import load_pretrained

    try:
        return load_pretrained(_transformers().AutoTokenizer, name)
    except CheckpointError as error:
        raise _cannot_load(name, error) from error


def _encoder(name: str, options: MultiTaskOptions, tokenizer: Any) -> nn.Module:
    """Return the encoder ``name``, or raise `ConfigError` where it cannot be loaded or has too few
    positions."""
    _transformers()
    from wellposed.models import start_model, text_positions

    try:
        wanted = {"vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id}
        encoder = start_model(name, "encoder", wanted).model
    except CheckpointError as error:
        raise _cannot_load(name, error) from error
    positions = text_positions(encoder.config)
    if positions is not None and positions < options.max_length:
        raise ConfigError(
            f"{name}: the rows have up to {options.max_length} tokens and the encoder has"
            f" {positions} positions; give one with more"
        )
    return encoder


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise missing_extra("transformers", "hf", "pretrained encoders") from error
    return transformers


def _cannot_load(name: str, error: CheckpointError) -> ConfigError:
    return ConfigError(
        f"encoder {name!r} cannot be loaded: {error}; give a folder that holds config.json,"
        " model.safetensors and tokenizer.json, a config.json, or a hub name that is cached or"
        " reachable"
    )
