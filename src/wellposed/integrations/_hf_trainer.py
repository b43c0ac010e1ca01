"""Hugging Face Trainer: a callback that logs conditioning, and the penalty as
``compute_loss_func``."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import ConfigError, missing_extra
from wellposed.integrations._condition import ConditionMetrics
from wellposed.penalize import OrthogonalityPenalty, large_penalty

try:
    from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
except ImportError as error:
    raise missing_extra("transformers", "hf", "Hugging Face Trainer adapters") from error

logger = logging.getLogger(__name__)

_CLASSIFIED = ("Token", "Sequence", "Image", "Video")
KNOWN = ("ForCausalLM", "ForMaskedLM", *(f"For{kind}Classification" for kind in _CLASSIFIED))


def penalized_loss(
    model: nn.Module,
    penalty: OrthogonalityPenalty,
    *,
    task_loss: Callable[[Any, Tensor], Tensor] | None = None,
) -> Callable[..., Tensor]:
    """Return ``loss = share * (task loss + penalty)`` as a ``compute_loss_func`` of
    `transformers.Trainer`: the old way, which goes in 0.5.

    `OrthogonalityPenalty.attach` adds the penalty to the loss that the Trainer computes. This
    function computes the task's loss anew, from logits and labels, and leaves out what it does not
    know: auxiliary losses of routers, label smoothing, a model's own count of labels.

    Status: exact for the losses in `KNOWN`. ``share`` is this micro-batch's part of the step's
    labels, so accumulated micro-batches and processes add up to one task mean plus one penalty.
    Without gradient (evaluation) the penalty is left out.

    Args:
        model, penalty: the model given to the Trainer, and an `wellposed.OrthogonalityPenalty` on
            it.
        task_loss: ``(outputs, labels) -> mean loss``, if the model's own is not wanted or not known.

    Raises:
        ConfigError: no ``task_loss`` and a model whose own loss needs more than its logits and
            labels; from the result, batches without labels, or another model that is trained.
    When not to use: with ``model_init``, or under `torch.nn.DataParallel`.
    """
    warnings.warn(
        "penalized_loss computes the task's loss anew and leaves out what it does not know (auxiliary"
        " losses, label smoothing, a count of labels, the model of model_init); write"
        " penalty.attach(trainer) in its place. It goes in 0.5",
        FutureWarning,
        stacklevel=2,
    )
    task_loss = task_loss or _own_loss(model)
    is_first = True

    def compute(
        outputs: Any, labels: Tensor | None, num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        if labels is None:
            problem = "penalized_loss: the batch holds no 'labels'"
            raise ConfigError(f"{problem}; give them, or drop compute_loss_func")
        nonlocal is_first
        loss = task_loss(outputs, labels)
        if torch.is_grad_enabled():
            added = penalty()
            if is_first and (large := large_penalty(added.item(), loss.item())):
                logger.warning("%s", large)
            is_first = False
            loss = loss + added
        if num_items_in_batch is None:
            return loss
        # The Trainer counts without the first of each row where labels are shifted.
        shifted = getattr(model, "loss_type", None) == "ForCausalLM"
        count = (labels[..., 1:] if shifted else labels).ne(-100).sum()
        share = count / torch.as_tensor(num_items_in_batch, device=count.device)
        return loss * share.to(loss.device)

    return compute


class ConditionCallback(ConditionMetrics, TrainerCallback):
    """Add a summary, see `ConditionMetrics`, to everything the Trainer logs, evaluation metrics
    included.

    ``Trainer(callbacks=[callback])`` puts them into ``state.log_history`` and the progress lines;
    `attach` puts the callback before trackers (TensorBoard, W&B), which then get them too. A
    resumed run sets the penalty's step. ``penalty``, ``every`` (counts logged steps), ``spectra``,
    ``details`` and ``vitals`` are those of `ConditionMetrics`; vital signs go into rows of the
    training loss, and the hooks go at the end of training.

    When not to use: ``vitals`` where weights are cut over processes (FSDP, DeepSpeed).
    """

    def attach(self, trainer: Trainer) -> None:
        """Place this callback first among those of ``trainer``."""
        trainer.callback_handler.callbacks.insert(0, self)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, *_: Any, **now: Any
    ) -> None:
        """Set the penalty's step to that of a resumed run, and watch the vital signs."""
        self.watch(now["model"], now["optimizer"], state.global_step)
        if self.penalty is not None:
            self.penalty.step = state.global_step * args.gradient_accumulation_steps

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Count the step for the vital signs."""
        self.count_step()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Take the hooks off."""
        self.unwatch()

    def on_log(self, args: TrainingArguments, state: TrainerState, *_: Any, **now: Any) -> None:  # noqa: ARG002
        """Add the metrics to what is being logged, to training losses the vital signs, too."""
        vitals = self.vital_signs() if {"loss", "train_loss"} & now["logs"].keys() else {}
        if state.is_world_process_zero:
            for record in (now["logs"], state.log_history[-1]):
                record.update({**self(now["model"], step=state.global_step), **vitals})


def _own_loss(model: nn.Module) -> Callable[[Any, Tensor], Tensor]:
    """Return ``(outputs, labels) -> mean loss``, the one the model computes if it is given labels.

    Raises:
        ConfigError: the model is no Hugging Face model, makes decoder inputs of its labels, or has
            another loss.
    """
    config: Any = getattr(model, "config", None)
    # Of GPT-2 and others named ...LMHeadModel the library leaves it None, and takes the causal loss.
    causal = type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    kind = getattr(model, "loss_type", None) or ("ForCausalLM" if causal else None)
    if kind not in KNOWN or getattr(config, "is_encoder_decoder", False):
        raise ConfigError(
            f"penalized_loss: the loss of {type(model).__name__} (loss type {kind!r}) cannot be"
            " computed from logits and labels alone; write penalty.attach(trainer), or give task_loss=,"
            f" a function (outputs, labels) -> mean loss. Known: {', '.join(KNOWN)}"
        )
    function: Any = model.loss_function

    def compute(outputs: Any, labels: Tensor) -> Tensor:
        # A batch without one target has loss 0, as in the Trainer, not 0 / 0.
        targets = labels[..., 1:] if kind == "ForCausalLM" else labels
        return function(
            logits=outputs.logits,
            pooled_logits=outputs.logits,
            labels=labels,
            config=config,
            vocab_size=getattr(config, "vocab_size", None),
            num_items_in_batch=targets.ne(-100).sum().clamp(min=1),
        )

    return compute
