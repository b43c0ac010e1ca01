"""The files ``certified.json`` and ``certified_words.json`` of a run. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from wellposed.errors import DataError
from wellposed.finite_json import from_json
from wellposed.options import build_options

NAME = "certified.json"
WORDS_NAME = "certified_words.json"
FORMAT = 1
TOKEN_SHARES = (0.0, 0.01, 0.03, 0.1, 0.2, 0.5)
"""Radii in units of the median norm of an embedded token, to compare models with tokens of different sizes."""
CERTIFIED_KINDS = ("sequence_classification", "sequence_pair_classification", "causal_lm")
"""Task kinds with a certified accuracy: the label of a text or pair, or the next token."""
NAMED_SHARE = 0.1
"""Radius whose certified accuracy is listed in tables."""

R = TypeVar("R", "CertifiedRun", "CertifiedWords")


@dataclass(frozen=True)
class CertifiedRun:
    """Certified accuracy of a run, at radii in units of the median token norm."""

    run_date: str
    """Date of the training run."""
    split: str
    examples: int
    norm: str
    attack: str
    total: float | None
    """The certified Lipschitz constant, or None."""
    median_token: float
    median_radius: float | None
    """Median certified radius of the correctly classified examples; None if it is infinite."""
    shares: list[float]
    """Radii in units of `median_token`, increasing."""
    certified: list[float]
    attacked: list[float]
    made_by: dict[str, Any] = field(default_factory=dict)
    """Inputs of the measurement, see `key`; empty in files of 0.2."""

    def metrics(self) -> dict[str, float]:
        """Return certified accuracy at `NAMED_SHARE` as a metric of a run, if it was measured."""
        certified = dict(zip(self.shares, self.certified, strict=True))
        name = f"certified@{NAMED_SHARE:g},{self.split}"
        return {name: certified[NAMED_SHARE]} if NAMED_SHARE in certified else {}


@dataclass(frozen=True)
class CertifiedWords:
    """Accuracy after k words are replaced, certified and under attack: ``certified_words.json``."""

    run_date: str
    split: str
    examples: int
    counts: list[int]
    """k, increasing from 0, at which both are the clean accuracy."""
    certified: list[float]
    attacked: list[float]
    first_texts: list[str] = field(default_factory=list)
    """`WordAccuracy.first_texts`; empty in files of 0.2, and called ``shown`` in those of 0.3."""

    def metrics(self) -> dict[str, float]:
        pairs = zip(self.counts, self.certified, strict=True)
        return {f"words@{count},{self.split}": share for count, share in pairs if count}


def read_certified(folder: Path, *, run_date: str) -> CertifiedRun | None:
    """Return the certified accuracy of the run that ended at ``run_date``, or None. A file that is
    damaged or of an earlier training is a `DataError`."""
    return _read(folder / NAME, CertifiedRun, "shares", run_date)


def read_words(folder: Path, *, run_date: str) -> CertifiedWords | None:
    """Return the certified accuracy in words of the run, as `read_certified`."""
    return _read(folder / WORDS_NAME, CertifiedWords, "counts", run_date)


def _read(path: Path, kind: type[R], axis: str, run_date: str) -> R | None:
    if not path.is_file():
        return None
    try:
        values = from_json(path.read_bytes())
        if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
            raise ValueError(f"not a JSON object of format {FORMAT}")
        if "shown" in values:
            values["first_texts"] = values.pop("shown")
        run = build_options(kind, values, where=path.name)
        _refuse_damage(run, axis)
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path}: {error}; measure the run again, or remove the file") from error

    if run.run_date != run_date:
        raise DataError(
            f"{path}: belongs to the model of {run.run_date}, the run ended {run_date}; measure it"
            " again, or remove the file"
        )
    return run


def _refuse_damage(run: CertifiedRun | CertifiedWords, axis: str) -> None:
    places = getattr(run, axis)
    columns = (places, run.certified, run.attacked)
    if not all(len(column) == len(places) for column in columns):
        raise ValueError(f"{axis}, certified and attacked must be lists of the same length")
    if not all(isinstance(value, (int, float)) for column in columns for value in column):
        raise ValueError(f"{axis}, certified and attacked must be finite numbers")
    if places != sorted(set(places)):
        raise ValueError(f"{axis} = {places}, expected increasing numbers")
    above = [share for share, sure, attacked in zip(*columns, strict=True) if sure > attacked]
    if above:
        problem = f"certified accuracy is above the attacked one at {above}"
        raise ValueError(f"{problem}, which no sound certificate allows")
