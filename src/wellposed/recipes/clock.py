"""How long a recipe took over all the calls that it needed; free of torch."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from wellposed.errors import DataError
from wellposed.training.folder.durable_files import replace_file


class Clock:
    """Count seconds over several processes: what ran before a stop or a kill is kept in a file.

    Args:
        file: where the seconds are kept at every `tick`; None for work that starts anew in each
        call.
    """

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self._before = 0.0 if file is None or not file.is_file() else _read(file)
        self._started = time.perf_counter()

    def tick(self) -> float:
        """Return the seconds so far, of this call and those before it."""
        seconds = self._before + time.perf_counter() - self._started
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.file, f"{seconds:.1f}\n".encode())
        return seconds


@dataclass(frozen=True)
class Ticking:
    """A line of progress that also keeps the time; it can be sent to another process of this
    machine."""

    clock: Clock
    announce: Callable[[str], None]

    def __call__(self, line: str) -> None:
        self.clock.tick()
        self.announce(line)


def _read(file: Path) -> float:
    text = file.read_text(encoding="utf-8")
    try:
        return float(text)
    except ValueError as error:
        raise DataError(
            f"{file}: expected the seconds of earlier calls, found {text[:40]!r}; remove the file"
        ) from error
