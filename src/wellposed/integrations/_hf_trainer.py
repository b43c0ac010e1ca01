"""Hugging Face Trainer: a callback that logs conditioning."""

from __future__ import annotations

from typing import Any

from wellposed.errors import missing_extra
from wellposed.integrations._condition import ConditionMetrics

try:
    from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
except ImportError as error:
    raise missing_extra("transformers", "hf", "Hugging Face Trainer adapters") from error


class ConditionCallback(ConditionMetrics, TrainerCallback):
    """Add a summary, see `ConditionMetrics`, to everything the Trainer logs, evaluation metrics
    included.

    ``Trainer(callbacks=[callback])`` puts them into ``state.log_history`` and the progress lines;
    `attach` puts the callback before trackers (TensorBoard, W&B), which then get them too. A
    resumed run sets the penalty's step. ``penalty``, ``every`` (counts logged steps), ``spectra``
    and ``vitals`` are those of `ConditionMetrics`; vital signs go into rows of the
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
