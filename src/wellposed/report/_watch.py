"""A report that is written again while its runs go on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from wellposed.errors import DataError
from wellposed.report._page import build_report

State = frozenset[tuple[str, int, int]]


def watch_report(
    run_dirs: Sequence[Path], out: Path, announce: Callable[[str], None], *, every: float = 2.0
) -> None:
    """Write the page of `build_report` whenever a file of the folders changes, until Ctrl-C.

    The page loads itself again in an open browser; the one that is left at the end does not. At
    every moment the file is a whole page. A folder that has no run yet, or a file that is being
    written, is waited for.

    Args:
        run_dirs: run folders, or folders that hold run folders.
        out: file to write.
        announce: called with one line for each page that is written, and for what is waited for.
        every: seconds between two looks.

    Raises:
        ConfigError: matplotlib or jinja2 is not installed.

    Cost: the size and date of every file of the folders at each look; a page where something
    changed.
    """
    refresh = max(2, round(every))
    try:
        seen, said = None, ""
        while True:
            state = _state(run_dirs)
            if state != seen:
                seen, line = state, _write(run_dirs, out, refresh)
                if line != said:
                    said = line
                    announce(line)
            time.sleep(every)
    except KeyboardInterrupt:
        announce(_write(run_dirs, out, None))


def _write(run_dirs: Sequence[Path], out: Path, refresh: int | None) -> str:
    try:
        return f"report: {build_report(run_dirs, out, refresh=refresh)}"
    except DataError as error:
        return f"waiting: {error}"


def _state(run_dirs: Sequence[Path]) -> State:
    """Return name, date and size of every file that a page is made of."""
    found = set()
    for folder in run_dirs:
        for suffix in ("json", "jsonl", "toml", "csv", "svg", "md"):
            for file in folder.rglob(f"*.{suffix}"):
                try:
                    stat = file.stat()
                except OSError:  # it was renamed or removed meanwhile
                    continue
                found.add((str(file), stat.st_mtime_ns, stat.st_size))
    return frozenset(found)
