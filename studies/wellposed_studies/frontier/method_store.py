"""The file of the trainings of `frontier/methods`: a line each, so that the study stops and resumes anywhere."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wellposed_studies.frontier.method_data import Training

Result = Mapping[str, Any]


@dataclass
class Store:
    """Results by training. A line that a crash cut short is not a result."""

    path: Path
    results: dict[str, Result] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.path.is_file():
            return
        for line in self.path.read_text("utf-8").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            self.results[_key(record["training"])] = record["result"]

    def find(self, training: Training) -> Result | None:
        """Return the result of a training that has ended; None if it has not."""
        return self.results.get(_key(asdict(training)))

    def find_or(self, training: Training, run: Callable[[Training], Result]) -> Result:
        """Return the result of a training; run it and add it to the file if it has not ended before."""
        ended = self.find(training)
        if ended is not None:
            return ended

        result = run(training)
        record = {"training": asdict(training), "result": result}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            file.write(_line_end(file) + json.dumps(record).encode() + b"\n")
        self.results[_key(record["training"])] = result
        return result


def _line_end(file: IO[bytes]) -> bytes:
    """Return what ends the last line of a file, if a crash cut it short."""
    if file.seek(0, os.SEEK_END) == 0:
        return b""
    file.seek(-1, os.SEEK_END)
    return b"" if file.read(1) == b"\n" else b"\n"


def _key(training: Mapping[str, Any]) -> str:
    return json.dumps(training, sort_keys=True)
