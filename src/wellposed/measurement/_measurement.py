"""The record of one measurement. A report reads it without importing torch."""

from __future__ import annotations

import csv
import io
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wellposed.errors import DataError
from wellposed.finite_json import from_json, to_json
from wellposed.options import fits
from wellposed.safe_read import read_bytes
from wellposed.text_table import format_number, text_table

SCHEMA_VERSION = 1

IDENTITY = ("stack", "layer", "role", "path")
_ERRORS = ("scale_free_orthogonality_error", "orthogonality_error")
_SPECTRAL = ("sigma_max", "sigma_min", "condition_number", "stable_rank")
_STATUS = ("sigma_max_status", "singular_value_error")
_PLACE = (*IDENTITY, "kind", "parameter", "rows", "cols")
WEIGHT_COLUMNS = (*_PLACE, *_ERRORS, *_SPECTRAL, *_STATUS)
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
PER_HEAD = ("attention_entropy", "attention_sensitivity", "affinity_orthogonality_error")
_SHOWN = {
    "err_orth (best scale)": "scale_free_orthogonality_error",
    "err_orth (raw)": "orthogonality_error",
    "sigma max": "sigma_max",
    "sigma min": "sigma_min",
    "condition": "condition_number",
    "stable rank": "stable_rank",
}
"""Heading of the table -> column."""
_SHOWN_OF_MODULES = {
    "mean norm": "mean_norm",
    "max norm": "max_norm",
    "attention entropy (nats)*": "attention_entropy",
    "affinity err_orth*": "affinity_orthogonality_error",
}
_TEXTS = ("stack", "role", "path", "kind", "parameter", "gram", "sigma_max_status")
_KINDS: dict[str, Any] = dict.fromkeys(_TEXTS, str | None)
_KINDS |= {"layer": int | None, "singular_values": list | None}
"""Types of the columns without numbers."""


@dataclass(frozen=True)
class Measurement:
    """Numbers of every weight with a role, and of every module that a batch went through.

    ``rows`` has one dictionary per role and layer, with the keys of ``WEIGHT_COLUMNS``. G, n x n,
    is the smaller of ``W W^T`` and ``W^T W``. ``scale_free_orthogonality_error`` is
    ``min_s |G / s - I|_F / sqrt(n)``, from 0 to 1 (absent from files of version 0.1);
    ``orthogonality_error`` is ``max_{i != j} |G_ij|``, which grows with the square of the scale.
    ``condition_number`` is ``sigma_max / sigma_min``, ``stable_rank`` is ``|W|_F^2 / |W|_2^2``.
    ``sigma_max_status`` is ``"exact"``, or ``"empirical"`` (Lanczos, a lower estimate). With
    spectra also ``singular_values``, none off by more than ``singular_value_error`` (not in 0.2).

    ``activations`` has one dictionary per module, if a batch was given:
    ``stack, layer, kind, path``; ``mean_norm, max_norm``, 2-norms of its token vectors; and lists
    of one value per head, ``None`` if attention was not seen. With A the attention:
    ``attention_entropy`` (nats) and ``attention_sensitivity`` (``p1 (1 - p1 + p2)``), means over
    rows of A; ``affinity_orthogonality_error``, ``max |(A A^T)_ij|`` over pairs of different real
    tokens, mean of the batch: 0 if and only if no two tokens attend to a common one.

    ``None`` marks what could not be measured; ``notes`` says why.

    >>> m = Measurement([{"stack": "encoder", "layer": 0, "role": "query", "sigma_max": 1.5}])
    >>> m.find(role="query")[0]["sigma_max"]
    1.5
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    activations: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def find(self, **values: Any) -> list[dict[str, Any]]:
        """Return the rows with these values, as in ``find(role="query", layer=0)``."""
        return [row for row in self.rows if values.items() <= row.items()]

    def table(self) -> str:
        """Return the weights, then the activations, as text for a terminal."""

        def numbers(row: Mapping[str, Any], keys: Iterable[str]) -> list[str]:
            return [format_number(_mean(row.get(key))) for key in keys]

        body = [
            [name, f"{row.get('rows')} x {row.get('cols')}", *numbers(row, _SHOWN.values())]
            for name, row in zip(row_names(self.rows), self.rows, strict=True)
        ]
        parts = [text_table("Weights", ["weight", "shape", *_SHOWN], body)]
        if self.activations:
            keys = _SHOWN_OF_MODULES.values()
            body = [[row["path"], row["kind"], *numbers(row, keys)] for row in self.activations]
            columns = ["module", "kind", *_SHOWN_OF_MODULES]
            parts.append(text_table("Activations (* mean of heads)", columns, body, left=2))
        return "\n\n".join([*parts, *(f"note: {note}" for note in self.notes)])

    def to_csv(self, path: str | Path) -> Path:
        """Write one line per weight; only `to_json` has singular values and activations."""
        return write_csv(Path(path), WEIGHT_COLUMNS, self.rows)

    def to_json(self, path: str | Path) -> Path:
        """Write everything, singular values included; an infinite condition number becomes null."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(to_json({"schema_version": SCHEMA_VERSION, **vars(self)}))
        return path

    @classmethod
    def from_json(cls, path: str | Path) -> Measurement:
        """Read a file that `to_json` wrote.

        Raises:
            DataError: the file is missing, cut off, or is not a measurement; the message names it.
        """
        path = Path(path)
        try:
            record = from_json(read_bytes(path))
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or f"not valid JSON: {error}"
            raise DataError(
                f"{path}: no measurement that can be read ({why}); restore the file, or measure again"
            ) from error

        problem = _schema_problem(record)
        if problem:
            raise DataError(f"{path}: {problem}; expected a file written by Measurement.to_json")
        rows = [_read_row(row) for row in record["rows"]]
        return cls(rows, record.get("activations", []), record.get("notes", []))

    def plot(self, path: str | Path) -> Path:
        """Draw the scale-free orthogonality error as an SVG or PNG, layers x roles; a cell has its
        largest.

        Raises:
            ConfigError: matplotlib is not installed, or the suffix is neither .svg nor .png.
        """
        from wellposed.measurement._figures import save_measurement_figure

        return save_measurement_figure(self.rows, Path(path))


def write_csv(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write dictionaries as CSV; text that a spreadsheet would run gets a leading apostrophe."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(csv_text(columns, rows), encoding="utf-8", newline="")
    return path


def csv_text(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the text that `write_csv` writes."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(map(_cell, columns))
    writer.writerows([_cell(row.get(column)) for column in columns] for row in rows)
    return out.getvalue()


def _mean(value: Any) -> Any:
    """Return the mean of one value per head, and other values as they are."""
    return math.fsum(value) / len(value) if isinstance(value, list) and value else value


def _cell(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return " ".join(repr(item) for item in value)
    if isinstance(value, str) and value.startswith(FORMULA_STARTS):
        try:
            float(value)
        except ValueError:
            return f"'{value}"
    return value


def row_names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return names such as ``encoder.3.query``; if two clash, ``@`` and a path are appended."""
    names = [_plain_name(row) for row in rows]
    for column in ("path", "parameter"):
        count = Counter(names)
        names = [
            name if count[name] == 1 else f"{name.partition('@')[0]}@{row.get(column)}"
            for name, row in zip(names, rows, strict=True)
        ]
    return names


def _plain_name(row: Mapping[str, Any]) -> str:
    from wellposed.measurement._figures import role_name

    parts = (row.get("stack"), row.get("layer"), role_name(row))
    return ".".join(str(part) for part in parts if part is not None)


def _schema_problem(record: Any) -> str | None:
    """Return why a record is no measurement; None if it is one."""
    if not isinstance(record, dict):
        return f"holds a {type(record).__name__}, not an object"
    version = record.get("schema_version")
    if version != SCHEMA_VERSION:
        return f"schema_version is {version!r}, this version reads {SCHEMA_VERSION}"

    rows = record.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return "has no list of rows"

    for row in rows:
        bad = [name for name in IDENTITY if name not in row]
        bad += [name for name in row if not fits(row[name], _KINDS.get(name, float | None))]
        values = () if bad else row.get("singular_values") or ()
        if bad or not all(fits(value, float) for value in values):
            bad = bad or ["singular_values"]
            return f"a row has no usable {', '.join(bad)}"

    if not all(isinstance(record.get(name, []), list) for name in ("activations", "notes")):
        return "activations and notes are not lists"
    return None


def _read_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with the infinite condition number restored, which JSON lacks."""
    is_singular = row.get("sigma_min") == 0 and row.get("condition_number") is None
    return {**row, "condition_number": math.inf} if is_singular else dict(row)
