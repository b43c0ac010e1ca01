"""``python -m tools.faults [FAMILY ...]``: look for faults at size, write the page, exit 1 where
one was found."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = ("kills", "damage", "full_disk", "two_writers", "clock", "hostile", "fuzz")
Announce = Callable[[str], None]


def main(words: list[str] | None = None) -> int:
    """Run the families named, keep their rows in a file, write the page of all rows kept, and say
    what was found."""
    options = _options(words)
    for name, value in {
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }.items():
        os.environ.setdefault(name, value)
    from tools.faults import children, page, toys
    from tools.faults.outcome import Row

    began = time.monotonic()
    children.import_everything()
    children.draw_plainly()
    place = Path(tempfile.mkdtemp(prefix="faults-", dir=options.work))
    kept: dict[str, dict[str, Any]] = (
        json.loads(options.rows.read_text()) if options.rows.is_file() else {}
    )
    found = 0
    try:
        made = toys.write_data(place)
        _say(f"imported everything: {time.monotonic() - began:.0f} s")
        for family in options.families:
            before = time.monotonic()
            old = kept.get(family, {}).get("rows", []) if options.only else []
            command = kept[family]["command"] if old else _command(family, options)
            rows: list[Row] = []
            for row in _run(family, made, options):
                rows.append(row)
                found += len(row.faults)
                _say(f"{family}: {row.what}: {row.tried} {row.unit}, {len(row.faults)} faults")
                again = {each.what: asdict(each) for each in rows}
                merged = [again.pop(each["what"], each) for each in old]
                kept[family] = {
                    "command": command,
                    **page.circumstances(),
                    "rows": [*merged, *again.values()],
                }
                options.rows.parent.mkdir(parents=True, exist_ok=True)
                options.rows.write_text(json.dumps(kept, indent=1) + "\n")
                options.page.write_text(page.text(kept), encoding="utf-8")
            _say(f"{family}: {time.monotonic() - before:.0f} s")
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return 1 if found else 0


def _options(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.faults", description=__doc__)
    parser.add_argument(
        "families", nargs="*", default=list(FAMILIES), metavar="FAMILY", help=", ".join(FAMILIES)
    )
    parser.add_argument("--kills", type=int, default=200, help="signals that meet a living command")
    parser.add_argument("--damaged", type=int, default=1600, help="files that are damaged")
    parser.add_argument("--inputs", type=int, default=300_000, help="inputs of parsers")
    parser.add_argument(
        "--failures",
        type=int,
        default=200,
        help="operations that a full disk fails, and sizes of disks",
    )
    parser.add_argument("--meetings", type=int, default=50, help="meetings of two or three writers")
    parser.add_argument("--clocks", type=int, default=50, help="runs under clocks that jump")
    parser.add_argument(
        "--only", default="", help="words, between commas: only rows with one in their name"
    )
    parser.add_argument("--jobs", type=int, default=2, help="processes of damage and fuzz")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--rows",
        type=Path,
        default=ROOT / "runs" / "faults.json",
        help="where the rows of families are kept",
    )
    parser.add_argument(
        "--page",
        type=Path,
        default=ROOT / "docs" / "reliability.md",
        help="the page of all rows kept",
    )
    parser.add_argument(
        "--work", type=Path, default=Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    )
    options = parser.parse_args(words)
    if unknown := [name for name in options.families if name not in FAMILIES]:
        parser.error(f"unknown family {', '.join(unknown)}; there are: {', '.join(FAMILIES)}")
    return options


def _run(family: str, made: Any, options: argparse.Namespace) -> Iterator[Any]:
    from tools.faults import clock, damage, full_disk, fuzz, hostile, kills, two_writers

    seed, only = options.seed, options.only
    families: dict[str, Callable[[], Iterator[Any]]] = {
        "kills": lambda: kills.run(made, options.kills, seed, only),
        "damage": lambda: damage.run(made, options.damaged, seed, only, options.jobs),
        "full_disk": lambda: full_disk.run(made, options.failures, seed, only),
        "two_writers": lambda: two_writers.run(made, options.meetings, seed, only),
        "clock": lambda: clock.run(made, options.clocks, seed, only),
        "hostile": lambda: hostile.run(made, only),
        "fuzz": lambda: fuzz.run(options.inputs, seed, made.root / "fuzz", only, options.jobs),
    }
    return families[family]()


_SIZES = {
    "kills": "kills",
    "damage": "damaged",
    "full_disk": "failures",
    "two_writers": "meetings",
    "clock": "clocks",
    "fuzz": "inputs",
}


def _command(family: str, options: argparse.Namespace) -> str:
    size = f" --{_SIZES[family]} {getattr(options, _SIZES[family])}" if family in _SIZES else ""
    return f"python -m tools.faults {family}{size} --seed {options.seed}"


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
