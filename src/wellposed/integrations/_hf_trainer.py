"""Hugging Face Trainer: a callback that logs what a `wellposed.Monitor` measures."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from wellposed.call_checks import checked_arguments
from wellposed.errors import missing_extra
from wellposed.interrupts import run_all
from wellposed.measurement import Monitor
from wellposed.options import Size
from wellposed.penalize import OrthogonalityPenalty, summed_terms
from wellposed.roles import Verb
from wellposed.trackers import TrackerLog

try:
    from transformers import Trainer, TrainerCallback, TrainerState, TrainingArguments
except ImportError as error:
    raise missing_extra("transformers", "hf", "Hugging Face Trainer adapters") from error

_LEAST_IS_WORST = ("entropy", "stable_rank")


class _TrainerMonitor(Monitor):
    """A monitor whose errors speak of the callback."""

    _verb = Verb.by_role("MonitorCallback", "...")


class MonitorCallback(TrainerCallback):
    """Log the worst of a `wellposed.Monitor`, and a penalty's parts, with the training loss.

    A row has the worst since the last row: ``cond/<number>/max`` (``/min`` of ``stable_rank``),
    ``vital/<number>``, with ``monitor/step``, the last step that was measured; and the sums
    ``penalty/<strength>`` and ``penalty/total``, with ``penalty/step``, the last step that computed
    them. A row has neither if no step since the last row measured, or computed, them. Alarms are logged
    and kept in ``monitor.alarms``. A resumed run counts on. Status: as `wellposed.Monitor` and
    `OrthogonalityPenalty.terms`.

    Args:
        penalty: the penalty in use, or None.
        every: steps of the optimizer from one measurement to the next.
        weights: as in `wellposed.Monitor`.
        vitals: as in `wellposed.Monitor`.
        softmax_sensitivity: as in `wellposed.Monitor`.
        batch: as in `wellposed.find_roles`.
        where: as in `wellposed.find_roles`.
        log_to: as in `wellposed.Monitor`: tracker that gets every number of each measured step,
            beside the Trainer's rows.

    Raises:
        ConfigError: a value of another kind; as training begins, what `wellposed.Monitor` refuses.

    Cost: that of `wellposed.Monitor`. When not to use: ``vitals`` under FSDP1 or DeepSpeed.
    """

    @checked_arguments
    def __init__(
        self,
        penalty: OrthogonalityPenalty | None = None,
        *,
        every: Size = 100,
        weights: bool = True,
        vitals: bool = True,
        softmax_sensitivity: bool = False,
        batch: Any = None,
        where: Mapping[str, str | Sequence[str]] | None = None,
        log_to: Any = None,
    ) -> None:
        self.penalty = penalty
        self.every = every
        self.read: dict[str, Any] = {"weights": weights, "vitals": vitals}
        self.read |= {"softmax_sensitivity": softmax_sensitivity}
        self.read |= {"batch": batch, "where": where, "log_to": log_to}
        TrackerLog(log_to, "MonitorCallback", "monitor/step")  # refuses now what it cannot write to
        self._worst: dict[str, float] = {}
        self._logged_terms: int | None = None
        self.monitor: Monitor | None = None
        end_with_training()

    def attach(self, trainer: Trainer) -> None:
        """Place this callback before those of ``trainer``, so that trackers get its numbers."""
        trainer.callback_handler.callbacks.insert(0, self)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, *_: Any, **now: Any
    ) -> None:
        """Make the monitor, and set the steps of a resumed run."""
        self.end()
        self._worst = {}
        self._logged_terms = None
        self.monitor = _TrainerMonitor(now["model"], now["optimizer"], self.every, **self.read)
        self.monitor.steps = state.global_step
        if self.penalty is not None:
            self.penalty.step = state.global_step * args.gradient_accumulation_steps

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Count the step; keep the worst of its finite numbers."""
        numbers = {} if self.monitor is None else self.monitor.step()
        if numbers and self.monitor is not None:
            self._worst["monitor/step"] = self.monitor.steps
        for name, value in numbers.items():
            kind = name.partition("/")[0]
            number = name.rpartition("/")[2]
            worst = min if number in _LEAST_IS_WORST else max
            short = f"{kind}/{number}" + (f"/{worst.__name__}" if kind == "cond" else "")
            if math.isfinite(value):
                self._worst[short] = worst(value, self._worst.get(short, value))

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Remove the hooks."""
        self.end()

    def end(self) -> None:
        """Remove the hooks, if there are any; ``monitor`` keeps its alarms."""
        if self.monitor is not None:
            self.monitor.remove()

    def on_log(self, args: TrainingArguments, state: TrainerState, *_: Any, **now: Any) -> None:  # noqa: ARG002
        """Add the numbers to a row of the training loss."""
        if not {"loss", "train_loss"} & now["logs"].keys():
            return
        row = self._worst
        self._worst = {}
        penalty = self.penalty
        # Terms of a call before the last row, as of `every=100`, are not those of today.
        computed = None if penalty is None or penalty.removed else penalty.terms_step
        if penalty is not None and computed not in (None, self._logged_terms):
            row |= {**summed_terms(penalty.terms()), "penalty/step": computed}
            self._logged_terms = computed
        now["logs"].update(row)
        state.log_history[-1].update(row)


def end_with_training() -> None:
    """Patch `Trainer.train`, once: callbacks end with it, also if it raises or is interrupted.

    transformers calls no callback then, so hooks would stay on the model.
    """
    plain: Any = Trainer.train
    if getattr(plain, "ends_monitors", False):
        return

    @functools.wraps(plain)
    def train(self: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return plain(self, *arguments, **options)
        finally:
            ours = [c for c in self.callback_handler.callbacks if isinstance(c, MonitorCallback)]
            run_all(*(callback.end for callback in ours))

    vars(train)["ends_monitors"] = True
    Trainer.train = train
