"""What the heads of all families share: the call of a body, losses, what is returned, and the
output layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import ModelOutput
from transformers.utils.generic import can_return_tuple

from wellposed.call_checks import known_keywords
from wellposed.errors import ConfigError, ShapeError
from wellposed.nn.checks import INTEGERS, on_host

IGNORED_LABEL = -100

Output = TypeVar("Output", bound=ModelOutput)
CacheKind = TypeVar("CacheKind")
ConfigKind = TypeVar("ConfigKind", bound=PreTrainedConfig)


class Head(nn.Module, Generic[Output]):
    """What stands behind a body `model`; it comes before the family's `PreTrainedModel` among the
    bases of a class.

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
        if "output_class" in vars(cls):  # read here, as torch.compile cannot
            cls._output_fields = frozenset(
                field.name for field in fields(cast(Any, cls.output_class))
            )

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

    def get_output_embeddings(self) -> nn.Module:
        """Return the output layer."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the output layer."""
        self.lm_head = cast(nn.Linear, new_embeddings)

    def logits_of(self, states: Tensor) -> Tensor:
        """Map states (batch, tokens, width) to logits (batch, tokens, vocab_size)."""
        return self.lm_head(states)

    def token_loss(
        self, logits: Tensor, targets: Tensor, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Return the mean cross-entropy in nats of `targets`, which stand at their logits; -100 is
        not counted."""
        model = cast(Any, self)
        check_targets(targets, logits)
        return model.loss_function(
            logits=logits,
            labels=targets,
            shift_labels=targets.contiguous(),
            vocab_size=model.config.vocab_size,
            num_items_in_batch=num_items_in_batch,
        )


class CausalLM(LanguageHead[Output], Generic[Output, CacheKind]):
    """`logits_i = W x_i` for the states x of a causal body `model`, of whatever family."""

    def __init__(self, config: Any) -> None:
        config = as_causal(config, type(self).__name__)
        super().__init__(config)
        self.model = self.body(config)  # pyright: ignore[reportCallIssue] (a class)
        self.add_output(config)
        self.post_init()  # pyright: ignore[reportCallIssue]

    def add_output(self, config: Any) -> None:
        """Make what stands behind the body."""
        self.add_head(config.hidden_size, config.vocab_size)

    @can_return_tuple
    @known_keywords
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        past_key_values: CacheKind | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Output:
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
        output = self.run_body(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
        )
        kept = kept_positions(logits_to_keep)
        logits = self.logits_of(cast(Tensor, output.last_hidden_state)[:, kept])
        if labels is None:
            return self.result(logits, None, output)
        targets = following(labels)[:, kept]
        loss = self.token_loss(logits, targets, num_items_in_batch)
        return self.result(logits, loss, output, share=share_of(targets, num_items_in_batch))


def as_causal(config: ConfigKind, where: str) -> ConfigKind:
    """Return a copy that says `is_causal=True`; raise `ConfigError` where it says otherwise."""
    if getattr(config, "is_causal", None) is False:
        raise ConfigError(
            f"{where}: received is_causal=False; a language model is causal, leave it None"
        )
    config = copy.copy(config)
    config.is_causal = True
    config.use_cache = config.use_cache and config.num_hidden_layers > 0
    return config


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
    if on_host(targets):
        beyond = (targets >= logits.shape[2]) | ((targets < 0) & (targets != IGNORED_LABEL))
        if bool(beyond.any()):
            raise ShapeError(
                f"labels: received {int(targets[beyond][0])}; expected tokens in [0,"
                f" {logits.shape[2]}), or {IGNORED_LABEL} for none"
            )


def kept_positions(logits_to_keep: int | Tensor) -> slice | Tensor:
    """Return the index of the positions whose logits are wanted; 0 is all.

    >>> kept_positions(2)
    slice(-2, None, None)
    """
    return slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep


def following(labels: Tensor) -> Tensor:
    """Shift the labels, not the logits: the logits are then not copied."""
    if labels.dim() != 2:
        raise ShapeError(f"labels: received shape {tuple(labels.shape)}; expected (batch, tokens)")
    return torch.cat((labels[:, 1:], labels.new_full((labels.shape[0], 1), IGNORED_LABEL)), dim=1)


def share_of(targets: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor | float:
    """Return which part of a step's labels is in `targets`.

    >>> float(share_of(torch.tensor([[3, -100], [1, 2]]), 12))
    0.25
    """
    return (
        1.0 if num_items_in_batch is None else targets.ne(IGNORED_LABEL).sum() / num_items_in_batch
    )
