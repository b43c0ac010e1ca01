"""What a person sees while a run goes on: a bar on a terminal, plain lines elsewhere, nothing when
switched off."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

logger = logging.getLogger("wellposed.training")

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
