"""What heads share: the output layer of language models, losses, and the call of a body."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from wellposed.models._config import WellposedConfig
from wellposed.models._wellposed import WellposedPreTrainedModel

IGNORED_LABEL = -100


class LanguageHead(WellposedPreTrainedModel):
    """A model whose last layer `lm_head` maps states to logits of tokens."""

    lm_head: nn.Linear

    def add_head(self, config: WellposedConfig) -> None:
        """Make the output layer; it has no bias."""
        self.loss_type = "ForCausalLM"
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def get_output_embeddings(self) -> nn.Module:
        """Return the output layer."""
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the output layer."""
        self.lm_head = cast(nn.Linear, new_embeddings)

    def token_loss(self, logits: Tensor, targets: Tensor, num_items_in_batch: Tensor | int | None = None) -> Tensor:
        """Return the mean cross-entropy in nats of `targets`, which stand at their logits; -100 is not counted."""
        return token_loss(self, logits, targets, num_items_in_batch)


def token_loss(
    model: PreTrainedModel, logits: Tensor, targets: Tensor, num_items_in_batch: Tensor | int | None = None
) -> Tensor:
    """Return the model's mean cross-entropy in nats of `targets`, which stand at their logits; -100 is not counted."""
    return model.loss_function(
        logits=logits,
        labels=targets,
        shift_labels=targets.contiguous(),
        vocab_size=model.config.vocab_size,
        num_items_in_batch=num_items_in_batch,
    )


def classification_loss(model: PreTrainedModel, logits: Tensor, labels: Tensor | None) -> Tensor | None:
    """Return cross-entropy, binary cross-entropy or squared error, as transformers chooses; None without labels."""
    if labels is None:
        return None
    labels = labels.to(logits.dtype) if model.num_labels == 1 else labels  # pyright: ignore[reportAttributeAccessIssue]
    return model.loss_function(labels=labels, pooled_logits=logits, config=model.config)


def body_output(model: nn.Module, **given: Any) -> Any:
    """Call a body, which returns a tuple where the configuration asks for tuples, for its output by name."""
    return model(**given, return_dict=True)


def kept_positions(logits_to_keep: int | Tensor) -> slice | Tensor:
    """Return the index of the positions whose logits are wanted; 0 is all.

    >>> kept_positions(2)
    slice(-2, None, None)
    """
    return slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep


def following(labels: Tensor) -> Tensor:
    """Shift the labels, not the logits: the logits are then not copied."""
    return torch.cat((labels[:, 1:], labels.new_full((labels.shape[0], 1), IGNORED_LABEL)), dim=1)
