"""What heads share: the output layer of language models, and the call of a body."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

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
        return self.loss_function(
            logits=logits,
            labels=targets,
            shift_labels=targets.contiguous(),
            vocab_size=self.config.vocab_size,
            num_items_in_batch=num_items_in_batch,
        )


def body_output(model: nn.Module, **given: Any) -> BaseModelOutputWithPast:
    """Call a body, which returns a tuple where the configuration asks for tuples, for its output by name."""
    return cast(BaseModelOutputWithPast, model(**given, return_dict=True))


def kept_positions(logits_to_keep: int | Tensor) -> slice | Tensor:
    """Return the index of the positions whose logits are wanted; 0 is all.

    >>> kept_positions(2)
    slice(-2, None, None)
    """
    return slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
