"""Heads on a body of any family: language models, and classifiers of one or two sequences."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import ModelOutput

from wellposed.errors import ConfigError, ShapeError
from wellposed.models import _inputs
from wellposed.models._init import POOLINGS
from wellposed.models._inputs import first_outside, padding_of, takes
from wellposed.nn import INTEGERS, BallProjection, MaxMin

IGNORED_LABEL = -100

Output = TypeVar("Output", bound=ModelOutput)
CacheKind = TypeVar("CacheKind")


class Head(nn.Module, Generic[Output]):
    """Base of every head: it calls a body `model`, and returns logits and losses.

    Put it before the family's `PreTrainedModel` among the bases of a class. If a body returns an
    `auxiliary_loss`, it is added to the loss.
    """

    body: ClassVar[Callable[[Any], nn.Module]]
    """Builds the family's body from a configuration."""
    output_class: Callable[..., Output]
    """What `forward` returns: loss, logits, and fields of the body's output with the same names."""

    _output_fields: frozenset[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        made = getattr(cls, "output_class", None)
        if made is not None:  # read here, as torch.compile cannot
            cls._output_fields = frozenset(cast(Any, made).__dataclass_fields__)

    def run_body(self, **inputs: Any) -> Any:
        """Return the body's output by name, even if the configuration sets `return_dict=False`."""
        return cast(nn.Module, self.model)(**inputs, return_dict=True)

    def result(
        self,
        logits: Tensor,
        loss: Tensor | None,
        output: Mapping[str, Any],
        *,
        share: Tensor | float = 1.0,
    ) -> Output:
        """Return logits, loss, and the entries of ``output``, the body's, that the output class
        has.

        ``share`` is this call's part of the labels by which the loss is divided.
        """
        auxiliary = output.get("auxiliary_loss")
        total = loss if loss is None or auxiliary is None else loss + share * auxiliary
        extra = {name: value for name, value in output.items() if name in self._output_fields}
        return self.output_class(loss=total, logits=logits, **extra)


class LanguageHead(Head[Output]):
    """A head whose last layer `lm_head` maps states to logits of tokens."""

    lm_head: nn.Linear

    def add_head(self, width: int, vocab_size: int) -> None:
        """Add the output layer; it has no bias."""
        self.loss_type = "ForCausalLM"
        self.lm_head = nn.Linear(width, vocab_size, bias=False)

    def logits_of(self, states: Tensor) -> Tensor:
        """Map states (batch, tokens, width) to logits (batch, tokens, vocab_size)."""
        return self.lm_head(states)

    def answer(
        self, output: Any, inputs: _inputs.TokenLabelInputs, targets: Tensor | None
    ) -> Output:
        """Return the wanted logits and, with targets, their mean cross-entropy in nats.

        Args:
            output: of the body.
            inputs: arguments of the call.
            targets: int (batch, tokens), aligned with the logits; -100 is not counted.
        """
        keep, count = inputs.logits_to_keep, inputs.num_items_in_batch
        positions = slice(-keep, None) if isinstance(keep, int) else keep  # 0 is all
        logits = self.logits_of(cast(Tensor, output.last_hidden_state)[:, positions])
        if targets is None:
            return self.result(logits, None, output)
        targets = targets[:, positions]
        check_targets(targets, logits)
        model = cast(Any, self)
        loss = model.loss_function(
            logits=logits,
            labels=targets,
            shift_labels=targets.contiguous(),
            vocab_size=model.config.vocab_size,
            num_items_in_batch=count,
        )
        # An auxiliary loss is weighted by this call's part of a step's labels.
        share = 1.0 if count is None else targets.ne(IGNORED_LABEL).sum() / count
        return self.result(logits, loss, output, share=share)


class CausalLM(LanguageHead[Output], Generic[Output, CacheKind]):
    """`logits_i = W x_i` for the states x of a causal body `model` of any family."""

    def __init__(self, config: Any) -> None:
        if config.is_causal is False:
            raise ConfigError(f"{type(self).__name__}: received is_causal=False; leave it None")
        config = copy.copy(config)
        config.is_causal = True
        config.use_cache = config.use_cache and config.num_hidden_layers > 0
        super().__init__(config)
        self.model = self.body(config)  # pyright: ignore[reportCallIssue] (a class)
        self.add_output(config)
        self.post_init()  # pyright: ignore[reportCallIssue]

    def add_output(self, config: Any) -> None:
        """Add the layers after the body."""
        self.add_head(config.hidden_size, config.vocab_size)

    @takes(_inputs.CausalLMInputs)
    def forward(self, inputs: _inputs.CausalLMInputs) -> Output:
        """Return next-token logits of every position and, with labels, their mean cross-entropy in
        nats.

        Other arguments, and errors, are those of the body's `forward` (`WellposedModel`,
        `TransJectModel`).

        Keyword Args:
            labels (Tensor): int (batch, tokens), usually the input ids; shifted inside; -100 is not
                counted.
            logits_to_keep (int | Tensor): only the last so many positions, or the positions in a
                tensor; 0 = all.
            num_items_in_batch (int | Tensor): divide the summed loss by this, the labels in all
                micro-batches of a step. An auxiliary loss is then weighted by the part of them in
                this call.

        Returns:
            `loss` (with labels, auxiliary loss included), `logits` (batch, kept tokens,
            vocab_size), and the body's outputs that the output class has.
        """
        return self.answer(self.run_body(**inputs.of_body()), inputs, following(inputs.labels))


class Classifier(Head[Output]):
    """A head that pools a sequence's real tokens and maps the vector to `num_labels` logits."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = self.body(config)  # pyright: ignore[reportCallIssue] (a class)
        self.loss_type = "ForSequenceClassification"
        self.num_labels = config.num_labels or 2
        self.pool = POOLINGS.get(config.pooling)
        self.add_classifier(config)
        self.post_init()  # pyright: ignore[reportCallIssue]

    def add_classifier(self, config: Any) -> None:
        """Add the map from pooled vectors to logits."""
        raise NotImplementedError

    def pooled(self, input_ids: Any, attention_mask: Any, **inputs: Any) -> tuple[Tensor, Any]:
        """Return one vector per sequence, (batch, width), and the output of the body."""
        inputs |= {"input_ids": input_ids, "attention_mask": attention_mask}
        output = self.run_body(use_cache=False, **inputs)
        hidden = cast(Tensor, output.last_hidden_state)
        return self.pool(hidden, padding_of(attention_mask, *hidden.shape[:2])), output

    def label_loss(self, logits: Tensor, labels: Tensor | None) -> Tensor | None:
        """Return the loss that transformers chooses for the labels; None without labels."""
        if labels is None:
            return None
        check_labels(labels, logits)
        model = cast(Any, self)
        labels = labels.to(logits.dtype) if self.num_labels == 1 else labels
        return model.loss_function(labels=labels, pooled_logits=logits, config=model.config)


class SequenceClassifier(Classifier[Output]):
    """`logits = W pool_i(x_i) + b` for the states x of a body `model` of any family."""

    classifier: nn.Linear

    def add_classifier(self, config: Any) -> None:
        """Add the linear map to logits."""
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)

    @takes(_inputs.ClassifierInputs)
    def forward(self, inputs: _inputs.ClassifierInputs) -> Output:
        """Return the logits of every sequence and, with labels, the loss.

        Other arguments, and errors, are those of the body's `forward` (`WellposedModel`,
        `TransJectModel`).

        Keyword Args:
            labels (Tensor): int (batch,) for one label, where -100 is not counted; float (batch,
                num_labels) for several; float (batch,) for a number. `config.problem_type` decides
                if the dtype does not.

        Returns:
            `loss` (mean cross-entropy, binary cross-entropy or squared error, auxiliary loss
            included), `logits` (batch, num_labels), and the body's outputs that the output class
            has.
        """
        pooled, output = self.pooled(**inputs.of_body())
        logits = self.logits_of(pooled)
        return self.result(logits, self.label_loss(logits, inputs.labels), output)

    def logits_of(self, pooled: Tensor) -> Tensor:
        """Map vectors (batch, width) to logits (batch, num_labels)."""
        return self.classifier(pooled)


class SequencePairClassifier(Classifier[Output]):
    """`logits = head(pool(f(x)), pool(f(y)))` for a body `model` f of any family."""

    classifier: PairHead

    @takes(_inputs.PairInputs)
    def forward(self, inputs: _inputs.PairInputs) -> Output:
        """Return the logits of every pair and, with labels, the loss.

        Keyword Args:
            input_ids (Tensor): int (batch, tokens) of the first sequences.
            attention_mask (Tensor): 1 = real token of these; None = all real.
            input_ids_pair (Tensor): int (batch, tokens) of the second sequences.
            attention_mask_pair (Tensor): 1 = real token of these; None = all real.
            inputs_embeds (Tensor): (batch, tokens, D) in place of `input_ids`.
            inputs_embeds_pair (Tensor): (batch, tokens, D) in place of `input_ids_pair`.
            labels (Tensor): as in `WellposedForSequenceClassification.forward`.

        Returns:
            `loss` (with labels, mean auxiliary loss included), `logits` (batch, num_labels), and
            `auxiliary_loss` if the output class has it.

        Raises:
            ShapeError: sides of different batch size, and errors of the body's `forward`.
        """
        vector, output = self.pooled(
            inputs.input_ids,
            inputs.attention_mask,
            inputs_embeds=inputs.inputs_embeds,
            output_hidden_states=False,
        )
        other_vector, other = self.pooled(
            inputs.input_ids_pair,
            inputs.attention_mask_pair,
            inputs_embeds=inputs.inputs_embeds_pair,
            output_hidden_states=False,
        )
        if len(vector) != len(other_vector):
            raise ShapeError(
                f"input_ids_pair: received {len(other_vector)} sequences for {len(vector)} in"
                " input_ids; expected one for each"
            )
        logits = self.classifier(vector, other_vector)
        losses = [output.get("auxiliary_loss"), other.get("auxiliary_loss")]
        auxiliary = {} if None in losses else {"auxiliary_loss": sum(losses) / 2}
        return self.result(logits, self.label_loss(logits, inputs.labels), auxiliary)


def check_targets(targets: Tensor, logits: Tensor) -> None:
    """Raise `ShapeError` unless labels are one token for each of the logits."""
    if targets.shape != logits.shape[:2] or targets.dtype not in INTEGERS:
        raise ShapeError(
            f"labels: received {targets.dtype} of shape {tuple(targets.shape)}; expected torch.int64"
            f" or torch.int32, one for each token: {tuple(logits.shape[:2])}"
        )
    counted = targets.masked_fill(targets == IGNORED_LABEL, 0)
    if (place := first_outside(counted, logits.shape[2])) is not None:
        raise ShapeError(
            f"labels: received {int(targets[place])}; expected tokens in [0,"
            f" {logits.shape[2]}), or {IGNORED_LABEL} for none"
        )


def following(labels: Tensor | None) -> Tensor | None:
    """Return the labels shifted by one token, so that the logits need not be copied."""
    if labels is None:
        return None
    if labels.dim() != 2:
        raise ShapeError(f"labels: received shape {tuple(labels.shape)}; expected (batch, tokens)")
    return torch.cat((labels[:, 1:], labels.new_full((labels.shape[0], 1), IGNORED_LABEL)), dim=1)


def check_labels(labels: Tensor, logits: Tensor) -> None:
    """Raise `ShapeError` for labels that do not fit the logits or, on the CPU, name no class."""
    batch, classes = logits.shape
    if labels.numel() not in (batch, batch * classes) or labels.dim() == 0:
        raise ShapeError(
            f"labels: received shape {tuple(labels.shape)}; expected ({batch},), or ({batch},"
            f" {classes}) for several labels of one sequence"
        )
    if classes == 1 or labels.numel() != batch or labels.is_floating_point():
        return
    flat = labels.reshape(-1)
    place = first_outside(flat.masked_fill(flat == IGNORED_LABEL, 0), classes)
    if place is not None:
        raise ShapeError(
            f"labels: received class {int(flat[place])} at row {place[0]}; expected classes in [0,"
            f" {classes}), or {IGNORED_LABEL} for none; set num_labels to the number of classes"
        )


UNIT_DIVISOR = math.sqrt(10.0)


class PairHead(nn.Module):
    """`logits = W_2 s(W_1 [a, b, a*b, a-b] / c + b_1) + b_2` of two pooled vectors a, b.

    Exact: s is ReLU and c = 1, the head of document retrieval in the Long Range Arena (Tay
    et al. 2021) with one hidden layer. With `unit_lipschitz`, a and b are projected onto the unit
    ball, s is MaxMin and c = sqrt(10). Then
    `|change of the hidden layer| <= |W_1|_2 max(|da|, |db|)`: certified, both texts moving at once
    (theory note B12). Otherwise a bound needs bounded a and b.

    Args:
        width: entries of a and of b.
        hidden: entries of the hidden layer; with `unit_lipschitz` even, else a `ConfigError`.
        num_labels: number of logits.
        dropout: on the features, in [0, 1).
        unit_lipschitz: see above.

    Cost: 4 width x hidden multiplications a pair. It is not symmetric in a and b.

    >>> PairHead(8, 16, 2)(torch.zeros(3, 8), torch.zeros(3, 8)).shape
    torch.Size([3, 2])
    """

    reads_two_vectors = True

    def __init__(
        self,
        width: int,
        hidden: int,
        num_labels: int,
        *,
        dropout: float = 0.0,
        unit_lipschitz: bool = False,
    ) -> None:
        super().__init__()
        if unit_lipschitz and hidden % 2:
            raise ConfigError(f"PairHead: hidden={hidden}: expected an even number for MaxMin")
        self.in_features = width
        self.divisor = UNIT_DIVISOR if unit_lipschitz else 1.0
        self.projection = BallProjection(width) if unit_lipschitz else nn.Identity()
        self.dropout = nn.Dropout(dropout)
        self.hidden = nn.Linear(4 * width, hidden)
        self.activation = MaxMin() if unit_lipschitz else nn.ReLU()
        self.output = nn.Linear(hidden, num_labels)

    def features(self, first: Tensor, second: Tensor) -> Tensor:
        """Map two batches of vectors (batch, width) to (batch, 4 width)."""
        first, second = self.projection(first), self.projection(second)
        return torch.cat((first, second, first * second, first - second), dim=-1) / self.divisor

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Map two batches of vectors (batch, width) to logits (batch, num_labels)."""
        return self.output(self.activation(self.hidden(self.dropout(self.features(first, second)))))
