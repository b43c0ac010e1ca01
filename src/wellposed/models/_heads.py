"""Heads on a body of whatever family: language models, and classifiers of one sequence or of
two."""

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
    """Base of every head: it calls a body `model`, and makes the output of logits and losses.

    It comes before the family's `PreTrainedModel` among the bases of a class.

    A body with a loss of its own returns it as `auxiliary_loss`, and it is added to the loss.
    """

    body: ClassVar[Callable[[Any], nn.Module]]
    """Makes the family's body of a configuration."""
    output_class: Callable[..., Output]
    """What `forward` returns: loss, logits, and what the body returns under the names of its other
    fields."""

    _output_fields: frozenset[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        made = getattr(cls, "output_class", None)
        if made is not None:  # read here, as torch.compile cannot
            cls._output_fields = frozenset(cast(Any, made).__dataclass_fields__)

    def run_body(self, **given: Any) -> Any:
        """Call the body, which returns a tuple where the configuration asks for tuples, for its
        output by name."""
        return cast(nn.Module, self.model)(**given, return_dict=True)

    def result(
        self,
        logits: Tensor,
        loss: Tensor | None,
        found: Mapping[str, Any],
        *,
        share: Tensor | float = 1.0,
    ) -> Output:
        """Return logits and loss, and what there is a field for in ``found``, the body's output.

        ``share`` is the part that this call's labels are of the batch that the loss is divided by.
        """
        auxiliary = found.get("auxiliary_loss")
        total = loss if loss is None or auxiliary is None else loss + share * auxiliary
        kept = {name: value for name, value in found.items() if name in self._output_fields}
        return self.output_class(loss=total, logits=logits, **kept)


class LanguageHead(Head[Output]):
    """A head whose last layer `lm_head` maps states to logits of tokens."""

    lm_head: nn.Linear

    def add_head(self, width: int, vocab_size: int) -> None:
        """Make the output layer; it has no bias."""
        self.loss_type = "ForCausalLM"
        self.lm_head = nn.Linear(width, vocab_size, bias=False)

    def logits_of(self, states: Tensor) -> Tensor:
        """Map states (batch, tokens, width) to logits (batch, tokens, vocab_size)."""
        return self.lm_head(states)

    def answer(
        self, output: Any, given: _inputs.TokenLabelInputs, targets: Tensor | None
    ) -> Output:
        """Return the logits that are wanted and, with targets, their mean cross-entropy in nats.

        Args:
            output: of the body.
            given: what the caller gave.
            targets: int (batch, tokens), which stand at their logits; -100 is not counted.
        """
        keep, count = given.logits_to_keep, given.num_items_in_batch
        kept = slice(-keep, None) if isinstance(keep, int) else keep  # 0 is all
        logits = self.logits_of(cast(Tensor, output.last_hidden_state)[:, kept])
        if targets is None:
            return self.result(logits, None, output)
        targets = targets[:, kept]
        check_targets(targets, logits)
        model = cast(Any, self)
        loss = model.loss_function(
            logits=logits,
            labels=targets,
            shift_labels=targets.contiguous(),
            vocab_size=model.config.vocab_size,
            num_items_in_batch=count,
        )
        # an auxiliary loss counts by the part of a step's labels that is here
        share = 1.0 if count is None else targets.ne(IGNORED_LABEL).sum() / count
        return self.result(logits, loss, output, share=share)


class CausalLM(LanguageHead[Output], Generic[Output, CacheKind]):
    """`logits_i = W x_i` for the states x of a causal body `model`, of whatever family."""

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
        """Make what stands behind the body."""
        self.add_head(config.hidden_size, config.vocab_size)

    @takes(_inputs.CausalLMInputs)
    def forward(self, given: _inputs.CausalLMInputs) -> Output:
        """Return the logits of the next token at every position and, with labels, their mean
        cross-entropy in nats.

        Args:
            input_ids: see `forward` of the body, `WellposedModel` or `TransJectModel`, as are the
                arguments not named here.
            labels: int (batch, tokens), usually the input ids; shifted inside; -100 is not counted.
            logits_to_keep: only the last so many positions, or the positions in a tensor; 0 = all.
            num_items_in_batch: divide the summed loss by this, the labels of all micro-batches of a
                step, in place of the number of labels here; an auxiliary loss then counts by the
                part of them that is here.

        Returns:
            `loss` where labels are given, plus the body's auxiliary loss where it has one; `logits`
            (batch, kept tokens, vocab_size); and of what the body returns all that the output has a
            field for.

        Raises:
            ShapeError: see the body's `forward`.
            ConfigError: see the body's `forward`.
        """
        return self.answer(self.run_body(**given.of_body()), given, following(given.labels))


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

    def pooled(self, input_ids: Any, attention_mask: Any, **given: Any) -> tuple[Tensor, Any]:
        """Return one vector per sequence, (batch, width), and the output of the body."""
        given |= {"input_ids": input_ids, "attention_mask": attention_mask}
        output = self.run_body(use_cache=False, **given)
        hidden = cast(Tensor, output.last_hidden_state)
        return self.pool(hidden, padding_of(attention_mask, *hidden.shape[:2])), output

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

    @takes(_inputs.ClassifierInputs)
    def forward(self, given: _inputs.ClassifierInputs) -> Output:
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
        pooled, output = self.pooled(**given.of_body())
        logits = self.logits_of(pooled)
        return self.result(logits, self.label_loss(logits, given.labels), output)

    def logits_of(self, pooled: Tensor) -> Tensor:
        """Map vectors (batch, width) to logits (batch, num_labels)."""
        return self.classifier(pooled)


class SequencePairClassifier(Classifier[Output]):
    """`logits = head(pool(f(x)), pool(f(y)))` for a body `model` f, of whatever family."""

    classifier: PairHead

    @takes(_inputs.PairInputs)
    def forward(self, given: _inputs.PairInputs) -> Output:
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
            given.input_ids,
            given.attention_mask,
            inputs_embeds=given.inputs_embeds,
            output_hidden_states=False,
        )
        other_vector, other = self.pooled(
            given.input_ids_pair,
            given.attention_mask_pair,
            inputs_embeds=given.inputs_embeds_pair,
            output_hidden_states=False,
        )
        if len(vector) != len(other_vector):
            raise ShapeError(
                f"input_ids_pair: received {len(other_vector)} sequences for {len(vector)} in"
                " input_ids; expected one for each"
            )
        logits = self.classifier(vector, other_vector)
        losses = [output.get("auxiliary_loss"), other.get("auxiliary_loss")]
        found = {} if None in losses else {"auxiliary_loss": sum(losses) / 2}
        return self.result(logits, self.label_loss(logits, given.labels), found)


def check_targets(targets: Tensor, logits: Tensor) -> None:
    """Raise `ShapeError` where labels are not one token for each of the logits.

    >>> check_targets(torch.tensor([[0, 7]]), torch.zeros(1, 2, 5))
    Traceback (most recent call last):
    ...
    wellposed.errors.ShapeError: labels: received 7; expected tokens in [0, 5), or -100 for none
    """
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

    Exact: s is ReLU and c = 1, the head of document retrieval in the Long Range Arena (Tay et al.
    2021) with one hidden layer. With `unit_lipschitz` a and b are projected onto the unit ball, s
    is MaxMin and c = sqrt(10), so that `|change of the hidden layer| <= |W_1|_2 max(|da|, |db|)`:
    certified, both texts moving at once (theory note B12). The head is not symmetric in its
    arguments. Without `unit_lipschitz` it has a bound where |a| and |b| have one.

    Args:
        width: entries of a and of b.
        hidden: entries of the hidden layer; even with `unit_lipschitz`.
        num_labels: number of logits.
        dropout: on the features, in [0, 1).
        unit_lipschitz: see above.

    Raises:
        ConfigError: an odd hidden layer with `unit_lipschitz`.

    Cost: 4 width x hidden multiplications a pair.

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
