"""Lightning: a callback that logs conditioning under the names of `ConditionMetrics`."""

from __future__ import annotations

from typing import Any

from wellposed.errors import ConfigError, missing_extra
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
        penalty, every, spectra, vitals: as `ConditionMetrics`; ``every`` counts logged
            steps. Vital signs are logged with these; the hooks go at the end of training.

    Raises:
        ConfigError: as training starts, ``vitals`` of a module with several optimizers.

    When not to use: ``vitals`` where weights are cut over processes (FSDP, DeepSpeed).
    """

    _watched = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the penalty's step to that of a resumed run, and watch the vital signs."""
        if self.vitals and len(trainer.optimizers) > 1:
            problem = f"vitals: one optimizer can be watched, not {len(trainer.optimizers)}"
            raise ConfigError(f"{problem}; make a wellposed.Monitor for each in the module")
        self.watch(pl_module, next(iter(trainer.optimizers), None), trainer.global_step)
        self._watched = trainer.global_step
        if self.penalty is not None:
            self.penalty.step = trainer.global_step * trainer.accumulate_grad_batches

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *_: Any, **__: Any
    ) -> None:
        """Count the step for the vital signs, and log them and the metrics if the trainer logs it."""
        step, every = trainer.global_step, getattr(trainer, "log_every_n_steps", 1)
        if step == self._watched:  # gradients are still added up
            return
        self._watched = step
        self.count_step()
        if step % every == 0:
            seen = self.vital_signs()
            if trainer.is_global_zero:
                pl_module.log_dict(self(pl_module, step=step) | seen, rank_zero_only=True)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Take the hooks off."""
        self.unwatch()

    def on_exception(self, *_: Any, **__: Any) -> None:
        """Take the hooks off."""
        self.unwatch()
