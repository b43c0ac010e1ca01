"""``wellposed measure MODEL``: the conditioning of every weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from wellposed_lab.cli.parser import ModelArguments, parse_with_model


@dataclass(frozen=True)
class MeasureArguments(ModelArguments):
    """Orthogonality, singular values, condition and stable rank of weights, by role and layer."""

    out: Path | None = None
    """Folder for measurement.csv, measurement.json and measurement.svg."""


def run(words: Sequence[str]) -> int:
    """Print the table, write the files and return the exit status."""
    options = parse_with_model(MeasureArguments, "measure", words)

    from wellposed.measurement import measure
    from wellposed_lab.cli.load import load_model_or_draw
    from wellposed_lab.training.folder.atomic import replace_files

    measurement = measure(load_model_or_draw(options.model))
    print(measurement.table())
    if options.out is not None:
        with replace_files(options.out) as temporary:
            measurement.to_csv(temporary / "measurement.csv")
            measurement.to_json(temporary / "measurement.json")
            measurement.plot(temporary / "measurement.svg")
        print(f"written: {options.out}")
    return 0
