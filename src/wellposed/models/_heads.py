"""Heads on a body of any family: language models, and classifiers of tokens, sequences and pairs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import modeling_outputs as outputs

from wellposed.errors import ConfigError, ShapeError
from wellposed.models import _inputs
from wellposed.models._init import POOLINGS
from wellposed.models._inputs import first_outside, padding_of, takes
from wellposed.nn import INTEGERS, BallProjection, LearnedScale, MaxMin

IGNORED_LABEL = -100


class Head(nn.Module):
    """Base of every head: a body `model`, the layers after it, logits and losses.

    A model's class has two bases: its family's `Head` and `PreTrainedModel`, which builds the body,
    and one of the heads below. If a body returns an `auxiliary_loss`, it is added to the loss.
    """

    output_class: Callable[..., outputs.ModelOutput]
    """What `forward` returns: loss, logits, and fields of the body's output with the same names."""
    loss_name: ClassVar[str] = "ForCausalLM"
    """The loss in transformers; this one is the cross-entropy of labels that are not shifted."""
    model: Any
    classifier: Any
    _output_fields: frozenset[str]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        made = getattr(cls, "output_class", None)
        if made is not None:  # read here, as torch.compile cannot
            cls._output_fields = frozenset(cast(Any, made).__dataclass_fields__)

    def __init__(self, config: Any) -> None:
        config = self.usable_config(config)
        super().__init__(config)
        self.loss_type = self.loss_name
        self.num_labels = config.num_labels or 2
        self.model = self.build_body(config)
        self.add_layers(config)
        self.post_init()  # pyright: ignore[reportCallIssue]

    def usable_config(self, config: Any) -> Any:
        """Return the configuration, or a copy that the head needs; else raise `ConfigError`."""
        return config

    def build_body(self, config: Any) -> nn.Module:
        """Return the family's body."""
        raise NotImplementedError

    def add_layers(self, config: Any) -> None:
        """Add the layers after the body: a linear map to logits."""
        self.classifier = nn.Linear(config.hidden_size, self.num_labels)

    def logits_of(self, states: Tensor) -> Tensor:
        """Map states (..., width) to logits (..., num_labels)."""
        return self.classifier(states)

    def run_body(self, **inputs: Any) -> Any:
        """Return the body's output by name, even if the configuration sets `return_dict=False`."""
        return self.model(**inputs, return_dict=True)

    def result(
        self,
        logits: Tensor,
        loss: Tensor | None,
        output: Mapping[str, Any],
        *,
        share: Tensor | float = 1.0,
    ) -> outputs.ModelOutput:
        """Return logits, loss, and the entries of ``output``, the body's, that the output class
        has.

        ``share`` is this call's part of the labels by which the loss is divided.
        """
        auxiliary = output.get("auxiliary_loss")
        total = loss if loss is None or auxiliary is None else loss + share * auxiliary
        extra = {name: value for name, value in output.items() if name in self._output_fields}
        return self.output_class(loss=total, logits=logits, **extra)


class TokenHead(Head):
    """A head with a label for each token."""

    chain: ClassVar[str] = "model classifier"
    """Modules from the inputs to the logits, in the order in which they are called."""
    shift: ClassVar[int] = 0
    """How many tokens after a position its label is."""

    def answer(self, inputs: Any, body: Mapping[str, Any] | None = None) -> outputs.ModelOutput:
        """Run the body; return the wanted logits and, with labels, their mean cross-entropy in
        nats.

        Args:
            inputs: arguments of the call.
            body: arguments of the body, if they are not those of the call.
        """
        output = self.run_body(**(body or inputs.of_body()))
        targets = shifted(inputs.labels, self.shift)
        keep = inputs.logits_to_keep
        count = inputs.num_items_in_batch
        positions = slice(-keep, None) if isinstance(keep, int) else keep  # 0 is all
        logits = self.logits_of(cast(Tensor, output.last_hidden_state)[:, positions])
        if targets is None:
            return self.result(logits, None, output)

        targets = targets[:, positions]
        check_targets(targets, logits)
        loss = cast(Any, self).loss_function(
            logits=logits,
            labels=targets,
            shift_labels=targets.contiguous(),
            vocab_size=logits.shape[-1],
            num_items_in_batch=count,
        )
        # An auxiliary loss is weighted by this call's part of a step's labels.
        share = 1.0 if count is None else targets.ne(IGNORED_LABEL).sum() / count

        return self.result(logits, loss, output, share=share)


class TokenClassifier(TokenHead):
    """`logits_i = W x_i + b` for the states x of a body `model` of any family."""

    output_class = outputs.TokenClassifierOutput

    @takes(_inputs.TokenInputs)
    def forward(self, inputs: _inputs.TokenInputs) -> outputs.ModelOutput:
        """Return the logits of every token and, with labels, their mean cross-entropy in nats.

        Other arguments, returns and errors are those of `WellposedForMaskedLM.forward`.

        Keyword Args:
            labels (Tensor): int (batch, tokens), classes below `num_labels`; -100 is not counted.
        """
        return self.answer(inputs)


class LanguageHead(TokenHead):
    """A head whose last layer `lm_head` maps states to logits of tokens, times gains if chosen."""

    chain = "model lm_head"
    lm_head: nn.Linear
    _tied_weights_keys: Any = {"lm_head.weight": "model.embeddings.token.weight"}  # noqa: RUF012 (Hugging Face's rule)

    def add_layers(self, config: Any) -> None:
        """Add the output layer; it has no bias."""
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.logit_gain:
            unit = 1.0 / math.sqrt(config.hidden_size)
            self.logit_gain = LearnedScale(config.vocab_size, unit=unit)

    @property
    def gain(self) -> LearnedScale | None:
        """The learnt factors of the logits, if there are any."""
        return cast("LearnedScale | None", self._modules.get("logit_gain"))

    def logits_of(self, states: Tensor) -> Tensor:
        """Map states (batch, tokens, width) to logits (batch, tokens, vocab_size)."""
        logits = self.lm_head(states)
        return logits if self.gain is None else self.gain(logits)

    def resize_token_embeddings(self, *args: Any, **options: Any) -> Any:
        """Change the number of tokens, and of gains; arguments as in transformers."""
        table = cast(Any, super()).resize_token_embeddings(*args, **options)
        if self.gain is not None:
            self.gain.resize_(self.lm_head.out_features)
        return table


class MaskedLM(LanguageHead):
    """`logits_i = W x_i` for the states x of a body `model` that reads both sides of a token."""

    output_class = outputs.MaskedLMOutput

    def usable_config(self, config: Any) -> Any:
        """Return the configuration unless it is causal."""
        if config.is_causal:
            raise ConfigError(
                f"{type(self).__name__}: received is_causal=True; expected None, as a masked token"
                " is read from both sides; pass is_causal=None, or use AutoModelForCausalLM"
            )
        return config

    @takes(_inputs.TokenInputs)
    def forward(self, inputs: _inputs.TokenInputs) -> outputs.ModelOutput:
        """Return the logits of every position and, with labels, their mean cross-entropy in nats.

        Other arguments, and errors, are those of the body's `forward` (`WellposedModel`,
        `TransJectModel`).

        Keyword Args:
            labels (Tensor): int (batch, tokens), the tokens before they were masked. Labels of -100
                are not counted.
            logits_to_keep (int | Tensor): as in `WellposedForCausalLM.forward`.
            num_items_in_batch (int | Tensor): as in `WellposedForCausalLM.forward`.

        Returns:
            As `WellposedForCausalLM.forward`.
        """
        return self.answer(inputs)


class CausalLM(LanguageHead):
    """`logits_i = W x_i` for the states x of a causal body `model` of any family."""

    output_class = outputs.CausalLMOutputWithPast
    shift = 1

    def usable_config(self, config: Any) -> Any:
        """Return a causal copy of the configuration."""
        if config.is_causal is False:
            raise ConfigError(f"{type(self).__name__}: received is_causal=False; leave it None")
        config = copy.copy(config)
        config.is_causal = True
        config.use_cache = config.use_cache and config.num_hidden_layers > 0
        return config

    @takes(_inputs.CausalLMInputs)
    def forward(self, inputs: _inputs.CausalLMInputs) -> outputs.ModelOutput:
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
        return self.answer(inputs)


class Classifier(Head):
    """A head that pools a sequence's real tokens and maps the vector to `num_labels` logits."""

    output_class = outputs.SequenceClassifierOutput
    loss_name = "ForSequenceClassification"

    def __init__(self, config: Any) -> None:
        # First, as drawing the weights may run the model (mimetic_).
        self.pool = POOLINGS.get(config.pooling)
        super().__init__(config)

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


class SequenceClassifier(Classifier):
    """`logits = W pool_i(x_i) + b` for the states x of a body `model` of any family."""

    @takes(_inputs.ClassifierInputs)
    def forward(self, inputs: _inputs.ClassifierInputs) -> outputs.ModelOutput:
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


class SequencePairClassifier(Classifier):
    """`logits = head(pool(f(x)), pool(f(y)))` for a body `model` f of any family."""

    @takes(_inputs.PairInputs)
    def forward(self, inputs: _inputs.PairInputs) -> outputs.ModelOutput:
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
    """Raise `ShapeError` unless there is one label for each of the logits."""
    if targets.shape != logits.shape[:2] or targets.dtype not in INTEGERS:
        raise ShapeError(
            f"labels: received {targets.dtype} of shape {tuple(targets.shape)}; expected torch.int64"
            f" or torch.int32, one for each token: {tuple(logits.shape[:2])}"
        )
    counted = targets.masked_fill(targets == IGNORED_LABEL, 0)
    index = first_outside(counted, logits.shape[2])
    if index is not None:
        raise ShapeError(
            f"labels: received {int(targets[index])}; expected those in"
            f" [0, {logits.shape[2]}), or {IGNORED_LABEL} for none"
        )


def shifted(labels: Tensor | None, shift: int) -> Tensor | None:
    """Return the labels shifted by some tokens, so that the logits need not be copied."""
    if labels is None:
        return None
    if labels.dim() != 2:
        raise ShapeError(f"labels: received shape {tuple(labels.shape)}; expected (batch, tokens)")
    end = labels.new_full((labels.shape[0], shift), IGNORED_LABEL)
    return torch.cat((labels[:, shift:], end), dim=1)


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
    index = first_outside(flat.masked_fill(flat == IGNORED_LABEL, 0), classes)
    if index is not None:
        raise ShapeError(
            f"labels: received class {int(flat[index])} at row {index[0]}; expected classes in [0,"
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
        first = self.projection(first)
        second = self.projection(second)
        return torch.cat((first, second, first * second, first - second), dim=-1) / self.divisor

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Map two batches of vectors (batch, width) to logits (batch, num_labels)."""
        return self.output(self.activation(self.hidden(self.dropout(self.features(first, second)))))
