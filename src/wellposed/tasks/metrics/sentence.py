"""Cosine of sentence embeddings, by any encoder; SkipThought's weights are not maintained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from wellposed.errors import CheckpointError, ConfigError, ShapeError, missing_extra

if TYPE_CHECKING:
    from numpy.typing import NDArray

SentenceEncoder = Callable[[Sequence[str]], Any]
"""From n sentences to an (n, width) array."""


def sentence_cosine(
    hypotheses: Sequence[str], references: Sequence[str], encode: SentenceEncoder
) -> float:
    """Return the mean over pairs of the cosine of ``encode(hypothesis)`` and ``encode(reference)``.

    Status: exact for the encoder given, a function from n sentences to an (n, width) array. Values
    of two encoders do not compare, in particular not with the SkipThought column of Zhang et al.
    (2021, Table 4), which this replaces. An empty sentence counts as cosine 0.

    >>> round(sentence_cosine(["yes", "no"], ["yes", ""], lambda texts: [[len(text), 1.0] for text in texts]), 6)
    0.5
    """
    pairs = zip(hypotheses, references, strict=True)
    texts = [text for pair in pairs if all(map(str.strip, pair)) for text in pair]
    if not texts:
        return 0.0
    rows: NDArray[np.float64] = np.asarray(encode(texts), dtype=np.float64)
    if rows.ndim != 2 or len(rows) != len(texts):
        raise ShapeError(
            f"sentence encoder: {len(texts)} sentences gave an array of shape {rows.shape},"
            " expected one row each"
        )
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    rows = rows / np.where(norms > 0, norms, 1)
    return float((rows[::2] * rows[1::2]).sum(1).clip(-1, 1).sum() / len(hypotheses))


def hf_sentence_encoder(
    name: str, *, batch_size: int = 64, max_length: int = 128
) -> SentenceEncoder:
    """Return the mean over real tokens of the last hidden states of a Hugging Face encoder.

    ``name`` is a folder with a model and its tokenizer, or a hub name; ``max_length`` is in tokens.
    """
    try:
        import torch
        from transformers import AutoModel
    except ImportError as error:
        raise missing_extra("transformers", "hf", "sentence encoders") from error
    from wellposed.models import load_pretrained_model
    from wellposed.tasks.text.pretrained import load_tokenizer

    try:
        tokenizer: Any = load_tokenizer(name)
        # The mean is over hidden states, so nothing is read of the pooler.
        model: Any = load_pretrained_model(AutoModel, name, unread="pooler.")
    except CheckpointError as error:
        raise ConfigError(
            f"sentence encoder {name!r} cannot be loaded: {error}; give the folder of an encoder"
            " saved with save_pretrained, tokenizer beside it, or a hub name that is cached or"
            " reachable"
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token

    @torch.no_grad()
    def encode(texts: Sequence[str]) -> Any:
        rows = []
        for start in range(0, len(texts), batch_size):
            some = list(texts[start : start + batch_size])
            cut = {"padding": True, "truncation": True, "max_length": max_length}
            batch = tokenizer(some, return_tensors="pt", **cut)
            hidden = model(**batch).last_hidden_state
            mask = batch["attention_mask"][..., None].to(hidden.dtype)
            rows.append((hidden * mask).sum(1) / mask.sum(1).clamp(min=1))
        return torch.cat(rows).float().numpy()

    return encode
