"""The sweep of McGrath (2024) over an Optuna journal: stop it, resume it, share it between
processes.

Every training is one enqueued trial; seeds are repeats of a cell, kept as attributes and never
searched over. A result is a file, written whole or not at all; the journal says who is at work on
what. A lock held while a training runs tells, when it is free, that the process which took the
trial is gone.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from wellposed.compare.workers import Workers, check_jobs
from wellposed.errors import (
    MAX_SHOWN,
    CheckpointError,
    ConfigError,
    ConvergenceError,
    WellposedError,
    listed,
    missing_extra,
)
from wellposed.finite_json import from_json, to_json
from wellposed.tasks.data.minbert import MinBertSet, read_minbert
from wellposed.training.folder.durable_files import is_litter, replace_file
from wellposed.training.loop.processes import Cancelled, StopRequest
from wellposed_studies.mcgrath2024.grid import FURTHER_PLACES, PLACES, STRENGTHS, Cell
from wellposed_studies.mcgrath2024.multitask_options import MultiTaskOptions
from wellposed_studies.mcgrath2024.trial_files import Record, read_record, write_record

STUDY = "mcgrath2024"
SETTINGS = "sweep.json"
JOURNAL = "journal.log"
LOCK = "sweep.lock"
DATA = "data.json"
MAX_JOBS = 8
Announce = Callable[[str], None]


@dataclass(frozen=True)
class Training:
    """One training: a cell of the grid and a seed."""

    cell: Cell
    seed: int

    @property
    def name(self) -> str:
        """Path of its result below ``trials/``."""
        return f"{self.cell.folder}/seed-{self.seed}"


@dataclass(frozen=True)
class SweepSettings:
    """What to train, on what, and where."""

    data: str
    out: str
    scale: str
    options: MultiTaskOptions
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]
    device: str = "cpu"
    imports: Mapping[str, str] = field(default_factory=dict)
    """Path and SHA-256 of every Python file that was imported for this sweep."""
    track: tuple[str, ...] = ()
    """Trackers of Accelerate that are told of every training."""

    def trainings(self) -> list[Training]:
        """Return every training, seed by seed, so that a sweep cut short has whole rounds."""
        return [Training(cell, seed) for seed in self.seeds for cell in self.cells]

    def result_path(self, training: Training) -> Path:
        """Return where the result of ``training`` is written."""
        return Path(self.out) / "trials" / f"{training.name}.json"

    def identity(self) -> dict[str, Any]:
        """Return what may not change between a start and a resume; cells and seeds may be added."""
        imports = {"imports": dict(self.imports)} if self.imports else {}
        return {
            "data": str(Path(self.data).resolve()),
            "scale": self.scale,
            **self.options.to_dict(),
            **imports,
        }


def open_sweep(settings: SweepSettings, resume: str) -> None:
    """Make the folder of a sweep, or check that it is one of the same settings, and enqueue what is
    not there yet.

    Raises:
        ConfigError: the folder is in use and ``resume`` is "never", holds no sweep, or one of other
            settings; the encoder cannot be loaded or cannot read the data.
        DataError: the data cannot be read.
    """
    out = Path(settings.out)
    if resume not in ("never", "auto"):
        raise ConfigError(f"resume = {resume!r}, expected never or auto")
    if not settings.seeds:
        raise ConfigError("seeds: expected at least 1")
    sets = read_minbert(settings.data)
    from wellposed.training.folder.run_folder import now, versions

    if _is_used(out):
        if resume == "never":
            raise ConfigError(
                f"{out}: the folder holds files; name another --out, or give --resume auto to keep"
                " finished trials and go on"
            )
        _check_identity(out, settings)
    elif settings.options.encoder is not None:
        _try_encoder(sets, settings.options)
    out.mkdir(parents=True, exist_ok=True)
    with _locked(out / LOCK):
        if not (out / SETTINGS).exists():
            values = {
                "study": STUDY,
                "settings": settings.identity(),
                "date": now(),
                "versions": versions(),
            }
            replace_file(out / SETTINGS, to_json(values, indent=2))
        _check_identity(out, settings)
        with _readable_journal(settings):
            _enqueue_missing(settings)


def _is_used(out: Path) -> bool:
    """Return whether a folder holds more than what a sweep that begins at this moment has made."""
    return out.is_dir() and any(path.name != LOCK and not is_litter(path) for path in out.iterdir())


def _try_encoder(sets: Mapping[str, MinBertSet], options: MultiTaskOptions) -> None:
    """Read a few rows as the encoder would, and load it: a sweep that cannot begin leaves no
    folder."""
    from wellposed_studies.mcgrath2024.encoders import build_multitask_model, encode_sets

    few = {
        name: replace(data, train=data.train.first(8), valid=data.valid.first(8))
        for name, data in sets.items()
    }
    build_multitask_model(options, encode_sets(few, options).tokenizer)


Report = Callable[[SweepSettings, Training, Record], None]


def _unreported(settings: SweepSettings, training: Training, record: Record) -> None:
    del settings, training, record


def work(
    settings: SweepSettings,
    *,
    announce: Announce,
    stop: Callable[[], bool],
    report: Report = _unreported,
) -> int:
    """Train one enqueued trial after the other until none waits; return how many were trained here.

    Each is given to ``report`` when its result is written.

    Raises:
        Cancelled: ``stop`` said so; the trial at work is enqueued again.
    """
    from wellposed_studies.mcgrath2024.encoders import encode_sets

    sets = None
    done = 0
    while (taken := _take(settings)) is not None:
        trial, training, lock = taken
        with lock:
            if sets is None:
                sets = encode_sets(read_minbert(settings.data), settings.options)
                _write_data(settings, sets.description)
            everything = settings.trainings()
            finished = sum(settings.result_path(other).exists() for other in everything)
            announce(f"[{finished}/{len(everything)}] {training.cell.name} seed {training.seed}")
            record = _run(settings, trial, training, sets, stop)
            report(settings, training, record)
            done += 1
    return done


def finished_results(settings: SweepSettings) -> list[dict[str, Any]]:
    """Return the results that are there, in the order of `SweepSettings.trainings`.

    Raises:
        CheckpointError: a result cannot be read.
    """
    results = []
    for training in settings.trainings():
        path = settings.result_path(training)
        if path.exists():
            results.append(read_record(path))
    return results


def run_sweep(
    settings: SweepSettings, *, jobs: int, announce: Announce, report: Report = _unreported
) -> bool:
    """Run the sweep in ``jobs`` processes, this one alone for 1; return False where the user
    stopped it.

    With several processes ``announce`` and ``report`` are called in each of them, so they are
    functions at the top of a module.

    Raises:
        ConfigError: ``jobs < 1``. Errors of data and of encoders come from the first process that
        meets them.
    """
    check_jobs(jobs)
    if jobs > 1:
        with Workers(jobs, _work, settings, announce, report) as workers:
            while workers.at_work():
                pass
        return not workers.stopped
    with StopRequest() as request:
        try:
            work(settings, announce=announce, stop=lambda: request.requested, report=report)
        except Cancelled:
            return False
        return not request.requested


def _work(
    settings: SweepSettings, announce: Announce, report: Report, stop: Callable[[], bool]
) -> None:
    work(settings, announce=announce, stop=stop, report=report)


def default_jobs(scale: str, device: str = "cpu") -> int:
    """Return one process for each CPU core at mini and medium scale on CPUs, at most 8, and else
    one."""
    return (
        min(os.cpu_count() or 1, MAX_JOBS) if scale in ("mini", "medium") and device == "cpu" else 1
    )


def _run(
    settings: SweepSettings, trial: Any, training: Training, sets: Any, stop: Callable[[], bool]
) -> Record:
    from wellposed_studies.mcgrath2024.multitask import train_multitask

    def check(step: int) -> None:
        if stop():
            raise Cancelled(f"stopped at step {step}")

    study = trial.study
    cell, seed = training.cell, training.seed
    record: Record = {"cell": cell.name, "seed": seed, "scale": settings.scale, "status": "success"}
    if settings.imports:
        record["imports"] = dict(settings.imports)
    try:
        found = train_multitask(
            sets,
            settings.options,
            penalty=cell.penalty(),
            seed=seed,
            check=check,
            device=settings.device,
        )
    except ConvergenceError as error:
        record |= {"status": "failed", "error": str(error)}
    except BaseException:
        with _locked(Path(settings.out) / LOCK):
            _fail(study, trial)
            _enqueue(study, training)
        raise
    else:
        record |= found
    write_record(settings.result_path(training), record)
    _tell(study, trial, record)
    return record


def _tell(study: Any, trial: Any, record: Record) -> None:
    if record["status"] == "success":
        study.tell(trial, record["scores"]["overall"])
    else:
        _fail(study, trial)


def _take(settings: SweepSettings) -> tuple[Any, Training, contextlib.ExitStack] | None:
    """Take the next waiting trial that has no result yet, with the lock that says it is being
    trained."""
    with _locked(Path(settings.out) / LOCK), _readable_journal(settings):
        study = _study(settings)
        while _trials(study, "WAITING"):
            trial = study.ask()
            place, places = _place_parameter(trial.user_attrs["key"])
            parameters = {
                "place": trial.suggest_categorical(place, places),
                "form": trial.suggest_categorical(
                    "form", ("none", "gram", "householder", "gram_schmidt")
                ),
                "strength": trial.suggest_categorical("strength", (0.0, *STRENGTHS)),
            }
            training = Training(Cell(**parameters), trial.user_attrs["seed"])
            path = settings.result_path(training)
            if path.exists():  # written just before its process was killed
                _tell(study, trial, read_record(path))
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            at_work = contextlib.ExitStack()
            at_work.enter_context(_locked(path.with_suffix(".lock")))
            return trial, training, at_work
    return None


def _enqueue_missing(settings: SweepSettings) -> None:
    """Enqueue each training that has no result, does not wait, and is not at work in a living
    process."""
    study = _study(settings)
    taken_care_of = {name for name, _ in _trials(study, "WAITING")}
    for name, trial in _trials(study, "RUNNING"):
        if _is_free(Path(settings.out) / "trials" / f"{name}.lock"):
            _fail(study, trial.number)
        else:
            taken_care_of.add(name)
    for training in settings.trainings():
        if training.name not in taken_care_of and not settings.result_path(training).exists():
            _enqueue(study, training)


def _enqueue(study: Any, training: Training) -> None:
    place, _ = _place_parameter(training.name)
    parameters = {
        place if name == "place" else name: value
        for name, value in training.cell.parameters().items()
    }
    study.enqueue_trial(parameters, user_attrs={"seed": training.seed, "key": training.name})


def _place_parameter(training: str) -> tuple[str, tuple[str, ...]]:
    """Return the parameter that says where a training penalises, and its choices, which a study may
    never change."""
    further = training.startswith(FURTHER_PLACES)
    return ("further_place", FURTHER_PLACES) if further else ("place", ("none", *PLACES))


def _trials(study: Any, state: str) -> list[tuple[str, Any]]:
    """Return the trials of a state, ``WAITING`` or ``RUNNING``, with the names of their
    trainings."""
    trials = study.get_trials(deepcopy=False)
    return [(str(trial.user_attrs["key"]), trial) for trial in trials if trial.state.name == state]


def _fail(study: Any, trial: Any) -> None:
    from optuna.trial import TrialState

    study.tell(trial, state=TrialState.FAIL)


def _study(settings: SweepSettings) -> Any:
    try:
        import optuna
        from optuna.storages.journal import JournalFileBackend
    except ImportError as error:
        raise missing_extra("optuna", "sweep", "sweeps") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = optuna.storages.JournalStorage(JournalFileBackend(str(Path(settings.out) / JOURNAL)))
    sampler = optuna.samplers.RandomSampler(
        seed=0
    )  # never asked: every trial is enqueued with all its parameters
    return optuna.create_study(
        study_name=STUDY,
        storage=storage,
        sampler=sampler,
        direction="maximize",
        load_if_exists=True,
    )


@contextlib.contextmanager
def _readable_journal(settings: SweepSettings) -> Iterator[None]:
    try:
        yield
    except (WellposedError, OSError, MemoryError):
        raise
    except Exception as error:  # a damaged journal raises whatever Optuna meets in it
        raise CheckpointError(
            f"{Path(settings.out) / JOURNAL}: cannot be read ({type(error).__name__}:"
            f" {str(error)[:MAX_SHOWN]}); finished trainings do not need it: remove it and go on"
            " with --resume auto"
        ) from error


def _check_identity(out: Path, settings: SweepSettings) -> None:
    try:
        before = dict(from_json((out / SETTINGS).read_bytes())["settings"])
    except FileNotFoundError:
        raise ConfigError(
            f"{out}: holds files but no {SETTINGS}, so it is no sweep to resume; name another --out"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{out / SETTINGS}: damaged ({error}); start again in another folder"
        ) from error
    wanted = settings.identity()
    changed = [
        f"{name}: {before.get(name)!r} then, {wanted.get(name)!r} now"
        for name in {**before, **wanted}
        if before.get(name) != wanted.get(name)
    ]
    if changed:
        raise ConfigError(
            f"{out}: the sweep was started with other settings:\n{listed(changed)}\nname another"
            " --out"
        )


def _write_data(settings: SweepSettings, description: dict[str, Any]) -> None:
    with _locked(Path(settings.out) / LOCK):
        replace_file(Path(settings.out) / DATA, to_json(description, indent=2))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock on ``path``; the system lets go of it when the process ends in whatever
    way."""
    fcntl = _fcntl()
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_free(path: Path) -> bool:
    if not path.exists():
        return True
    fcntl = _fcntl()
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _fcntl() -> Any:
    try:
        import fcntl
    except ImportError as error:
        raise ConfigError(
            "sweeps need advisory file locks, which this platform lacks; use Linux or macOS"
        ) from error
    return fcntl
