"""The loss a Hugging Face model would compute itself, from its outputs and labels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from wellposed.errors import ConfigError

_TOKEN_LOSSES = ("ForCausalLM", "ForMaskedLM")
_LABEL_LOSSES = ("ForSequenceClassification", "ForImageClassification", "ForVideoClassification")
KNOWN = (*_TOKEN_LOSSES, *_LABEL_LOSSES, "ForTokenClassification")


def own_loss(model: nn.Module) -> Callable[[Any, Tensor], Tensor]:
    """Return ``(outputs, labels) -> mean loss``, the one the model computes where it is given
    labels.

    Raises:
        ConfigError: the model is no Hugging Face model, makes decoder inputs of its labels, or has
        another loss.
    """
    config: Any = getattr(model, "config", None)
    kind = _loss_type(model)
    if kind not in KNOWN or getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"penalized_loss: the loss of {type(model).__name__} (loss type {kind!r}) cannot be"
            " computed from logits and labels alone; give task_loss=, a function (outputs, labels)"
            f" -> mean loss. Known: {', '.join(KNOWN)}"
        )
    from transformers.loss.loss_utils import LOSS_MAPPING

    function: Any = getattr(model, "_loss_function", None) or LOSS_MAPPING[kind]

    def compute(outputs: Any, labels: Tensor) -> Tensor:
        targets = labels[..., 1:] if kind == "ForCausalLM" else labels
        # A batch without one target has loss 0, as in the Trainer, not 0 / 0.
        count = targets.ne(-100).sum().clamp(min=1)
        if kind in _TOKEN_LOSSES:
            return function(
                outputs.logits, labels, vocab_size=config.vocab_size, num_items_in_batch=count
            )
        if kind in _LABEL_LOSSES:
            return function(labels, outputs.logits, config, num_items_in_batch=count)
        return function(outputs.logits, labels, config, num_items_in_batch=count)

    return compute


def counted_labels(model: nn.Module, labels: Tensor) -> Tensor:
    """Return the labels the Trainer counts: without the first of each row where ``loss_type`` says
    they are shifted."""
    return labels[..., 1:] if getattr(model, "loss_type", None) == "ForCausalLM" else labels


def _loss_type(model: nn.Module) -> str | None:
    """Return the model's ``loss_type``; for GPT-2 and others named ...LMHeadModel the library
    leaves it None."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = getattr(model, "loss_type", None)
    causal = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return "ForCausalLM" if kind is None and causal else kind
