"""Lightning: a callback that logs conditioning under the names of `ConditionMetrics`."""

from __future__ import annotations

from typing import Any

from wellposed.errors import missing_extra
from wellposed.integrations._condition import ConditionMetrics

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise missing_extra("lightning", "lightning", "Lightning adapters") from error


class LightningConditionCallback(ConditionMetrics, Callback):
    """Log the numbers of `ConditionMetrics` of the module at every ``trainer.log_every_n_steps``-th
    step.

    The penalty itself goes where the loss is: ``return loss + penalty()`` in ``training_step``, so
    that Lightning accumulates, scales and clips it like any loss. A resumed run sets the penalty's
    step.

    Args:
        penalty, every, spectra, details: as `ConditionMetrics`; ``every`` counts logged steps.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        """Set the penalty's step to that of a resumed run."""
        if self.penalty is not None:
            self.penalty.step = trainer.global_step * trainer.accumulate_grad_batches

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any
    ) -> None:
        """Log the metrics where the trainer logs this step."""
        step, every = trainer.global_step, getattr(trainer, "log_every_n_steps", 1)
        if trainer.is_global_zero and step and step % every == 0:
            pl_module.log_dict(self(pl_module, step=step), rank_zero_only=True)
