"""Options and scores of multi-task training; free of torch, so that a command can show its help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from wellposed.options import CheckedOptions, Positive, Rate, Size

SETS = ("sst", "para", "sts")
METRICS = {"sst": "accuracy", "para": "accuracy", "sts": "Pearson"}


@dataclass(frozen=True)
class MultiTaskOptions(CheckedOptions):
    """How one encoder with three heads is built and trained."""

    encoder: str | None = None
    """Folder or hub name of a pretrained encoder with its tokenizer, or the config.json of one to
    train from scratch; None trains the small BERT below from scratch."""
    hidden_size: Size = 64
    """Width of the small BERT; its feed-forward layers are four times as wide."""
    num_hidden_layers: Size = 2
    """Layers of the small BERT."""
    num_attention_heads: Size = 4
    """Heads of the small BERT."""
    vocab_size: Size = 4000
    """Word pieces learned from the train rows where the encoder brings no tokenizer."""
    max_length: Size = 48
    """Longest row in tokens, pairs together; longer rows are cut and counted."""
    dropout: Rate = 0.1
    """Dropout of the small BERT's hidden states, and before the heads."""
    train_rows: Size | None = None
    """Train on the first so many rows of each set; None is all."""
    batch_size: Size = 16
    """Rows of each of the three sets per step."""
    steps: Size = 400
    """Optimizer steps; each takes one batch of every set and the sum of the three losses."""
    learning_rate: Positive = 1e-3
    """Peak learning rate of AdamW, reached after a tenth of the steps, then falling linearly to
    zero."""
    weight_decay: float = 0.01
    """Decay of matrices."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    measure_every: Size = 40
    """Steps between measurements of orthogonality."""
    sts_loss: Literal["squared_error", "cosine"] = "squared_error"
    """squared_error of 5 sigmoid(output), or cosine: 1 - cos of the batch's outputs and scores, as
    vectors."""

    def problems(self) -> list[str]:
        """Return a line where the heads do not divide the width of the small BERT."""
        if self.encoder is not None or self.hidden_size % self.num_attention_heads == 0:
            return []
        return [
            f"hidden_size = {self.hidden_size} is not a multiple of {self.num_attention_heads}"
            " heads"
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return every option by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}


def overall_score(scores: Mapping[str, float]) -> float:
    """Return ``(sst + para + (sts + 1) / 2) / 3``: accuracies as they are, the correlation moved to
    0..1.

    Status: exact. Source: the score of the CS224N project, which reproduces every row of McGrath
    (2024, Table 1) to its last printed digit.

    >>> round(overall_score({"sst": 0.485, "para": 0.876, "sts": 0.8358}), 4)
    0.7596
    """
    return (scores["sst"] + scores["para"] + (scores["sts"] + 1) / 2) / 3
