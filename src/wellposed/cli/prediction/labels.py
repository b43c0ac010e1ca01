"""``wellposed predict`` for a classifier: one label a line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from wellposed.errors import DataError, ShapeError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def label_lines(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, lines: Sequence[str], batch_size: int
) -> Iterator[str]:
    """Yield the most probable label of every line and its probability, with a tab between.

    Raises:
        DataError: a line without exactly one tab, for a model that compares pairs.
        ShapeError: a text that the model has no positions for.
    """
    import torch

    pairs = type(model).__name__.endswith("PairClassification")
    limit = int(model.config.max_position_embeddings)
    names: dict[int, str] = dict(model.config.id2label or {})  # type: ignore[arg-type]
    for start in range(0, len(lines), batch_size):
        rows = lines[start : start + batch_size]
        texts = (
            [_both_texts(row, start + offset + 1) for offset, row in enumerate(rows)] if pairs else [[r] for r in rows]
        )
        given = {}
        for side, suffix in zip(zip(*texts, strict=True), ("", "_pair"), strict=False):
            encoded = _encoded(tokenizer, side, limit, start)
            given |= {f"input_ids{suffix}": encoded["input_ids"], f"attention_mask{suffix}": encoded["attention_mask"]}
        with torch.inference_mode():
            logits = model(**given).logits
        for probabilities in logits.float().softmax(-1):
            best = int(probabilities.argmax())
            yield f"{names.get(best, best)}\t{float(probabilities[best]):.4f}"


def _both_texts(line: str, number: int) -> list[str]:
    """Return the two texts of a line, which a tab separates."""
    texts = line.split("\t")
    if len(texts) != 2:
        raise DataError(
            f"line {number}: {len(texts)} texts, expected two with a tab between: the model compares a pair"
        )
    return texts


def _encoded(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], limit: int, start: int) -> Any:
    """Return padded ids and mask, or refuse a text that the model has no positions for."""
    encoded = tokenizer(list(texts), padding=True, return_tensors="pt")
    for offset, row in enumerate(encoded["attention_mask"]):
        length = int(row.sum())
        if length == 0 or length > limit:
            raise ShapeError(
                f"line {start + offset + 1}: {length} tokens, expected 1 to {limit} (the positions of the model)"
            )
    return encoded
