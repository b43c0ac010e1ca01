"""Progress of a run on standard error (a bar on a terminal, else plain lines), and its metrics sent to trackers of
Accelerate (TensorBoard, Trackio, Weights & Biases, ...)."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from wellposed.errors import ConfigError, unknown_name
from wellposed.finite_json import from_json, to_json
from wellposed.options import flat_options
from wellposed.training.folder import durable_files

logger = logging.getLogger("wellposed.training")

NAME = "trackers.json"
PROJECT = "wellposed"
Images = Mapping[str, Any]
"""Name -> pixels, (height, width, 3), uint8."""


@dataclass(frozen=True)
class Tracking:
    """Where runs are reported to while they train: names of trackers, and what draws the figures of
    a finished run."""

    names: tuple[str, ...] = ()
    figures: Callable[[Path], Images] | None = None


NOT_TRACKED = Tracking()


def check_trackers(names: Iterable[str]) -> None:
    """Refuse a tracker that Accelerate does not know, or whose package is not installed.

    Raises:
        ConfigError: such a name.
    """
    if not (names := tuple(names)):
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
    """The open records of one run, one for each tracker; closed at the end of a ``with``.

    A tracker that raises never ends the run: its first error is told at once, how often it failed
    at the end, and the files of the run hold everything. A folder that was tracked before continues
    its records in TensorBoard, Trackio and Weights & Biases; other trackers begin a new one.

    Args:
        tracking: names as `check_trackers` accepts them.
        folder: of the run; it keeps the identity of its records.
        title: of the records.
        config: nested plain values.
        step: the step this start begins at.
        warn: called with each problem.
    """

    def __init__(
        self,
        tracking: Tracking,
        folder: Path,
        *,
        title: str,
        config: Mapping[str, Any],
        step: int = 0,
        warn: Callable[[str], None] = logger.warning,
    ) -> None:
        self._folder, self._figures, self._warn, self._step = folder, tracking.figures, warn, step
        self._lost: Counter[str] = Counter()
        self._open: dict[str, Any] = {}
        if not tracking.names:
            return
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        identity, begun = _identity(folder, tracking.names)
        plain = flat_options(config)
        options: dict[str, dict[str, Any]] = {
            "tensorboard": {"purge_step": step + 1},  # rows after the checkpoint are written again
            "trackio": {"name": f"{title} {identity[:8]}", "resume": "allow"},
            "wandb": {"id": identity, "name": title, "resume": "allow"},
        }

        def start(name: str) -> None:
            kind: Any = LOGGER_TYPE_TO_CLASS[name]
            project = name if name == "tensorboard" else PROJECT
            place = [folder] if kind.requires_logging_directory else []
            tracker = kind(project, *place, **options.get(name, {}))
            tracker.start()
            self._open[name] = tracker
            if name != "tensorboard" or name not in begun:  # it would make a second record
                tracker.store_init_configuration(plain)

        self._each(dict.fromkeys(tracking.names), start)

    def row(self, row: Mapping[str, Any]) -> None:
        """Send one row of ``metrics.jsonl``, as ``train/loss`` and so on."""
        # The step of a test row may be past, and records only grow.
        self._step = max(self._step, int(row["step"]))
        self._log({f"{row['split']}/{name}": row[name] for name in row if name != "step"})

    def end(self, results: Mapping[str, float], *, succeeded: bool) -> None:
        """Send ``metric,split`` of the results as ``final/split/metric``, and the figures of a run
        that succeeded."""
        named = {"/".join(["final", *name.split(",")[::-1]]): results[name] for name in results}
        self._log({"final/succeeded": int(succeeded), **named})
        able = [name for name, tracker in self._open.items() if hasattr(tracker, "log_images")]
        if not (able and succeeded and self._figures):
            return
        try:
            images = {name: pixels[None] for name, pixels in self._figures(self._folder).items()}
        except Exception as error:
            self._warn(f"no figures for {', '.join(able)}: {type(error).__name__}: {error}")
            return

        def draw(name: str) -> None:
            how = {"dataformats": "NHWC"} if name == "tensorboard" else {}
            self._open[name].log_images(images, step=self._step, **how)

        self._each(able, draw)

    def _log(self, values: Mapping[str, Any]) -> None:
        kinds = (int, float)
        numbers = {name: value for name, value in values.items() if type(value) in kinds}
        self._each(self._open, lambda name: self._open[name].log(numbers, step=self._step))

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *error: object) -> None:
        self._each(self._open, lambda name: self._open[name].finish())
        for name, count in self._lost.items():
            if count > 1:
                lost = f"tracker {name}: {count} records did not arrive"
                self._warn(f"{lost}; the files of the run have them")

    def _each(self, names: Iterable[str], act: Callable[[str], None]) -> None:
        for name in names:
            try:
                with redirect_stdout(sys.stderr):  # standard output holds results alone
                    act(name)
            except Exception as error:
                self._lost[name] += 1
                if self._lost[name] == 1:
                    said = str(error).partition("\n")[0]
                    self._warn(f"tracker {name}: {type(error).__name__}: {said}; the run goes on")


def _identity(folder: Path, names: Sequence[str]) -> tuple[str, list[str]]:
    """Return what names the records of ``folder``, made at its first start, and the trackers that
    have one already."""
    path = folder / NAME
    try:
        known = from_json(path.read_bytes())
        identity, begun = str(known["identity"]), [str(name) for name in known["trackers"]]
    except (OSError, ValueError, KeyError, TypeError):
        identity, begun = uuid4().hex, []
    values = {"identity": identity, "trackers": list(dict.fromkeys([*begun, *names]))}
    durable_files.replace_file(path, to_json(values))
    return identity, begun


SECONDS_BETWEEN_LINES = 10.0
SHOWN = ("loss", "penalty", "grad_norm", "learning_rate", "tokens_per_second")


class Progress:
    """Progress of one run on standard error, so that standard output holds results alone.

    ``NO_COLOR`` is respected, as rich reads it. Every message also goes to the logger
    ``wellposed.training``.
    """

    def __init__(self, *, enabled: bool, steps: int, description: str) -> None:
        self._enabled, self._steps, self._description = enabled, steps, description
        self._bar: Any = None
        self._task: Any = None
        self._first_step, self._began = 0, 0.0
        self._parts: dict[str, Any] = {}

    def __enter__(self) -> Progress:
        if self._enabled and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
            from rich.progress import Progress as Bar

            numbers = "loss {task.fields[loss]} {task.fields[speed]} tokens/s eta"
            shown = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
            shown += (TextColumn(numbers), TimeRemainingColumn())
            self._bar = Bar(*shown, console=Console(stderr=True))
            given = {"total": self._steps, "loss": "-", "speed": "-"}
            self._task = self._bar.add_task(self._description, **given)
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, message: str, *, warn: bool = False) -> None:
        """Show one line of text."""
        logger.log(logging.WARNING if warn and not self._enabled else logging.INFO, "%s", message)
        if self._bar is not None:
            self._bar.console.print(message, markup=False, highlight=False, soft_wrap=True)
        elif self._enabled:
            sys.stderr.write(message + "\n")
            sys.stderr.flush()

    def start(self, step: int) -> None:
        """Note the step the run starts from, for the time that remains."""
        self._first_step, self._began = step, time.monotonic()
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def part(self, name: str, done: int, count: int) -> None:
        """Show how far a part of the run is that has no steps: a bar of its own, or a line every
        ten seconds."""
        began = name not in self._parts
        now = time.monotonic()
        if self._bar is not None:
            if began:
                self._parts[name] = self._bar.add_task(name, total=count, loss="-", speed="-")
            self._bar.update(self._parts[name], completed=done, total=count)
        elif began or now - self._parts[name] >= SECONDS_BETWEEN_LINES:
            self._parts[name] = now
            self.say(f"{name}: {done}/{count}")

    def row(self, row: dict[str, Any]) -> None:
        """Show one row of ``metrics.jsonl``."""
        if row["split"] in {"monitor", "alarm"}:
            return  # hundreds of numbers, and what is logged with its reason
        if row["split"] != "train":
            numbers = _numbers(row, skip=("step", "seconds"))
            best = " (best)" if row.get("best") else ""
            self.say(f"step {row['step']}/{self._steps} {row['split']}: {numbers}{best}")
        elif self._bar is not None:
            shown = {"loss": f"{row['loss']:.4f}", "speed": f"{row['tokens_per_second']:,.0f}"}
            self._bar.update(self._task, completed=row["step"], **shown)
        elif self._enabled:
            numbers = _numbers({name: row[name] for name in SHOWN if name in row})
            left = self._remaining(row["step"])
            self.say(f"step {row['step']}/{self._steps} {numbers} eta {left}")

    def _remaining(self, step: int) -> str:
        done = step - self._first_step
        if done <= 0:
            return "-"
        seconds = round((time.monotonic() - self._began) / done * (self._steps - step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


def _numbers(row: dict[str, Any], *, skip: tuple[str, ...] = ()) -> str:
    return " ".join(
        f"{name} {value:.4g}" if abs(value) < 1e5 else f"{name} {value:,.0f}"
        for name, value in row.items()
        if name not in skip and isinstance(value, int | float) and not isinstance(value, bool)
    )
