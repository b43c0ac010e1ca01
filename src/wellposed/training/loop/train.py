"""`train`: one run from its configuration to its result."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from accelerate.utils import set_seed

from wellposed.errors import CheckpointError, ConvergenceError
from wellposed.tasks import Task, build_task
from wellposed.tasks.data.remarks import data_remarks
from wellposed.training.config import RunConfig
from wellposed.training.folder import checkpoints, durable_files, run_folder, tensors
from wellposed.training.folder import result as results
from wellposed.training.folder.model_card import model_card, save_examples
from wellposed.training.folder.run_folder import only_writer
from wellposed.training.folder.save import save_final
from wellposed.training.loop import build
from wellposed.training.loop import tracking as trackers
from wellposed.training.loop.divergence import Divergence
from wellposed.training.loop.machine import build_accelerator, one_line_failures
from wellposed.training.loop.processes import Cancelled, StopRequest
from wellposed.training.loop.run import Run, evaluate, fit, validate
from wellposed.training.loop.schedules import counted_in_steps, with_warmup_begun
from wellposed.training.loop.state import Evaluation, TrainerState

GENERATE_BATCH = 64


def train(
    config: RunConfig,
    out: Path,
    *,
    resume: str | Path = "never",
    progress: bool = True,
    command: list[str] | None = None,
    task: Task | None = None,
    model: build.ModelFactory | None = None,
    longer: bool = False,
    tracking: trackers.Tracking = trackers.NOT_TRACKED,
    test_batches: int | None = None,
) -> results.RunResult:
    """Minimise mean loss per target + penalty by AdamW and leave a run folder; the best weights are
    those on *valid*.

    Status: exact in what it promises of the course of a run. On a CPU, N steps, a kill at any
    moment, and ``resume="auto"`` up to 2N steps give the same weights, bit for bit, as 2N steps
    straight; micro-batches depend on task, batch size and seed alone, so that every variant of a
    seed sees the same ones; k accumulated micro-batches give the gradient of one batch to rounding.
    SIGINT, SIGTERM or SIGHUP finishes the step, saves a checkpoint and ends with status
    ``cancelled``. A loss or gradient that is not finite ends with status ``failed`` and names the
    layer where it began, before the weights are touched. The test split is read once, at the end,
    with the best weights, or with the mean of the last ``average_checkpoints`` evaluated ones where
    that is better on *valid*. A task that generates text is scored on valid and test with the same
    weights.

    Under a launcher (``torchrun``, ``accelerate launch``) W processes are one run: a step takes
    ``gradient_accumulation`` micro-batches in each. Where dropout is 0 it is, to rounding, that of
    one process with W times as many.

    Source: AdamW of Loshchilov and Hutter (2019); schedules: `wellposed.training.learning_rate`.

    Args:
        config: everything that identifies the run.
        out: the run folder: ``config.toml``, ``env.json``, ``metrics.jsonl``, ``result.json``,
            ``checkpoint-<step>/``, ``final/``, ``measure-initial.json``, ``measure-final.json``.
        resume: ``"never"`` wants an empty ``out``; ``"auto"`` continues from the newest complete
            checkpoint, or returns the result of a finished run; a path continues from that
            checkpoint of ``out``.
        progress: draw a bar on a terminal, plain lines elsewhere, on standard error.
        command: the words of the command, for ``env.json`` and ``result.json``.
        task: the data; built from ``config`` where not given.
        model: makes the model from ``(config, task)``, in the place of ``config.model`` and
            ``config.start``.
        longer: ``resume`` may continue a run, finished or not, to more steps or epochs than it was
            begun with. The learning rate then follows the schedule of the new length, and a note
            says what that changes.
        tracking: trackers of Accelerate that are told the configuration, each row as it is written,
            the results and figures; see `wellposed.training.loop.tracking.Trackers`.
        test_batches: read only the first so many batches of *test*, for runs so short that it would
            cost most of them.

    Returns:
        The result: status ``success``, ``cancelled`` or ``failed`` (by a `ConvergenceError` too),
        content of ``result.json``, exit code.

    Raises:
        ConfigError: ``out`` in use, or written by another process at this moment, a device that is
            not there, a resume into a changed configuration (every field listed), an unknown name,
            a tracker that is not installed.
        DataError: the data cannot be read, is too small for one batch, or has changed since the run
            began.
        CheckpointError: a damaged checkpoint, or a disk that is full; earlier checkpoints stay as
            they were.
        WellposedError: memory ended, or another process of the run did.

    Cost: a bare PyTorch loop and at most 5 % (``benchmarks/loop.py``), plus evaluations and
    checkpoints. Python's random generator, NumPy's and torch's are seeded.

    When not to use it: for a model in need of model parallelism; use the penalty and the
    constraints in your own loop.

    >>> import tempfile
    >>> from wellposed.training import ModelOptions, RunConfig, TrainOptions, train
    >>> small = ModelOptions(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
    >>> data = {"limit_chars": 9000, "seq_len": 64}
    >>> config = RunConfig("char_lm", data, model=small, train=TrainOptions(steps=2, batch_size=64, eval_batches=1))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     train(config, Path(folder) / "run", progress=False).status
    'success'
    """
    resume, was_given = str(resume), task is not None
    trackers.check_trackers(tracking.names)
    accelerator = build_accelerator(config.train)
    is_main = accelerator.is_main_process
    if config.train.epochs is not None or config.train.warmup_share:
        task = task or build_task(config.task, config.task_options)
        begun = checkpoints.processes_at_start(out) if resume != "never" else None
        share = config.train.warmup_share
        config = counted_in_steps(config, task, processes=begun or accelerator.num_processes)
        if longer and share and resume != "never" and (out / run_folder.CONFIG).is_file():
            config = with_warmup_begun(config, share, run_folder.read_config(out))
    if is_main:
        run_folder.check_run_folder(out, config, resume, longer=longer)
    finished = _finished(config, out, task, longer=longer) if resume == "auto" else None
    if finished is not None:
        if is_main and config.train.average_checkpoints:  # a kill after the last record leaves it
            shutil.rmtree(out / checkpoints.AVERAGED, ignore_errors=True)
        return finished
    task = task or build_task(config.task, config.task_options)
    set_seed(config.train.seed)
    with one_line_failures(out, config, accelerator), only_writer(out, enabled=is_main):
        if is_main:  # again: another may have written between the two
            run_folder.check_run_folder(out, config, resume, longer=longer)
            run_folder.check_data(out, task)
        run = None
        try:
            if model is None:
                start = build.build_start(config, task)
                run = Run(config, out, task, start.model, accelerator)
                run.start = start if config.start.model else None
            else:
                run = Run(config, out, task, model(config, task), accelerator)
            run.test_batches = test_batches
            checkpoint, notes = run.enter(resume, command)
            # Who gave the task describes its data, once for all runs.
            notes = [*(() if was_given else data_remarks(task.description())), *notes]
            return _train_from(run, checkpoint, notes, tracking, progress=progress)
        except ConvergenceError as error:
            # The weights or their constraint could not be made: such a run has failed, as one whose
            # loss is not finite.
            environment = run_folder.environment(command, task)
            given = ("failed", config, task, TrainerState(), environment)
            values = results.describe_result(*given, message=str(error))
            result = results.RunResult("failed", out, values, str(error))
            if is_main:
                trackers.logger.warning("%s: failed: %s", out, error)
                run_folder.enter_run_folder(out, config, resume)
                (out / durable_files.MANIFEST).unlink(missing_ok=True)
                run_folder.write_environment(out, environment, 0)
                result.write()
            return result
        finally:
            if run is not None:
                run.close()


def _finished(
    config: RunConfig, out: Path, task: Task | None, *, longer: bool
) -> results.RunResult | None:
    finished = results.read_result(out)
    if finished is None or finished.status != "success" or not (out / "final").is_dir():
        return None
    trained = finished.result["config"]["train"]["steps"]
    if longer and trained != config.train.steps:
        return None
    durable_files.verify_final(out / "final")
    if task is not None:
        run_folder.check_data(out, task)
    return finished


def _train_from(
    run: Run,
    checkpoint: Path | None,
    notes: list[str],
    tracking: trackers.Tracking,
    *,
    progress: bool,
) -> results.RunResult:
    config, is_main = run.config, run.is_main
    title = f"{config.task} {config.variant} seed {config.train.seed}"
    shown = trackers.Progress(
        enabled=progress and is_main, steps=config.train.steps, description=title
    )
    with shown as run.progress, StopRequest() as run.stop:
        for note in notes:
            run.progress.say(note, warn="damaged" in note)
        run.begin(checkpoint)
        rows = results.MetricsFile(run.out, rows=run.state.metrics_rows, enabled=is_main)
        how = {"title": title, "config": config.to_dict(), "step": run.state.step}
        warn = partial(run.progress.say, warn=True)
        records = trackers.Trackers(
            tracking if is_main else trackers.NOT_TRACKED, run.out, warn=warn, **how
        )
        with rows as run.metrics, records as run.trackers:
            try:
                fit(run)
                return _finish(run)
            except Cancelled:
                run.save()
                message = f"interrupted after step {run.state.step}; continue with --resume auto"
                run.progress.say(f"{run.out}: {message}", warn=True)
                return _end(run, "cancelled", run.best_evaluation(), message)
            except (Divergence, ConvergenceError) as error:
                # The weights are those of the last step with finite numbers.
                run.progress.say(f"stopped: {error}", warn=True)
                divergence = error if isinstance(error, Divergence) else None
                return _end(run, "failed", run.best_evaluation(), str(error), divergence)


def _finish(run: Run) -> results.RunResult:
    """Choose the weights on *valid*, score them on *test*, which is read here alone, and leave them
    in ``final/``."""
    lost = _load_best_weights(run)
    notes = choose_mean_weights(run)
    test = evaluate(run, "test")
    valid_scores, test_scores = _score_texts(run, "valid"), _score_texts(run, "test")
    if test_scores and (described := run.task.describe_generation()):
        notes["generation"] = described
    test = replace(test, metrics={**test.metrics, **test_scores}, notes=notes)
    run.add_row({"step": run.state.best_step, "split": "test", **test.metrics})
    valid = run.best_evaluation()["valid"]
    valid = replace(valid, metrics={**valid.metrics, **valid_scores})
    run.measure("measure-final.json")
    evaluations = {"valid": valid, "test": test}
    shards, whole = run.shards, run.model
    if shards is not None:
        whole = shards.whole(device="cpu", keep=run.is_main)
    if run.is_main:
        card = model_card(run.config, whole, run.task, evaluations, run.environment["command"])
        save_final(run.out, whole, run.task, card)
        save_examples(run.out, whole, run.task, run.options.temperature)
    result = _end(run, "success", evaluations, lost)
    if run.history is not None and run.is_main:
        shutil.rmtree(run.history.folder, ignore_errors=True)
    return result


def _load_best_weights(run: Run) -> str:
    """Load the weights that were best on *valid*; where those are damaged, keep the last ones and
    return why."""
    state = run.state
    if state.best_step == state.step:
        return ""
    best = run.out / f"checkpoint-{state.best_step}"
    try:
        checkpoints.load_weights(best, run.model)
    except CheckpointError as error:
        lost = f"the best weights, of step {state.best_step}, are lost"
        lost += f"; those of step {state.step} are used: {error}"
        run.progress.say(lost, warn=True)
        state.best_value = None
        validate(run)
        return lost
    return ""


def choose_mean_weights(run: Run) -> dict[str, Any]:
    """Take the mean of the last evaluated weights where it is better on *valid*; return what was
    compared and used."""
    if run.history is None:
        return {}
    run.accelerator.wait_for_everyone()
    state, steps, headline = run.state, list(run.history.files()), run.task.headline
    report: dict[str, Any] = {"used": "best", "best_step": state.best_step, "averaged_steps": steps}
    report |= {"chosen_by": f"{headline},valid", "best": state.best_value, "average": None}
    if len(steps) > 1:
        own = {name: tensor.clone() for name, tensor in tensors.model_tensors(run.model).items()}
        tensors.load_model_tensors(run.model, run.history.mean())
        found = evaluate(run, "valid")
        report["average"] = found.metrics[headline]
        if state.is_better(found.metrics[headline], run.task):
            report["used"] = "average"
            state.best_metrics, state.best_examples = found.metrics, found.examples
        else:
            tensors.load_model_tensors(run.model, own)
    run.progress.say(
        f"final weights: {report['used']} ({report['chosen_by']}: best {report['best']}, mean"
        f" {report['average']})"
    )
    return {"weights": report}


def _score_texts(run: Run, split: Literal["valid", "test"]) -> dict[str, float]:
    """Return the scores of texts that the final weights generate for ``split``; none for a task
    without texts."""
    if run.task.report_headline is not None and run.stop_requested():
        raise Cancelled

    def notify(done: int, count: int) -> None:
        if run.stop.requested and run.accelerator.num_processes == 1:
            raise Cancelled
        run.progress.part(f"generating the texts of {split}", done, count)

    how = {"batch_size": min(GENERATE_BATCH, run.options.batch_size), "notify": notify}
    scores = run.task.generate_metrics(run.whole(), split, **how)
    return {name: float(value) for name, value in scores.items()}


def _end(
    run: Run,
    status: results.Status,
    evaluations: Mapping[str, Evaluation],
    message: str = "",
    divergence: Divergence | None = None,
) -> results.RunResult:
    """Write ``result.json`` and the manifest, and return the result."""
    run.state.seconds = run.elapsed()
    parameters = sum(parameter.numel() for parameter in run.model.parameters())
    said = {"evaluations": evaluations, "message": message, "divergence": divergence}
    given = (status, run.config, run.task, run.state)
    environment = run.environment or run_folder.environment(None)
    values = results.describe_result(*given, environment, parameters=parameters, **said)
    values["train_info"].update(run.constraint_error(), **run.started)
    result = results.RunResult(status, run.out, values, message)
    if run.is_main:
        result.write()
        run.trackers.end(values["results"][run.config.task], succeeded=status == "success")
    return result
