"""``metrics.jsonl``: one row per line, appended; cut back to the rows of the checkpoint on
resume."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from wellposed.errors import CheckpointError
from wellposed.finite_json import from_json, to_json
from wellposed.regular_file import read_bytes
from wellposed.training.folder import durable_files

NAME = "metrics.jsonl"
_RESTORE = "restore the file, or train in another folder"


class MetricsFile:
    """The rows of a run so far. Opening it with ``rows=n`` removes every row after the first n, and
    half a line.

    Only one process of a run writes; on the others (``enabled=False``) rows are counted alone.
    """

    def __init__(self, run_folder: Path, *, rows: int = 0, enabled: bool = True) -> None:
        self.path = run_folder / NAME
        self.rows = _truncate(self.path, rows) if enabled else rows
        self._file = self.path.open("ab") if enabled else None

    def append(self, row: dict[str, Any]) -> None:
        """Add one row; it is visible to readers at once.

        Raises:
            CheckpointError: the disk is full or cannot be written.
        """
        if self._file is not None:
            with durable_files.full_disk_in_a_line(self.path, "a row"):
                self._file.write(to_json(row))
                self._file.flush()
        self.rows += 1

    def sync(self) -> int:
        """Wait until every row is on the disk and return their number; a checkpoint counts no row a
        crash can lose."""
        if self._file is not None:
            os.fsync(self._file.fileno())
        return self.rows

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()


def read_metrics(run_folder: Path) -> list[dict[str, Any]]:
    """Return the complete rows of ``metrics.jsonl``.

    Raises:
        CheckpointError: a line that is no row, by its number.
    """
    path, rows = run_folder / NAME, []
    for number, line in enumerate(_complete_lines(path), 1):
        try:
            row = from_json(line)
        except ValueError as error:
            raise CheckpointError(f"{path}:{number}: not JSON: {error}; {_RESTORE}") from error
        if not isinstance(row, dict):
            raise CheckpointError(f"{path}:{number}: expected a JSON object; {_RESTORE}")
        rows.append(row)
    return rows


def _truncate(path: Path, rows: int) -> int:
    lines = _complete_lines(path)[:rows]
    if len(lines) < rows:
        problem = f"{len(lines)} complete rows, but the checkpoint was written after {rows}"
        raise CheckpointError(f"{path}: {problem}; {_RESTORE}")
    if path.exists() or path.is_symlink():
        durable_files.replace_file(path, b"".join(lines))
    return len(lines)


def _complete_lines(path: Path) -> list[bytes]:
    if not path.exists():
        return []
    return [line for line in read_bytes(path).splitlines(keepends=True) if line.endswith(b"\n")]
