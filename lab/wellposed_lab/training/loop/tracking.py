"""Progress of a run on standard error, and its metrics for Accelerate's trackers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

from wellposed.errors import ConfigError, is_about_resources, unknown_name
from wellposed.options import flat_options

logger = logging.getLogger("wellposed_lab.training")

PROJECT = "wellposed"


def check_trackers(names: Iterable[str]) -> None:
    """Refuse (`ConfigError`) a tracker that Accelerate does not know, or that is not installed."""
    names = tuple(names)
    if not names:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers
    from accelerate.utils import LoggerType

    for name in names:
        if name not in LOGGER_TYPE_TO_CLASS:
            raise unknown_name("tracker", name, LOGGER_TYPE_TO_CLASS)
        if name in LoggerType.list() and name not in map(str, get_available_trackers()):
            package = name.replace("_", "-")
            problem = f"--track {name} needs the package {package!r}, which is not installed"
            raise ConfigError(f"{problem}; nothing was trained; run: pip install {package}")


class Trackers:
    """The open records of one run, one for each tracker; a resumed run begins a new record.

    A tracker that raises never ends the run: ``warn`` reports it once, then it is left out.
    ``names`` are as for `check_trackers`; trackers that write files use the run ``folder``.
    """

    def __init__(
        self,
        names: Iterable[str],
        folder: Path,
        config: Mapping[str, Any],
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        self._warn = warn
        self._step = 0
        self._open: dict[str, Any] = {}
        for name in dict.fromkeys(names):
            from accelerate.tracking import LOGGER_TYPE_TO_CLASS

            kind: Any = LOGGER_TYPE_TO_CLASS[name]
            project = name if name == "tensorboard" else PROJECT
            with self._surviving(name):
                tracker = kind(project, *([folder] if kind.requires_logging_directory else []))
                tracker.start()
                tracker.store_init_configuration(flat_options(config))
                self._open[name] = tracker

    def row(self, row: Mapping[str, Any]) -> None:
        """Send one row of ``metrics.jsonl``, as ``train/loss`` and so on."""
        # A test row may have an earlier step, and records only grow.
        self._step = max(self._step, int(row["step"]))
        self._log({f"{row['split']}/{name}": row[name] for name in row if name != "step"})

    def end(self, results: Mapping[str, float], *, succeeded: bool) -> None:
        """Send the results ``metric,split`` as ``final/split/metric``."""
        named = {"/".join(["final", *name.split(",")[::-1]]): results[name] for name in results}
        self._log({"final/succeeded": int(succeeded), **named})

    def _log(self, values: Mapping[str, Any]) -> None:
        numbers = {name: value for name, value in values.items() if type(value) in (int, float)}
        for name, tracker in list(self._open.items()):
            with self._surviving(name):
                tracker.log(numbers, step=self._step)

    def close(self) -> None:
        for name, tracker in list(self._open.items()):
            with self._surviving(name):
                tracker.finish()

    @contextmanager
    def _surviving(self, name: str) -> Iterator[None]:
        try:
            with redirect_stdout(sys.stderr):  # standard output is for results only
                yield
        except Exception as error:
            if is_about_resources(error):
                raise
            self._open.pop(name, None)
            reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            self._warn(f"tracker {name}: {reason}; the run continues without it")


SHOWN = ("loss", "penalty", "grad_norm", "learning_rate", "tokens_per_second")


class Progress:
    """Progress of one run on standard error; standard output is for results only. rich respects
    ``NO_COLOR``. Every message also goes to the logger ``wellposed_lab.training``."""

    def __init__(self, *, enabled: bool, steps: int, description: str) -> None:
        self._enabled = enabled
        self._steps = steps
        self._description = description
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if self._enabled and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            numbers = "loss {task.fields[loss]} {task.fields[speed]} tokens/s eta"
            self._bar = Bar(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn(numbers),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            fields = {"total": self._steps, "loss": "-", "speed": "-"}
            self._task = self._bar.add_task(self._description, **fields)
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def warn(self, message: str) -> None:
        self.say(message, warn=True)

    def say(self, message: str, *, warn: bool = False) -> None:
        logger.log(logging.WARNING if warn and not self._enabled else logging.INFO, "%s", message)
        if self._bar is not None:
            self._bar.console.print(message, markup=False, highlight=False, soft_wrap=True)
        elif self._enabled:
            sys.stderr.write(message + "\n")
            sys.stderr.flush()

    def start(self, step: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def row(self, row: dict[str, Any]) -> None:
        if row["split"] in {"monitor", "alarm"}:
            return  # hundreds of numbers, and alarms are logged with their reason
        if row["split"] != "train":
            numbers = _numbers(row, skip=("step", "seconds"))
            best = " (best)" if row.get("best") else ""
            self.say(f"step {row['step']}/{self._steps} {row['split']}: {numbers}{best}")
        elif self._bar is not None:
            fields = {"loss": f"{row['loss']:.4f}", "speed": f"{row['tokens_per_second']:,.0f}"}
            self._bar.update(self._task, completed=row["step"], **fields)
        elif self._enabled:
            numbers = _numbers({name: row[name] for name in SHOWN if name in row})
            self.say(f"step {row['step']}/{self._steps} {numbers}")


def _numbers(row: dict[str, Any], *, skip: tuple[str, ...] = ()) -> str:
    return " ".join(
        f"{name} {value:.4g}" if abs(value) < 1e5 else f"{name} {value:,.0f}"
        for name, value in row.items()
        if name not in skip and isinstance(value, int | float) and not isinstance(value, bool)
    )
