"""What classifiers of all families share: pooled vectors, and the loss of labels."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from wellposed.errors import ShapeError
from wellposed.models._config import WellposedConfig
from wellposed.models._heads import IGNORED_LABEL, Head, Output
from wellposed.models._inputs import padding_of
from wellposed.models._pooling import POOLINGS
from wellposed.models._transject_config import TransJectConfig
from wellposed.nn.checks import on_host


class Classifier(Head[Output]):
    """A head that pools the states of a sequence, over its real tokens, and maps vectors to
    `num_labels` logits."""

    def add_pool(self, config: WellposedConfig | TransJectConfig) -> None:
        """Set the pool and the number of labels."""
        self.loss_type = "ForSequenceClassification"
        self.num_labels = config.num_labels or 2
        self.pool = POOLINGS.get(config.pooling)

    def pooled(
        self, input_ids: Tensor | None, attention_mask: Tensor | None, **given: Any
    ) -> tuple[Tensor, Any]:
        """Return one vector per sequence, (batch, width), and the output of the body."""
        output = self.run_body(
            input_ids=input_ids, attention_mask=attention_mask, use_cache=False, **given
        )
        hidden = cast(Tensor, output.last_hidden_state)
        return (
            self.pool(hidden, padding_of(attention_mask, hidden.shape[0], hidden.shape[1])),
            output,
        )

    def label_loss(self, logits: Tensor, labels: Tensor | None) -> Tensor | None:
        """Return cross-entropy, binary cross-entropy or squared error, as transformers chooses;
        None without labels."""
        if labels is None:
            return None
        check_labels(labels, logits)
        model = cast(Any, self)
        labels = labels.to(logits.dtype) if self.num_labels == 1 else labels
        return model.loss_function(labels=labels, pooled_logits=logits, config=model.config)


def check_labels(labels: Tensor, logits: Tensor) -> None:
    """Raise `ShapeError` where labels are not one a sequence (or one a logit) or, on the CPU, name
    no class.

    >>> check_labels(torch.tensor([0, 3]), torch.zeros(2, 3))
    Traceback (most recent call last):
    ...
    wellposed.errors.ShapeError: labels: received class 3 at row 1; expected classes in [0, 3), or
    -100 for none; set \
num_labels to the number of classes
    """
    batch, classes = logits.shape
    if labels.numel() not in (batch, batch * classes) or labels.dim() == 0:
        raise ShapeError(
            f"labels: received shape {tuple(labels.shape)}; expected ({batch},), or ({batch},"
            f" {classes}) for several labels of one sequence"
        )
    if classes == 1 or labels.numel() != batch or labels.is_floating_point() or not on_host(labels):
        return
    flat = labels.reshape(-1)
    unknown = torch.nonzero((flat != IGNORED_LABEL) & ((flat < 0) | (flat >= classes))).flatten()
    if len(unknown):
        row = int(unknown[0])
        raise ShapeError(
            f"labels: received class {int(flat[row])} at row {row}; expected classes in [0,"
            f" {classes}), or {IGNORED_LABEL} for none; set num_labels to the number of classes"
        )
