"""The training loop: the objects of one run and its steps."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from accelerate import Accelerator
from torch import nn

from wellposed.errors import CheckpointError, ConvergenceError, DataError
from wellposed.training import _manifest, checkpoints, run_folder
from wellposed.training._result import RunResult, Status, describe_result, write_result
from wellposed.training._save import measure_model, save_final
from wellposed.training._schedules import learning_rate
from wellposed.training.batches import Batch, MicroBatches, forward_with_auxiliary, to_device
from wellposed.training.build import build_constraint, build_penalty, constrained_weights
from wellposed.training.config import RunConfig
from wellposed.training.divergence import NOT_REPEATED, Divergence, find_blame
from wellposed.training.evaluate import Evaluation, evaluate
from wellposed.training.metrics import MetricsFile
from wellposed.training.optimizer import build_optimizer, set_learning_rate
from wellposed.training.progress import Progress
from wellposed.training.signals import Cancelled, StopRequest
from wellposed.training.state import TrainerState, Window
from wellposed.training.step import StepNumbers, autocast, compute_gradients, scaled, sum_over_processes
from wellposed.training.tensors import gather_bytes, restore_torch_states, torch_states

if TYPE_CHECKING:
    from wellposed.tasks import Task


class Run:
    """The objects of one run and the loop over its steps."""

    def __init__(self, config: RunConfig, out: Path, task: Task, model: nn.Module, accelerator: Accelerator) -> None:
        self.config, self.options, self.out, self.task = config, config.train, out, task
        self.accelerator = accelerator
        self.model = model.to(accelerator.device).train()
        self.penalty = build_penalty(config.penalty, self.model)
        # `prepared` is what runs forward (DistributedDataParallel wraps it); `model` is what is saved and measured.
        optimizer = build_optimizer(
            self.model, config.train, constrained=constrained_weights(config.constrain, self.model)
        )
        self.prepared, self.optimizer = accelerator.prepare(self.model, optimizer)
        self.constraint = build_constraint(config.constrain, self.model, self._bare_optimizer)
        self.state = TrainerState()
        self.environment: dict[str, Any] = {}
        self._saved: tuple[int, int] | None = None
        self._check_targets = True

    def enter(self, resume: str, command: list[str] | None) -> tuple[Path | None, list[str]]:
        """Make or re-enter the run folder; return the checkpoint to load and notes for the user."""
        if not self.accelerator.is_main_process:
            self.accelerator.wait_for_everyone()
            return run_folder.find_checkpoint(self.out, resume)
        checkpoint, notes = run_folder.enter_run_folder(self.out, self.config, resume)
        self.environment = run_folder.environment(command)
        _manifest.remove(self.out)  # of an earlier start: what it describes grows again
        step = checkpoints.step_of(checkpoint) if checkpoint else 0
        run_folder.write_environment(self.out, self.environment, step)
        self.accelerator.wait_for_everyone()
        return checkpoint, notes

    def go(self, checkpoint: Path | None, progress: Progress, stop: StopRequest) -> RunResult:
        """Train from ``checkpoint``, or from the first step, to the end."""
        self.progress, self.stop = progress, stop
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        if checkpoint is not None:
            self.state = checkpoints.load_checkpoint(checkpoint, self.model, self._bare_optimizer, rank=rank)
            self._saved = self._moment
        else:
            self._measure("measure-initial.json")
            # Not the generator that drew the weights: dropout must not depend on how many numbers a variant drew.
            torch.manual_seed(derived_seed(self.options.seed, f"dropout/{rank}"))
        state, options = self.state, self.options
        self.batches = MicroBatches(
            self.task,
            options.batch_size,
            options.seed,
            epoch=state.epoch,
            index=state.batch_index,
            rank=rank,
            world=world,
        )
        self._began = time.monotonic() - state.seconds
        progress.start(state.step)
        with MetricsFile(self.out, rows=state.metrics_rows, enabled=self.accelerator.is_main_process) as self.metrics:
            try:
                self._fit()
                return self._finish()
            except Cancelled:
                return self._cancel()
            except Divergence as divergence:
                self.progress.say(f"stopped: {divergence}", warn=True)
                return self._end("failed", self._evaluations(), str(divergence), divergence)
            except ConvergenceError as error:
                self.progress.say(f"stopped: {error}", warn=True)
                return self._end("failed", self._evaluations(), str(error))

    def close(self) -> None:
        """Detach the penalty and the constraint and let go of the prepared objects."""
        for attached in (self.penalty, self.constraint):
            if attached is not None:
                attached.remove()
        if self.accelerator.device.type != "cpu":
            self.accelerator.free_memory()

    def _fit(self) -> None:
        """Alternate steps with evaluations and checkpoints; a run can resume from any state at the top of the loop."""
        state, options = self.state, self.options
        while True:
            last = state.step >= options.steps
            if state.evaluated_step < state.step and (last or state.step % options.eval_every == 0):
                self._validate()
            last = last or self._out_of_patience()
            if last or state.step == state.best_step or (state.step and state.step % options.checkpoint_every == 0):
                self._save()
            if last:
                return
            if self._stop_requested():
                raise Cancelled
            self._step()

    def _step(self) -> None:
        """Take one optimizer step, if its numbers are finite."""
        began = time.perf_counter()
        state, options = self.state, self.options
        rate = learning_rate(state.step + 1, options, self.config.model.hidden_size)
        set_learning_rate(self.optimizer, rate)
        micro_batches = self.batches.take(options.gradient_accumulation)
        random_states = torch_states()
        numbers = compute_gradients(
            self.accelerator,
            self.prepared,
            self.task,
            micro_batches,
            options,
            penalty=self._penalty_of_step(),
            check_targets=self._check_targets,
        )
        self._check_targets = False
        if not numbers.finite:
            restore_torch_states(random_states)
            raise self._divergence(numbers, micro_batches, rate)
        # Not through Accelerate's wrapper: with no gradient scaler it adds nothing but a search for packages (0.5 ms).
        self._bare_optimizer.step()
        self._bare_optimizer.zero_grad(set_to_none=True)
        state.step += 1
        state.epoch, state.batch_index = self.batches.epoch, self.batches.index
        state.count(numbers, time.perf_counter() - began)
        if state.step % options.log_every == 0 or state.step == options.steps:
            self._log(rate, numbers.grad_norm)

    def _penalty_of_step(self) -> Callable[[], torch.Tensor] | None:
        """Return the penalty of this step; with ``every`` = k it is on at every k-th step and counts k-fold."""
        every, penalty = self.config.penalty.every, self.penalty
        if penalty is None or self.state.step % every:
            return None
        return penalty if every == 1 else lambda: penalty() * every

    def _log(self, rate: float, grad_norm: float) -> None:
        window = self.state.window
        row: dict[str, Any] = {
            "step": self.state.step,
            "split": "train",
            "loss": window.loss_sum / max(1, window.targets),
            "penalty": window.penalty_sum / window.steps,
            **({} if window.auxiliary_sum is None else {"auxiliary_loss": window.auxiliary_sum / window.steps}),
            **self._isometry_error(),
            "grad_norm": grad_norm,
            "learning_rate": rate,
            "tokens_per_second": window.tokens / window.seconds,
            "seconds": self._elapsed(),
        }
        self.state.window = Window()
        self._add_row(row)

    def _isometry_error(self) -> dict[str, float]:
        """Return max |W^T W / g^2 - I| of the worst constrained weight, where there are any."""
        return {} if self.constraint is None else {"isometry_error": self.constraint.error().worst}

    def _validate(self) -> None:
        evaluation = self._evaluate("valid", self.options.eval_batches)
        value = evaluation.metrics[self.task.headline]
        better = self.state.record_evaluation(
            value, evaluation.metrics, evaluation.examples, higher_is_better=self.task.higher_is_better
        )
        row = {
            "step": self.state.step,
            "split": "valid",
            **evaluation.metrics,
            "best": better,
            "seconds": self._elapsed(),
        }
        self._add_row(row)

    def _evaluate(self, split: Literal["valid", "test"], max_batches: int | None) -> Evaluation:
        evaluation = evaluate(
            self.accelerator,
            self.prepared,
            self.task,
            split,
            self.options,
            max_batches=max_batches,
            stop=self._stop_requested,
        )
        if evaluation is None:
            raise Cancelled
        if evaluation.examples == 0:
            raise DataError(
                f"{self.task.name}: the {split} split is empty; a run needs it to choose and report weights"
            )
        if not math.isfinite(evaluation.metrics["loss"]):
            raise self._bad_evaluation(split, evaluation)
        return evaluation

    def _finish(self) -> RunResult:
        """Evaluate the best weights on *test* and leave them in ``final/``."""
        lost = self._load_best()
        test = self._evaluate("test", None)
        self._add_row({"step": self.state.best_step, "split": "test", **test.metrics, "seconds": self._elapsed()})
        if self.accelerator.is_main_process:
            self._measure("measure-final.json")
            save_final(self.out, self.model, self.task)
        return self._end("success", {**self._evaluations(), "test": test}, lost)

    def _load_best(self) -> str:
        """Load the weights that were best on *valid*; where those are damaged, keep the last ones and return why."""
        state = self.state
        if state.best_step == state.step:
            return ""
        best = self.out / f"checkpoint-{state.best_step}"
        try:
            checkpoints.verify(best)
        except CheckpointError as error:
            lost = (
                f"the best weights, of step {state.best_step}, are lost; those of step {state.step} are used: {error}"
            )
            self.progress.say(lost, warn=True)
            state.best_value = None
            self._validate()
            return lost
        checkpoints.load_checkpoint(best, self.model)
        return ""

    def _cancel(self) -> RunResult:
        self._save()
        message = f"interrupted after step {self.state.step}; continue with --resume auto"
        self.progress.say(f"{self.out}: {message}", warn=True)
        return self._end("cancelled", self._evaluations(), message)

    def _end(
        self,
        status: Status,
        evaluations: Mapping[str, Evaluation],
        message: str = "",
        divergence: Divergence | None = None,
    ) -> RunResult:
        self.state.seconds = self._elapsed()
        values = describe_result(
            status=status,
            config=self.config,
            task=self.task,
            state=self.state,
            evaluations=evaluations,
            environment=self.environment or run_folder.environment(None),
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            message=message,
            divergence=divergence,
        )
        values["train_info"].update(self._isometry_error())
        result = RunResult(status, self.out, values, message)
        if self.accelerator.is_main_process:
            write_result(result)
            _manifest.write(self.out, _manifest.RECORDS)
        return result

    def _evaluations(self) -> dict[str, Evaluation]:
        state = self.state
        return {"valid": Evaluation(state.best_metrics, state.best_examples)} if state.best_step is not None else {}

    def _save(self) -> None:
        """Write a checkpoint of this moment, unless it is the one written or loaded last."""
        if self._saved == self._moment:
            return
        state = self.state
        state.seconds = self._elapsed()
        state.metrics_rows = self.metrics.sync()
        random_states = gather_bytes(self.accelerator, checkpoints.random_snapshot())
        if self.accelerator.is_main_process:
            snapshot = checkpoints.take_snapshot(self.model, self._bare_optimizer, state, random_states)
            checkpoints.write_checkpoint(self.out, snapshot)
            keep = self.options.keep_checkpoints
            checkpoints.prune(self.out, step=state.step, keep=keep, best_step=state.best_step)
        self.accelerator.wait_for_everyone()
        self._saved = self._moment

    @property
    def _moment(self) -> tuple[int, int]:
        return self.state.step, self.state.evaluated_step

    @property
    def _bare_optimizer(self) -> torch.optim.Optimizer:
        return self.optimizer.optimizer

    def _out_of_patience(self) -> bool:
        patience = self.options.patience
        return patience is not None and self.state.evaluations_without_gain >= patience

    def _stop_requested(self) -> bool:
        """Return whether any process was asked to stop, so that all of them stop at the same step."""
        if self.accelerator.num_processes == 1:
            return self.stop.requested
        return bool(sum_over_processes(self.accelerator, torch.tensor(int(self.stop.requested))))

    def _measure(self, name: str) -> None:
        if self.accelerator.is_main_process:
            problem = measure_model(self.model, self.out / name)
            if problem:
                self.progress.say(problem)

    def _add_row(self, row: dict[str, Any]) -> None:
        self.metrics.append(row)
        self.progress.row(row)

    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _divergence(self, numbers: StepNumbers, micro_batches: list[Batch], rate: float) -> Divergence:
        self.optimizer.zero_grad(set_to_none=True)
        names = {
            "loss": numbers.loss_sum, "penalty": numbers.penalty, "auxiliary loss": numbers.auxiliary or 0.0,
            "gradient norm": numbers.grad_norm,
        }  # fmt: skip
        what = ", ".join(f"{name} is {value}" for name, value in names.items() if not math.isfinite(value))
        found = None
        for batch in micro_batches:
            found = found or find_blame(self.model, lambda batch=batch: self._losses(batch))
        return Divergence(step=self.state.step + 1, learning_rate=rate, what=what, blame=found or NOT_REPEATED)

    def _bad_evaluation(self, split: str, evaluation: Evaluation) -> Divergence:
        found = None
        if evaluation.bad_batch is not None:
            self.model.eval()
            found = find_blame(self.model, lambda: self._losses(evaluation.bad_batch or {}))
            self.model.train()
        return Divergence(
            step=max(1, self.state.step),
            learning_rate=learning_rate(max(1, self.state.step), self.options, self.config.model.hidden_size),
            what=f"loss on {split} is {evaluation.metrics['loss']}",
            blame=found or NOT_REPEATED,
        )

    def _losses(self, batch: Batch) -> dict[str, torch.Tensor]:
        batch = to_device(batch, self.accelerator.device)
        with autocast(self.accelerator.device, self.options):
            logits, auxiliary = forward_with_auxiliary(self.model, batch)
            logits = scaled(logits, self.options)
            loss, _ = self.task.loss_sum(logits, batch, label_smoothing=self.options.label_smoothing)
        penalty = self._penalty_of_step()
        extra = None if penalty is None else penalty()
        found = {"(the loss)": loss, "(the auxiliary loss)": auxiliary, "(the penalty)": extra}
        return {name: value for name, value in found.items() if value is not None}


def derived_seed(seed: int, purpose: str) -> int:
    """Return a seed for one ``purpose``, unrelated to those of other purposes."""
    return int.from_bytes(sha256(f"{seed}/{purpose}".encode()).digest()[:7])
