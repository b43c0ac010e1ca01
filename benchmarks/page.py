"""Display of rows: lines during a measurement, and the page of all stored results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.record import Json
from benchmarks.rows import Benchmark, Goal, reaches

HEAD = """# Speed, measured

Made by `python -m benchmarks` from `benchmarks/results/*.json`; do not edit. Each value is the median over rounds in
which all sides alternate in one process, with the spread of the middle 80 % of rounds (of all if there are few).
**Bold** misses its goal; the reason is below its table. Load is the machine's load average during the measurement: on a
busy machine read ratios, not seconds. Earlier rows, written by hand, are in [HISTORY.md](HISTORY.md)."""


def against(row: Json) -> str:
    """Return the ratio of a row to the last one, flagged if their spreads do not meet."""
    last = row.get("last")
    if last is None:
        return ""
    ratio = "" if last["ratio"] is None else f"{last['ratio']:.2f}x "
    return f"{ratio}of {last['date']}{', **outside its spread**' if last['outside'] else ''}"


def value_and_interval(row: Json) -> str:
    value = f"{row['value']:.3g}"
    return value if row["low"] == row["high"] else f"{value} [{row['low']:.3g}, {row['high']:.3g}]"


def table(folder: Path, registered: dict[str, Benchmark]) -> str:
    """Return the newest rows per machine and benchmark, then rows not yet measured on a GPU."""
    lines = [HEAD]
    measured_on_gpu: set[str] = set()
    for described, days in by_machine(folder).items():
        lines += ["", f"## {described}"]
        for name, (date, record) in sorted(days.items()):
            if record["device"] == "cuda":
                measured_on_gpu.add(name)
            about = registered[name].measures if name in registered else "no longer measured"
            lines += ["", f"### {name}: {about}", "", under(date, record), ""]
            lines += [
                "| row | value | goal | ours / other | load | against the last |",
                "|---|---|---|---|---|---|",
            ]
            rows = record["benchmarks"][name]["rows"]
            one = None if record["quick"] else registered.get(name)
            reasons: dict[str, int] = {}
            for row in rows:
                goal = one.goal_of(row["name"], record["device"]) if one else None
                lines.append(line_of(row, goal, reasons))
            if reasons:
                lines += ["", *(f"- ({mark}) {why}" for why, mark in reasons.items())]
    waiting = {
        name: one
        for name, one in registered.items()
        if "cuda" in one.devices and name not in measured_on_gpu
    }
    if waiting:
        lines += [
            "",
            "## On a GPU: not measured yet",
            "",
            "`python -m benchmarks gpu` fills these.",
            "",
        ]
        lines += ["| benchmark | measures | goal | value |", "|---|---|---|---|"]
        lines += [
            f"| {name} | {cell(one.measures)} | {cell(one.goal)} | not measured |"
            for name, one in waiting.items()
        ]
    return "\n".join(lines) + "\n"


def by_machine(folder: Path) -> dict[str, dict[str, tuple[str, Json]]]:
    """Return the newest day and record, by machine and benchmark."""
    result: dict[str, dict[str, tuple[str, Json]]] = {}
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stem[-10:]):
        record = json.loads(path.read_text("utf-8"))
        made = record["machine"]
        name = (
            f"{made.get('gpu', made['cpu'])}, {made['cores']} cores,"
            f" {' '.join(made['flags']) or 'no AVX'}"
        )
        name += ", tiny sizes" * record["quick"]
        result.setdefault(name, {}).update(
            dict.fromkeys(record["benchmarks"], (record["date"], record))
        )
    return result


def under(date: str, record: Json) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    threads = f"{record['threads']} thread{'s' * (record['threads'] != 1)}"
    return f"{date}, {record['device']}, {threads}; {packages}."


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def line_of(row: Json, goal: Goal | None, reasons: dict[str, int]) -> str:
    """Return a row of the table with today's goal; ``reasons`` maps reasons for a miss to marks."""
    wanted = goal.wanted if goal else row["goal"]
    is_missed = wanted is not None and not reaches(row["value"], wanted)
    bold = "**" if is_missed else ""
    value = f"{bold}{value_and_interval(row)}{bold}"
    if is_missed and goal and goal.why:
        value += f" ({reasons.setdefault(goal.why, len(reasons) + 1)})"
    raw = "" if row["ours"] is None else f"{row['ours']:.3g} / {row['other']:.3g} {row['unit']}"
    return (
        f"| {cell(row['name'])} | {value} | {wanted or ''} | {raw} | {row['load']} |"
        f" {against(row)} |"
    )


def lines_while_measuring(row: Json) -> Iterator[str]:
    """Yield the lines of a row on the terminal."""
    verdict = {True: "met", False: "NOT MET", None: ""}[row["met"]]
    goal = f"  goal {row['goal']}: {verdict}" if row["goal"] else ""
    yield f"  {row['name']}: {value_and_interval(row)}{goal}"
    if "last" in row:
        yield f"    {against(row).replace('**', '')}"
