"""The folder of a run: its `RunFolder` writes every file of the run."""

from __future__ import annotations

import errno
import os
import platform
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from wellposed.errors import CheckpointError, ConfigError, DataError, listed
from wellposed.finite_json import from_json, to_json
from wellposed.version import __version__
from wellposed_lab.plugins import import_again
from wellposed_lab.tasks.task import Task
from wellposed_lab.training.config import RunConfig, config_difference, read_toml
from wellposed_lab.training.folder import atomic, checkpoints, manifest
from wellposed_lab.training.folder.result import RESULT, MetricsFile, RunResult, now, read_result
from wellposed_lab.training.folder.state import TrainerState

CONFIG = "config.toml"
ENVIRONMENT = "env.json"
FINAL = "final"
LOCK = "run.lock"
PLACE = "train.device:"
"""Configuration that may change on resume: the device."""
LENGTH = ("train.steps:", "train.epochs:")
"""Configuration that may grow if a run is trained longer."""
_BEGIN = b"process "
_NOT_A_FILE = (errno.ELOOP, errno.EISDIR, errno.EEXIST)
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
PACKAGES = ("torch", "transformers", "tokenizers", "accelerate", "safetensors", "numpy", "datasets")


def read_config(run_folder: Path) -> RunConfig:
    """Return the configuration of a run; a `ConfigError` names all problems of ``config.toml``."""
    return RunConfig.from_dict(_read_values(run_folder), where=str(run_folder / CONFIG))


def import_recorded(run_folder: Path) -> None:
    """Import the Python files of a run, see `wellposed_lab.plugins.import_again`; most have none. A
    file that may not be imported, or no readable ``config.toml``, is a `ConfigError`."""
    files = _read_values(run_folder).get("imports", {})
    if not isinstance(files, Mapping):
        where = run_folder / CONFIG
        raise ConfigError(f"{where}: imports = {files!r}, expected a table of files and SHA-256")
    import_again(files, where=str(run_folder))


def _read_values(run_folder: Path) -> dict[str, Any]:
    path = run_folder / CONFIG
    if not path.exists():
        raise ConfigError(
            f"{run_folder}: not a run folder (no {CONFIG}); name one that `wellposed train` wrote"
        )
    return read_toml(path)


def write_config(run_folder: Path, config: RunConfig) -> None:
    """Write ``config`` as ``config.toml``."""
    import tomli_w

    try:
        data = tomli_w.dumps(config.to_dict()).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{run_folder / CONFIG}: {error.object[max(0, error.start - 40) : error.end]!r} is not"
            " UTF-8, so it cannot be recorded; rename the file or folder"
        ) from error
    atomic.replace_file(run_folder / CONFIG, data)


def check_name(out: Path) -> None:
    """Refuse a name that is not UTF-8 (`ConfigError`), as it cannot be written into the records."""
    try:
        str(out).encode()
    except UnicodeEncodeError as error:
        problem = f"--out {out}: the name is not UTF-8, so a run could not be recorded"
        raise ConfigError(f"{problem}; name another") from error


@dataclass(frozen=True)
class Entry:
    """How a run begins: its checkpoint, the configuration in the folder, and notes for the user."""

    checkpoint: Path | None
    begun: RunConfig
    notes: list[str]


class RunFolder:
    """The files of a run: configuration, starts, rows, checkpoints, measurements, result,
    ``final/``.

    Nothing is created before `lock`. In other processes (``writes=False``) methods write nothing.
    """

    def __init__(self, path: Path, *, writes: bool = True) -> None:
        self.path = path
        self.writes = writes

    def check(self, config: RunConfig, resume: str, *, longer: bool = False) -> None:
        """Refuse a folder that this run cannot use, before any work is done. Nothing is written.

        Args:
            config: the configuration of this start.
            resume: ``"never"`` or ``"auto"``.
            longer: accept more steps or epochs than before.

        Raises:
            ConfigError: the folder is in use without resume, is no run folder or has another
                configuration (all differing fields are listed), or ``resume`` is neither.
        """
        if not self.writes:
            return
        check_name(self.path)
        problem = next(self._problems(resume), "")
        if problem:
            raise ConfigError(problem)
        if not self.is_used():
            return

        begun = read_config(self.path)
        changed = [line for line in config_difference(begun, config) if not line.startswith(PLACE)]
        grows = longer and config.train.steps > begun.train.steps
        if any(not (grows and line.startswith(LENGTH)) for line in changed):
            is_shorter = config.train.steps < begun.train.steps
            shorter = "; a run can be trained longer, never shorter" if is_shorter else ""
            raise ConfigError(
                f"{self.path}: the run was started with another configuration:\n{listed(changed)}\n"
                f"resume with the same options, or train in another folder{shorter}"
            )

    def _problems(self, resume: str) -> Iterator[str]:
        """Yield the reasons against a start in this folder; the user sees the first."""
        out = self.path
        if out.is_file():
            yield f"{out}: is a file, expected a folder; name another --out"
        if resume not in ("never", "auto"):
            newest = "the newest complete checkpoint of --out"
            yield f"--resume {resume}: expected never or auto ({newest}); remove later ones to go back"
        elif self.is_used() and resume == "never":
            other = "name another --out, or continue it with --resume auto"
            yield f"{out}: already holds files; {other}"
        if self.is_used() and not (out / CONFIG).is_file():
            no_run = f"holds files but no {CONFIG}, so it is not a run to resume"
            yield f"{out}: {no_run}; name another --out"

    def is_used(self) -> bool:
        """Return whether the folder has any file besides a lock and leftovers of a killed write."""
        if not self.path.is_dir():
            return self.path.exists()
        names = [path.name for path in self.path.iterdir() if not atomic.is_litter(path)]
        return any(name != LOCK for name in names)

    def check_data(self, task: Task) -> None:
        """Refuse to continue a run, or to take its result, if its data has changed since it began.
        Data or older folders without digests are not compared.

        Raises:
            DataError: each file or split that changed, with both digests.
            CheckpointError: the record is damaged.
        """
        begun = read_environment(self.path).get(DATA) if self.writes else None
        if not isinstance(begun, dict):
            return
        digests = data_digests(task.description())
        pairs = {name: (begun.get(name), digests.get(name)) for name in {**begun, **digests}}
        changed = [f"{k}: SHA-256 was {a}, is {b}" for k, (a, b) in pairs.items() if a != b]
        if changed:
            problem = f"{self.path}: the data has changed since the run began:\n{listed(changed)}"
            raise DataError(f"{problem}\nrestore it, or train in another folder")

    def finished(self, config: RunConfig, task: Task | None, *, longer: bool) -> RunResult | None:
        """Return the verified result of a successful run that is not to be trained longer."""
        result = read_result(self.path)
        if result is None or result.status != "success" or not (self.path / FINAL).is_dir():
            return None
        if longer and result.result["config"]["train"]["steps"] != config.train.steps:
            return None
        manifest.verify_final(self.path / FINAL)
        if task is not None:
            self.check_data(task)
        return result

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock of the folder, which is created if missing; a killed process loses its
        lock. A file system without locks gives no protection. Only our own lock file is written to.

        Raises:
            ConfigError: another process (number, host) has the lock; or its name is a link or
                taken.
        """
        if not self.writes:
            yield
            return
        from filelock import FileLock, Timeout

        self.path.mkdir(parents=True, exist_ok=True)
        path = self.path / LOCK
        lock = FileLock(path, timeout=0, fallback_to_soft=False, on_acquired=_write_owner)
        try:
            lock.acquire()
        except Timeout:
            owner = ""
            with suppress(OSError):  # released at this moment
                owner = path.read_text(encoding="utf-8", errors="replace").strip()
            raise ConfigError(
                f"{self.path}: {owner or 'another process'} is writing this run (it holds {LOCK});"
                " wait for it, stop it, or name another --out"
            ) from None
        except OSError as error:
            if error.errno in _NOT_A_FILE:
                raise ConfigError(
                    f"{path}: expected the lock file of the run, found a link or another file; rename it,"
                    " or name another --out"
                ) from error
            if error.errno not in _NO_LOCKS:
                raise
        try:
            yield
        finally:
            if lock.is_locked:
                with suppress(OSError):  # the folder became unwritable, or was removed
                    path.unlink()
                lock.release()

    def enter(self, config: RunConfig, resume: str) -> Entry:
        """Create the folder, or tidy an old one, and choose the checkpoint to start from. If all
        are damaged, that is a `CheckpointError`. A run that is trained longer has no result until
        it ends again; its ``final/`` stays until then."""
        if not self.is_used():
            if self.writes:
                self.path.mkdir(parents=True, exist_ok=True)
                write_config(self.path, config)
            return Entry(None, config, [])

        if self.writes:
            atomic.remove_litter(self.path)
        checkpoint, notes = self._checkpoint(resume)
        begun = read_config(self.path)
        if self.writes and config.train.steps > begun.train.steps:
            # Before the configuration: a kill must not leave the old result with a new one.
            (self.path / RESULT).unlink(missing_ok=True)
        if self.writes and config != begun:
            write_config(self.path, config)

        return Entry(checkpoint, begun, notes)

    def _checkpoint(self, resume: str) -> tuple[Path | None, list[str]]:
        """Return the verified checkpoint that ``resume`` means, and notes for the user."""
        if resume == "never":
            return None, []
        checkpoint, damaged = checkpoints.newest_complete(self.path)
        if checkpoint is None and damaged:
            raise CheckpointError(f"{self.path}: no checkpoint can be used:\n" + listed(damaged))
        notes = [f"skipped a damaged checkpoint: {problem}" for problem in damaged]
        none = f"{self.path}: no checkpoint yet; starting from step 0"
        return checkpoint, [*notes, f"resuming from {checkpoint}" if checkpoint else none]

    def record_start(self, environment: dict[str, Any], step: int) -> None:
        """Append this start to ``env.json``; if that is damaged, it is a `CheckpointError`."""
        if not self.writes:
            return
        # Training rewrites the files of an earlier manifest; a kill must not leave a stale one.
        (self.path / manifest.MANIFEST).unlink(missing_ok=True)
        starts = read_environment(self.path).get("starts", [])
        entry = {"from_step": step, "date": environment["date"], "command": environment["command"]}
        data = to_json({**environment, "starts": [*starts, entry]}, indent=2)
        atomic.replace_file(self.path / ENVIRONMENT, data)

    def metrics(self, rows: int) -> MetricsFile:
        """Open ``metrics.jsonl`` after its first ``rows`` rows."""
        return MetricsFile(self.path, rows=rows, enabled=self.writes)

    def save(self, files: Mapping[str, bytes], state: TrainerState, *, keep: int) -> None:
        """Write a checkpoint; keep the newest ``keep`` and the best one."""
        if self.writes:
            checkpoints.write_checkpoint(self.path, state.step, files)
            checkpoints.prune(self.path, step=state.step, keep=keep, best_step=state.best_step)

    def end(self, result: RunResult) -> RunResult:
        """Write manifest and ``result.json`` in one step, which ends the run."""
        if self.writes:
            path = self.path / RESULT
            data = to_json(result.result, indent=2)
            path.unlink(missing_ok=True)  # the manifest does not list the old one
            manifest.write_manifest(self.path, manifest.RECORDS, coming={RESULT: data})
            atomic.replace_file(path, data)
        return result


def _write_owner(handle: int) -> None:
    """Write process and host into the lock file; refuse any other file."""
    status = os.fstat(handle)
    is_plain = stat.S_ISREG(status.st_mode) and status.st_nlink <= 1
    if not is_plain or (status.st_size and os.read(handle, len(_BEGIN)) != _BEGIN):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
    os.truncate(handle, 0)
    os.lseek(handle, 0, os.SEEK_SET)
    os.write(handle, _BEGIN + f"{os.getpid()} on {socket.gethostname()}\n".encode())


def usual_folder(task: str, *, last: bool, first: bool = False) -> Path:
    """Return the first free folder ``runs/TASK``, ``runs/TASK-2``, ..., or the last one in use.
    Processes of one launcher all take the ``first`` name, as they could not agree on another."""
    folder = Path("runs") / task
    number = 2
    while folder.exists() and not first:
        following = folder.with_name(f"{task}-{number}")
        if last and not following.exists():
            break
        folder = following
        number = number + 1
    return folder


def environment(command: Sequence[str] | None, task: Task | None = None) -> dict[str, Any]:
    """Return what repeats the run: versions, hardware, threads, source, command, data digests."""
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    data = {} if task is None else {DATA: data_digests(task.description())}
    return {
        **data,
        "date": now(),
        "command": list(command) if command is not None else list(sys.argv),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": versions(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": gpus,
        "git_hash": git_hash(),
    }


def read_environment(run_folder: Path) -> dict[str, Any]:
    """Return the content of ``env.json``, empty without the file; damage is a `CheckpointError`."""
    path = run_folder / ENVIRONMENT
    if not path.is_file():
        return {}
    try:
        values = from_json(path.read_bytes())
        return {**values, "starts": list(values.get("starts", []))}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: not a record of earlier starts ({error}); checkpoints are intact: restore"
            " or remove it, then continue with --resume auto"
        ) from error


def versions() -> dict[str, str]:
    """Return the installed version of every package that can change a result."""
    installed = {"python": platform.python_version(), "wellposed": __version__}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


def git_hash() -> str | None:
    """Return the commit of the wellposed source in use, or None if it is not a checkout."""
    here = Path(__file__)
    quiet: dict[str, Any] = {"stderr": subprocess.DEVNULL, "timeout": 10}
    git = ["git", "-C", str(here.parent)]
    try:
        subprocess.check_output([*git, "ls-files", "--error-unmatch", here.name], **quiet)
        return subprocess.check_output([*git, "rev-parse", "HEAD"], **quiet).decode().strip()
    except (OSError, subprocess.SubprocessError):
        return None


DATA = "data"
DIGEST = "sha256"


def data_digests(description: Mapping[str, Any]) -> dict[str, str]:
    """Return every SHA-256 in a description of data, by its place.

    >>> data_digests({"source": "a/", "files": {"train": {"sha256": "ab", "bytes": 3}}, "sha256": {"test": "cd"}})
    {'files.train': 'ab', 'test': 'cd'}
    """
    digests = {keys: str(digest) for keys, digest in leaves(description) if DIGEST in keys}
    return {".".join(n for n in keys if n != DIGEST): value for keys, value in digests.items()}


def leaves(value: Any, keys: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the values of nested tables, each with the names that lead to it.

    >>> list(leaves({"a": {"b": 1}, "c": 2}))
    [(('a', 'b'), 1), (('c',), 2)]
    """
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from leaves(inner, (*keys, str(name)))
    else:
        yield keys, value


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
