"""What follows the last step of a run: the choice between best and averaged weights, and metrics of generated text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from accelerate import Accelerator
from torch import nn

from wellposed.errors import ConfigError
from wellposed.training._result import RunResult, Status
from wellposed.training.average import WeightHistory, choose_weights
from wellposed.training.config import RunConfig
from wellposed.training.divergence import Divergence
from wellposed.training.evaluate import Evaluation
from wellposed.training.loop import Run
from wellposed.training.signals import Cancelled

if TYPE_CHECKING:
    from wellposed.tasks import Task

GENERATE_BATCH = 64


class CompleteRun(Run):
    """A `Run` that keeps the weights of its evaluations and ends with the better of best and mean weights.

    The task's ``generate_metrics`` are computed once, on valid and test, with the weights that were chosen; its
    ``describe_generation`` becomes ``generation`` in ``result.json``.
    """

    def __init__(self, config: RunConfig, out: Path, task: Task, model: nn.Module, accelerator: Accelerator) -> None:
        count = config.train.average_checkpoints
        if count and config.constrain.where:
            raise ConfigError(
                f"train.average_checkpoints = {count} with constrain.where = {config.constrain.where!r}: the mean of "
                "orthogonal matrices is not orthogonal; leave one of them at its default"
            )
        super().__init__(config, out, task, model, accelerator)
        self._history = WeightHistory(out, count) if count else None
        self._valid_scores: dict[str, float] = {}

    def _validate(self) -> None:
        super()._validate()
        if self._history is not None and self.accelerator.is_main_process:
            self._history.add(self.state.step, self.model)

    def _evaluate(self, split: Literal["valid", "test"], max_batches: int | None) -> Evaluation:
        """Evaluate; before the test split, which is read once and last, settle which weights are the final ones."""
        if split != "test":
            return super()._evaluate(split, max_batches)
        notes = self._settle_weights()
        test = super()._evaluate(split, max_batches)
        scores = self._generate("valid"), self._generate("test")
        self._valid_scores = scores[0]
        if scores[1] and (described := self.task.describe_generation()):
            notes["generation"] = described
        return replace(test, metrics={**test.metrics, **scores[1]}, notes=notes)

    def _settle_weights(self) -> dict[str, Any]:
        if self._history is None:
            return {}
        self.accelerator.wait_for_everyone()
        state = self.state
        report, found = choose_weights(
            self._history,
            self.model,
            best=cast(float, state.best_value),
            best_step=cast(int, state.best_step),
            evaluate=lambda: super(CompleteRun, self)._evaluate("valid", self.options.eval_batches),
            metric=self.task.headline,
            higher_is_better=self.task.higher_is_better,
        )
        if found is not None:
            state.best_metrics, state.best_examples = found.metrics, found.examples
        self.progress.say(
            f"final weights: {report['used']} ({report['chosen_by']}: best {report['best']}, mean {report['average']})"
        )
        return {"weights": report}

    def _generate(self, split: Literal["valid", "test"]) -> dict[str, float]:
        if self.task.report_headline is not None:
            if self._stop_requested():
                raise Cancelled
            self.progress.say(f"generating the {split} split")
        batch_size = min(GENERATE_BATCH, self.options.batch_size)
        scores = self.task.generate_metrics(self.model, split, batch_size=batch_size, max_examples=None)
        return {name: float(value) for name, value in scores.items()}

    def _evaluations(self) -> dict[str, Evaluation]:
        return {
            split: replace(evaluation, metrics={**evaluation.metrics, **self._valid_scores})
            for split, evaluation in super()._evaluations().items()
        }

    def _end(
        self,
        status: Status,
        evaluations: Mapping[str, Evaluation],
        message: str = "",
        divergence: Divergence | None = None,
    ) -> RunResult:
        result = super()._end(status, evaluations, message, divergence)
        if status == "success" and self._history is not None and self.accelerator.is_main_process:
            self._history.remove()
        return result
