"""The tables of the committed row of `frontier/methods`, which `tools.quoted_rows` writes into pages."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROW = ROOT / "benchmarks" / "reproduction" / "frontier-methods.csv"
UNKNOWN = "-"
Row = Mapping[str, str]
Cell = Callable[[Row], str]


def number(name: str, form: str, scale: float = 1.0) -> Cell:
    """Return the cell of a column of the file in a form; it is empty if a training has not ended."""
    return lambda row: form.format(scale * float(row[name])) if row[name] else UNKNOWN


def text(name: str) -> Cell:
    """Return the cell of a column of the file as it is."""
    return lambda row: row[name]


TABLES: tuple[Mapping[str, Cell], ...] = (
    {
        "method": text("method"),
        "loss, nats": number("valid", "{:.3f}"),
        "seeds": text("seeds"),
        "best rate": text("rate"),
        "good rates": lambda row: f"{row['good_rates']} of {len(row['rates'].split())}",
        "no warm-up": number("cold", "{:.3f}"),
        "24 layers": number("deep", "{:.3f}"),
    },
    {
        "method": text("method"),
        "step": number("cpu_ratio", "{:.2f}"),
        "launches": number("launches", "{:+.0f}"),
        "memory, MiB": number("kept_bytes", "{:+.1f}", 2**-20),
        "singular value": number("sigma_max", "{:.3g}"),
        "logit": number("logit_max", "{:.3g}"),
        "certified bound": number("certified", "{:.0e}"),
        "plain at the end": text("merges"),
    },
)


def lines(path: Path = ROW) -> Iterator[str]:
    """Yield both tables, the least loss first."""
    with path.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == "ours"]
    rows.sort(key=lambda row: float(row["valid"]))
    for columns in TABLES:
        yield f"| {' | '.join(columns)} |"
        yield "|---" * len(columns) + "|"
        for row in rows:
            yield f"| {' | '.join(cell(row) for cell in columns.values())} |"
        yield ""
