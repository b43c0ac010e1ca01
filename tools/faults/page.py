"""docs/reliability.md: what was tried, how often, and how often it went wrong."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from tools.faults.outcome import KINDS

PACKAGES = ("torch", "transformers", "safetensors", "numpy")
TITLES = {
    "kills": "Killed and interrupted",
    "damage": "Damaged files",
    "full_disk": "A disk that is full",
    "two_writers": "Two at once",
    "clock": "Clocks that jump",
    "hostile": "Hostile folders",
    "fuzz": "Fuzzed input",
}
HEAD = """# What can go wrong, and what is lost

Written by `python -m tools.faults`, which looks for faults at size; not edited by hand. A small instance of every
family runs in `make test`.

## What is promised

- A run that is killed, at any moment and however often, goes on with `--resume auto` to the same weights, bit for bit
  on a CPU, as one that nobody disturbed; so does `compare`. `reproduce` trains again what was not finished.
- A file with a good name is whole: everything is written under a temporary name (`.tmp-...`), synced and renamed. What
  a kill leaves under a temporary name is never read, and goes with the next start that writes the same file. The rows
  of `metrics.jsonl` are added one by one; half a row at its end is cut off.
- SIGINT, SIGTERM and SIGHUP end the step, save a checkpoint and end the command; before the first step they end it at
  once.
- Weights and records of a finished run, and every checkpoint, are checked against SHA-256 digests before they are used.
  A damaged file is named; a damaged newest checkpoint is passed over for the one before.
- A run goes on with the data that it began with: digests of its files are kept at the start, and data that has changed
  since is refused, by a finished run too where `compare` or `reproduce` would take its result.
- A disk that is full ends a command with one line. What was whole stays whole.
- A run folder has one writer. A second one is refused, and told who has it.
- No code of a model folder runs, and no pickle is loaded.
- Every malformed input ends in an error of `wellposed.errors`.

## What is not promised

- Digests find damage, not malice: who can change a file can change the manifest beside it.
- Where nothing describes a file (a run in progress, the tables of reproductions), a changed digit cannot be
  told from a true one.
- Locks are those of the file system; on Windows and on some network disks there are none, and two writers can meet.
- A power cut can take what the disk said it had written; only what the operating system was asked to sync is sure.
- After a kill on a GPU the weights are the same up to the order of its sums.
- A regular expression of your own (`where="re:..."`) can take for ever.

## What was tried

Right is stated at the head of each family's file in `tools/faults`. A row is of the last time that it was tried: faults
found before it were mended, each has a test in `tests/faults` or beside what it tests, and the changelog lists them.
Commands run at toy size in processes forked from one that has imported everything; figures are written as digests, not
drawn. The columns count what was not right:

"""


def circumstances() -> dict[str, str]:
    """Return date, machine and versions."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": f"{_cpu()}, {platform.system()}",
        "versions": ", ".join([f"Python {platform.python_version()}", *_versions()]),
    }


def text(kept: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the page of the families whose rows are kept."""
    parts = [HEAD + "".join(f"- **{kind}**: {what}\n" for kind, what in KINDS.items())]
    whole = Counter[str]()
    for family, title in TITLES.items():
        if family in kept:
            part, counts = _section(title, kept[family])
            parts.append(part)
            whole += counts
    tried = whole.pop("tried", 0)
    found = sum(whole.values())
    parts.append(f"\nIn all {tried:,} tries, {found} faults.\n")
    return "".join(parts)


def _section(title: str, entry: Mapping[str, Any]) -> tuple[str, Counter[str]]:
    lines = [
        f"\n### {title}\n",
        f"| what | tried | {' | '.join(KINDS)} |",
        "|---|---|" + "---|" * len(KINDS),
    ]
    whole = Counter[str]()
    for row in entry["rows"]:
        counts = Counter(fault["kind"] for fault in row["faults"])
        whole += counts
        whole["tried"] += row["tried"]
        cells = " | ".join(str(counts[kind]) for kind in KINDS)
        lines.append(f"| {row['what']} | {row['tried']:,} {row['unit']} | {cells} |")
    faults = [fault for row in entry["rows"] for fault in row["faults"]]
    lines += [f"\n`{entry['command']}`, {entry['date']}, {entry['machine']}; {entry['versions']}."]
    lines += [f"\n- {fault['kind']}: {_plain(fault['case'])}" for fault in faults]
    return "\n".join(lines) + "\n", whole


def _plain(said: str) -> str:
    return (
        said.encode("ascii", "backslashreplace")
        .decode()
        .replace("|", "\\|")
        .replace("<", "&lt;")
        .replace("\n", " ")[:160]
    )


def _versions() -> list[str]:
    found = []
    for name in ("wellposed", *PACKAGES):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return found


def _cpu() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [
                line.partition(":")[2].strip() for line in file if line.startswith("model name")
            ]
    except OSError:
        return platform.machine()
    return f"{names[0]} ({len(names)} threads)" if names else platform.machine()
