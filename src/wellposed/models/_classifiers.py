"""Classifiers of one sequence or of two, of whatever family: pooled vectors, and the loss of
labels."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.utils.generic import can_return_tuple

from wellposed.call_checks import known_keywords
from wellposed.errors import ShapeError
from wellposed.models._heads import IGNORED_LABEL, Head, Output
from wellposed.models._inputs import padding_of
from wellposed.models._pair_head import PairHead
from wellposed.models._pooling import POOLINGS
from wellposed.nn.checks import on_host


class Classifier(Head[Output]):
    """A head that pools the states of a sequence, over its real tokens, and maps vectors to
    `num_labels` logits."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = self.body(config)  # pyright: ignore[reportCallIssue] (a class)
        self.loss_type = "ForSequenceClassification"
        self.num_labels = config.num_labels or 2
        self.pool = POOLINGS.get(config.pooling)
        self.add_classifier(config)
        self.post_init()  # pyright: ignore[reportCallIssue]

    def add_classifier(self, config: Any) -> None:
        """Make what maps the pooled vectors to logits."""
        raise NotImplementedError

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


class SequenceClassifier(Classifier[Output]):
    """`logits = W pool_i(x_i) + b` for the states x of a body `model`, of whatever family."""

    classifier: nn.Linear

    def add_classifier(self, config: Any) -> None:
        """Make the linear map to logits."""
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)

    @can_return_tuple
    @known_keywords
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> Output:
        """Return the logits of every sequence and, with labels, the loss.

        Args:
            input_ids: see `forward` of the body, `WellposedModel` or `TransJectModel`, as are the
                arguments not named here.
            labels: int (batch,) for one label, where -100 is not counted; float (batch, num_labels)
                for several; float (batch,) for a number (num_labels = 1). `config.problem_type`
                settles what the dtype does not.

        Returns:
            `loss` where labels are given: cross-entropy, binary cross-entropy or squared error,
            averaged, plus the body's auxiliary loss where it has one; `logits` (batch, num_labels);
            and of what the body returns all that the output has a field for.

        Raises:
            ShapeError: see the body's `forward`.
            ConfigError: see the body's `forward`.
        """
        pooled, output = self.pooled(
            input_ids,
            attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        logits = self.logits_of(pooled)
        return self.result(logits, self.label_loss(logits, labels), output)

    def logits_of(self, pooled: Tensor) -> Tensor:
        """Map vectors (batch, width) to logits (batch, num_labels)."""
        return self.classifier(pooled)


class SequencePairClassifier(Classifier[Output]):
    """`logits = head(pool(f(x)), pool(f(y)))` for a body `model` f, of whatever family."""

    classifier: PairHead

    @can_return_tuple
    @known_keywords
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        input_ids_pair: Tensor | None = None,
        attention_mask_pair: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        inputs_embeds_pair: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Output:
        """Return the logits of every pair and, with labels, the loss.

        Args:
            input_ids: int (batch, tokens) of the first sequences.
            attention_mask: 1 = real token of the first sequences; None = all real.
            input_ids_pair: int (batch, other tokens) of the second sequences.
            attention_mask_pair: 1 = real token of the second sequences; None = all real.
            inputs_embeds: (batch, tokens, D) in place of `input_ids`.
            inputs_embeds_pair: (batch, other tokens, D) in place of `input_ids_pair`.
            labels: as for `forward` of the classifier of one sequence,
                `WellposedForSequenceClassification`.

        Returns:
            `loss` where labels are given, plus the mean of the body's auxiliary losses where it has
            one; `logits` (batch, num_labels); `auxiliary_loss` where the output has a field for it.

        Raises:
            ShapeError: sides of different batch size, and what `forward` of the body refuses.
        """
        vector, output = self.pooled(
            input_ids, attention_mask, inputs_embeds=inputs_embeds, output_hidden_states=False
        )
        other_vector, other = self.pooled(
            input_ids_pair,
            attention_mask_pair,
            inputs_embeds=inputs_embeds_pair,
            output_hidden_states=False,
        )
        check_pairs(vector, other_vector)
        logits = self.classifier(vector, other_vector)
        losses = [output.get("auxiliary_loss"), other.get("auxiliary_loss")]
        found = {} if None in losses else {"auxiliary_loss": sum(losses) / 2}
        return self.result(logits, self.label_loss(logits, labels), found)


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


def check_pairs(first: Tensor, second: Tensor) -> None:
    """Raise `ShapeError` where the two sides hold different numbers of sequences.

    >>> import torch
    >>> check_pairs(torch.zeros(2, 8), torch.zeros(3, 8))
    Traceback (most recent call last):
    ...
    wellposed.errors.ShapeError: input_ids_pair: received 3 sequences for 2 in input_ids; expected
    one for each
    """
    if first.shape[0] != second.shape[0]:
        raise ShapeError(
            f"input_ids_pair: received {second.shape[0]} sequences for {first.shape[0]} in"
            " input_ids; expected one for each"
        )
