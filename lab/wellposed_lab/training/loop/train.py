"""`train`: one run from its configuration to its result: load, build, loop, evaluate, save."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

from wellposed.errors import CheckpointError, ConvergenceError
from wellposed.half_weights import HALF, dtype_names
from wellposed_lab.tasks.data.remarks import data_remarks
from wellposed_lab.tasks.task import Task, build_task
from wellposed_lab.training.config import RunConfig
from wellposed_lab.training.folder import checkpoints, run_folder
from wellposed_lab.training.folder import result as results
from wellposed_lab.training.folder.model_card import model_card
from wellposed_lab.training.folder.run_folder import RunFolder
from wellposed_lab.training.folder.save import save_final
from wellposed_lab.training.folder.state import Evaluation, StepNumbers, TrainerState, Window
from wellposed_lab.training.loop import build
from wellposed_lab.training.loop import step as steps
from wellposed_lab.training.loop import tracking as trackers
from wellposed_lab.training.loop.divergence import Divergence
from wellposed_lab.training.loop.evaluate import evaluate, layer_at_fault, score_texts
from wellposed_lab.training.loop.machine import build_accelerator, one_line_failures
from wellposed_lab.training.loop.processes import Cancelled, StopRequest
from wellposed_lab.training.loop.run import Parts, Run
from wellposed_lab.training.loop.schedules import counted_in_steps, longer_note


def train(
    config: RunConfig,
    out: Path,
    *,
    resume: str = "never",
    progress: bool = True,
    command: list[str] | None = None,
    task: Task | None = None,
    model: build.ModelFactory | None = None,
    longer: bool = False,
    tracking: Sequence[str] = (),
    test_batches: int | None = None,
) -> results.RunResult:
    """Train a model into a run folder; the best weights are those on *valid*.

    Status: exact. On a CPU, N steps, a kill at any moment, and ``resume="auto"`` up to 2N steps
    give the same weights as 2N steps, bit for bit. Micro-batches depend on task, batch size and
    seed alone. k accumulated micro-batches give the gradient of one batch to rounding.

    SIGINT, SIGTERM or SIGHUP finishes the step, saves a checkpoint and ends with status
    ``cancelled``. A loss or gradient that is not finite ends with status ``failed`` and names the
    layer, before the weights change. *test* is read once, at the end, with the best weights.

    Under a launcher (``torchrun``, ``accelerate launch``) W processes are one run: without dropout,
    one process with W times the ``gradient_accumulation``, to rounding.

    Args:
        config: Everything that identifies the run.
        out: The run folder, see `RunFolder`: ``result.json``, ``metrics.jsonl``, ``final/``, ...
        resume: ``"never"`` needs an empty ``out``; ``"auto"`` continues from the newest complete
            checkpoint, or returns the result of a finished run.
        progress: Show progress on standard error.
        command: The words of the command, for ``env.json`` and ``result.json``.
        task: The data; default: built from ``config``.
        model: Makes the model from ``(config, task)``, not ``config.model`` or ``config.start``.
        longer: Let ``resume`` continue a run, finished or not, to more steps or epochs; a note says
            what changes.
        tracking: Names of Accelerate's trackers, see `Trackers`.
        test_batches: Number of batches of *test* to read, for very short runs.

    Returns:
        The result: status, content of ``result.json``, exit code.

    Raises:
        ConfigError: ``out`` is in use, a missing device, a resume with a changed configuration, an
            unknown name, or a tracker that is not installed.
        DataError: data that cannot be read, is too small for a batch, or changed since the start.
        CheckpointError: a damaged checkpoint or a full disk; earlier checkpoints stay.
        WellposedError: memory ran out, or another process of the run ended.

    Cost: a bare PyTorch loop and at most 5 % (``benchmarks/loop.py``), plus evaluations and
    checkpoints. The generators of Python, NumPy and torch are seeded. When not to use: for models
    that need model parallelism, use the penalty and constraints in your own loop.

    >>> import tempfile
    >>> from wellposed.model_options import ModelOptions
    >>> from wellposed_lab.training.config import RunConfig, TrainOptions
    >>> from wellposed_lab.training.loop.train import train
    >>> small = ModelOptions(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
    >>> data = {"limit_chars": 9000, "seq_len": 64}
    >>> config = RunConfig("char_lm", data, model=small, train=TrainOptions(steps=2, batch_size=64, eval_batches=1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     train(config, Path(folder) / "run", progress=False).status
    'success'
    """
    remarks = task is None
    trackers.check_trackers(tracking)
    accelerator = build_accelerator(config.train)
    folder = RunFolder(out, writes=accelerator.is_main_process)
    if config.train.epochs is not None or config.train.warmup_share:
        task = task or build_task(config.task, config.task_options)
        config = counted_in_steps(config, task, processes=accelerator.num_processes)

    folder.check(config, resume, longer=longer)
    finished = folder.finished(config, task, longer=longer) if resume == "auto" else None
    if finished is not None:
        _warn_of_half(out)
        return finished

    task = task or build_task(config.task, config.task_options)
    set_seed(config.train.seed)
    progress_bar = trackers.Progress(
        enabled=progress and folder.writes,
        steps=config.train.steps,
        description=f"{config.task} {config.variant} seed {config.train.seed}",
    )
    with one_line_failures(out, config, accelerator), folder.lock():
        folder.check(
            config, resume, longer=longer
        )  # again: another process may have written meanwhile
        folder.check_data(task)
        environment = run_folder.environment(command, task)
        try:
            parts, started = _built(config, task, model, accelerator, out)
            with closing(parts):
                entry = _entered(folder, config, resume, environment, accelerator)
                # A caller that gives the task reports on its data itself.
                notes = [*(data_remarks(task.description()) if remarks else ()), *entry.notes]
                notes += build.start_notes(started, parts.model) if not entry.checkpoint else []
                notes += build.half_notes(parts.model, entry.checkpoint)
                notes += parts.penalty.notes() if parts.penalty else []
                with progress_bar, StopRequest() as stop:
                    for note in notes:
                        progress_bar.say(note, warn="damaged" in note)
                    run = Run(
                        config,
                        folder,
                        task,
                        parts,
                        progress=progress_bar,
                        stop=stop,
                        checkpoint=entry.checkpoint,
                        environment=environment,
                        tracking=tracking,
                        started=started,
                        test_batches=test_batches,
                    )
                    with closing(run):
                        return _to_its_end(run)
        except ConvergenceError as error:
            # The weights or their constraint failed to converge: the run counts as failed.
            if folder.writes:
                trackers.logger.warning("%s: failed: %s", out, error)
            folder.enter(config, resume)
            folder.record_start(environment, 0)
            values = results.describe_result(
                "failed", config, task, TrainerState(), environment, message=str(error)
            )
            return folder.end(results.RunResult("failed", out, values, str(error)))


def _warn_of_half(out: Path) -> None:
    """Log if a finished run trained weights of 16 bits, as earlier versions did with such files."""
    dtype = checkpoints.dtype_of(out)
    if dtype in HALF:
        trackers.logger.warning(
            "%s: its weights were trained in %s, which loses small steps; to compare it with runs in"
            " float32, train it again in another folder",
            out,
            str(dtype).removeprefix("torch."),
        )


def _built(
    config: RunConfig,
    task: Task,
    model: build.ModelFactory | None,
    accelerator: Accelerator,
    out: Path,
) -> tuple[Parts, dict[str, Any]]:
    """Return the parts of the run, and the entries of ``train_info`` about its start model."""
    if model is not None:
        return Parts(config, task, model(config, task), accelerator), {}
    # A run that an earlier version began in the dtype of a file continues in it, bit for bit.
    start = build.build_start(config, task, checkpoints.dtype_of(out) or torch.float32)
    return Parts(config, task, start.model, accelerator), build.started_from(config, start)


def _entered(
    folder: RunFolder,
    config: RunConfig,
    resume: str,
    environment: dict[str, Any],
    accelerator: Accelerator,
) -> run_folder.Entry:
    """Enter the folder, first in the process that writes."""
    if not folder.writes:
        accelerator.wait_for_everyone()
    entry = folder.enter(config, resume)
    step = checkpoints.step_of(entry.checkpoint) if entry.checkpoint else 0
    folder.record_start(environment, step)
    if folder.writes:
        accelerator.wait_for_everyone()
    if config.train.steps > entry.begun.train.steps:
        entry.notes.append(longer_note(entry.begun, config))
    return entry


def _to_its_end(run: Run) -> results.RunResult:
    try:
        fit(run)
        return _finish(run)
    except Cancelled:
        run.save()
        message = f"interrupted after step {run.state.step}; continue with --resume auto"
        run.progress.warn(f"{run.folder.path}: {message}")
        return _end(run, "cancelled", best_evaluation(run), message)
    except (Divergence, ConvergenceError) as error:
        # The weights are those of the last step with finite numbers.
        run.progress.warn(f"stopped: {error}")
        failure = error.failure if isinstance(error, Divergence) else None
        return _end(run, "failed", best_evaluation(run), str(error), failure)


def fit(run: Run) -> None:
    """Alternate steps with evaluations and checkpoints; any state at the top of the loop can
    resume. A stop request raises `Cancelled`, a number that is not finite `Divergence`."""
    state = run.state
    options = run.options
    check_targets = True
    while True:
        last = state.step >= options.steps
        if state.evaluated_step < state.step and (last or state.step % options.eval_every == 0):
            validate(run)
        patience = options.patience
        last = last or (patience is not None and state.evaluations_without_gain >= patience)
        due = state.step and state.step % options.checkpoint_every == 0
        if last or due or state.step == state.best_step:
            run.save()
        if last:
            return
        if run.stop_requested():
            raise Cancelled
        take_step(run, check_targets=check_targets)
        check_targets = False


def take_step(run: Run, *, check_targets: bool = False) -> None:
    """Take one optimizer step, if its numbers are finite."""
    began = time.perf_counter()
    state = run.state
    options = run.options
    parts = run.parts
    rate = run.rate(state.step + 1)
    build.set_learning_rate(parts.optimizer, rate)
    micro_batches = run.batches.take(options.gradient_accumulation)
    random_states = checkpoints.torch_states()
    pulls: dict[str, float] | None = {} if run.reads_pulls() else None
    due = run.penalties_of_step()
    numbers = steps.compute_gradients(
        parts.accelerator,
        parts.prepared,
        run.task,
        micro_batches,
        options,
        penalty=due.of_batch,
        weights_penalty=due.of_weights,
        check_targets=check_targets,
        progress=run.progress_of_step(),
        pulls=pulls,
    )
    what = ", ".join(numbers.not_finite())
    if what:
        checkpoints.restore_torch_states(random_states)
        parts.optimizer.zero_grad(set_to_none=True)
        run.watch()  # the first module whose output is not finite is an alarm of this step
        blame = layer_at_fault(run, micro_batches, training=True)
        raise Divergence(step=state.step + 1, learning_rate=rate, what=what, blame=blame)
    parts.optimizer.step()
    parts.optimizer.zero_grad(set_to_none=True)
    state.step += 1
    run.watch()
    state.epoch = run.batches.epoch
    state.batch_index = run.batches.index
    state.count(numbers, time.perf_counter() - began)
    for name, pull in (pulls or {}).items():
        state.penalty_pulls[name] = max(pull, state.penalty_pulls.get(name, 0.0))
    if state.step == 1 and parts.penalty is not None:
        from wellposed.penalize import large_penalty

        loss = numbers.loss_sum / max(1, numbers.targets)
        warning = large_penalty(parts.penalty.last_value(), loss)
        if warning:
            run.progress.warn(warning)
    if state.step % options.log_every == 0 or state.step == options.steps:
        _log(run, rate, numbers)


def _log(run: Run, rate: float, numbers: StepNumbers) -> None:
    window = run.state.window
    run.state.window = Window()
    row: dict[str, Any] = {"step": run.state.step, "split": "train"}
    row["loss"] = window.loss_sum / max(1, window.targets)
    row["penalty"] = window.penalty_sum / window.steps
    if window.auxiliary_sum is not None:
        row["auxiliary_loss"] = window.auxiliary_sum / window.steps
    row |= {**run.constraint_error(), "grad_norm": numbers.grad_norm, "learning_rate": rate}
    run.add_row({**row, "tokens_per_second": window.tokens / window.seconds})


def validate(run: Run) -> None:
    """Evaluate on *valid*, and record whether these weights are the best so far."""
    state = run.state
    model = run.parts.model
    evaluation = evaluate(run, "valid")
    row = {"step": state.step, "split": "valid", **evaluation.metrics, **run.task.watch(model)}
    run.add_row({**row, "best": state.record_evaluation(evaluation, run.task)})


def best_evaluation(run: Run) -> dict[str, Evaluation]:
    """Return the best evaluation so far by its split, empty before the first one."""
    best = Evaluation(run.state.best_metrics, run.state.best_examples)
    return {} if run.state.best_step is None else {"valid": best}


def _finish(run: Run) -> results.RunResult:
    """Choose the weights on *valid*, score them on *test* (read only here), and save ``final/``."""
    lost = _load_best_weights(run)
    notes: dict[str, Any] = {}
    test = evaluate(run, "test")
    valid_scores = score_texts(run, "valid")
    test_scores = score_texts(run, "test")
    described = run.task.describe_generation() if test_scores else None
    if described:
        notes["generation"] = described

    test = replace(test, metrics={**test.metrics, **test_scores}, notes=notes)
    run.add_row({"step": run.state.best_step, "split": "test", **test.metrics})
    valid = best_evaluation(run)["valid"]
    valid = replace(valid, metrics={**valid.metrics, **valid_scores})
    if run.parts.reparametrized is not None:
        run.parts.reparametrized.merge()

    run.measure("measure-final.json")
    evaluations = {"valid": valid, "test": test}
    model = run.parts.model
    folder = run.folder
    if folder.writes:
        card = model_card(run.config, model, run.task, evaluations, run.environment["command"])
        save_final(folder.path, model, run.task, card)

    return _end(run, "success", evaluations, lost)


def _load_best_weights(run: Run) -> str:
    """Load the weights that were best on *valid*. If they are damaged, keep the last, say why."""
    state = run.state
    if state.best_step is None or state.best_step == state.step:
        return ""

    try:
        checkpoints.load_weights(run.folder.path / f"checkpoint-{state.best_step}", run.parts.model)
    except CheckpointError as error:
        lost = f"the best weights, of step {state.best_step}, are lost"
        lost += f"; those of step {state.step} are used: {error}"
        run.progress.warn(lost)
        state.best_value = None
        validate(run)
        return lost

    return ""


def _end(
    run: Run,
    status: results.Status,
    evaluations: Mapping[str, Evaluation],
    message: str = "",
    failure: Mapping[str, Any] | None = None,
) -> results.RunResult:
    run.state.seconds = run.elapsed()
    model = run.parts.model
    described = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "weights_dtype": dtype_names(build.trained_weights(model)),
    }
    values = results.describe_result(
        status,
        run.config,
        run.task,
        run.state,
        run.environment,
        evaluations=evaluations,
        message=message,
        failure=failure,
        train_info={**described, **run.constraint_error(), **run.penalty_moves(), **run.started},
    )
    result = results.RunResult(status, run.folder.path, values, message)
    run.folder.end(result)
    run.trackers.end(values["results"][run.config.task], succeeded=status == "success")

    return result
