"""`train`: one run from its configuration to its result."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from accelerate.utils import set_seed

from wellposed.errors import ConvergenceError
from wellposed.tasks import build_task
from wellposed.training.config import RunConfig
from wellposed.training.folder import checkpoints, run_folder
from wellposed.training.folder.averaging import weight_history
from wellposed.training.folder.lock import only_writer
from wellposed.training.folder.metrics import MetricsFile
from wellposed.training.folder.result import RunResult, read_result
from wellposed.training.folder.run_folder import check_data
from wellposed.training.loop.build import ModelFactory, build_start, describe_start
from wellposed.training.loop.divergence import Divergence
from wellposed.training.loop.finish import cancel, fail, fail_before_start, finish
from wellposed.training.loop.machine import build_accelerator, one_line_failures
from wellposed.training.loop.processes import Cancelled, StopRequest
from wellposed.training.loop.progress import Progress
from wellposed.training.loop.run import Run
from wellposed.training.loop.schedules import counted_in_steps, with_warmup_begun
from wellposed.training.loop.steps import fit
from wellposed.training.loop.tracking import NOT_TRACKED, Tracking, check_trackers

if TYPE_CHECKING:
    from wellposed.tasks import Task


def train(
    config: RunConfig,
    out: Path,
    *,
    resume: str | Path = "never",
    progress: bool = True,
    command: list[str] | None = None,
    task: Task | None = None,
    model: ModelFactory | None = None,
    longer: bool = False,
    tracking: Tracking = NOT_TRACKED,
    test_batches: int | None = None,
) -> RunResult:
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
    resume = str(resume)
    check_trackers(tracking.names)
    accelerator = build_accelerator(config.train)
    if config.train.epochs is not None or config.train.warmup_share:
        task = task or build_task(config.task, config.task_options)
        begun = checkpoints.processes_at_start(out) if resume != "never" else None
        share = config.train.warmup_share
        config = counted_in_steps(config, task, processes=begun or accelerator.num_processes)
        if longer and share and resume != "never" and (out / run_folder.CONFIG).is_file():
            config = with_warmup_begun(config, share, run_folder.read_config(out))
    if accelerator.is_main_process:
        run_folder.check_run_folder(out, config, resume, longer=longer)
    if (
        resume == "auto"
        and (finished := _finished_run(config, out, task, longer=longer)) is not None
    ):
        if accelerator.is_main_process and (history := weight_history(config, out)) is not None:
            history.remove()  # a kill after the last record leaves it
        return finished
    task = task or build_task(config.task, config.task_options)
    set_seed(config.train.seed)
    with (
        one_line_failures(out, config.train, accelerator),
        only_writer(out, enabled=accelerator.is_main_process),
    ):
        if accelerator.is_main_process:  # again: another may have written between the two
            run_folder.check_run_folder(out, config, resume, longer=longer)
            check_data(out, task)
        run = None
        try:
            if model is None:
                start = build_start(config, task)
                run = Run(config, out, task, start.model, accelerator)
                run.started = describe_start(config.start, start)
            else:
                run = Run(config, out, task, model(config, task), accelerator)
            run.test_batches = test_batches
            checkpoint, notes = run.enter(resume, command)
            shown = Progress(
                enabled=progress and run.is_main,
                steps=config.train.steps,
                description=f"{config.task} {config.variant} seed {config.train.seed}",
            )
            with shown as run.progress, StopRequest() as run.stop:
                for note in notes:
                    run.progress.say(note, warn="damaged" in note)
                run.begin(checkpoint)
                rows = MetricsFile(out, rows=run.state.metrics_rows, enabled=run.is_main)
                with rows as run.metrics, run.open_trackers(tracking) as run.trackers:
                    return _train_to_the_end(run)
        except ConvergenceError as error:
            # The weights or their constraint could not be made: such a run has failed, as one whose
            # loss is not finite.
            return fail_before_start(config, out, task, error, resume=resume, command=command)
        finally:
            if run is not None:
                run.close()


def _finished_run(
    config: RunConfig, out: Path, task: Task | None, *, longer: bool
) -> RunResult | None:
    finished = read_result(out)
    if finished is None or finished.status != "success" or not (out / "final").is_dir():
        return None
    trained = finished.result["config"]["train"]["steps"]
    if longer and trained != config.train.steps:
        return None
    if task is not None:
        check_data(out, task)
    return finished


def _train_to_the_end(run: Run) -> RunResult:
    try:
        fit(run)
        return finish(run)
    except Cancelled:
        return cancel(run)
    except (Divergence, ConvergenceError) as error:
        return fail(run, error)
