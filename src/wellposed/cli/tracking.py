"""``--track NAME``: trackers that follow a run while it trains, and the figures they get."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, TypeAlias

import tyro

if TYPE_CHECKING:
    from wellposed.training.loop.tracking import Images, Tracking

TrackerNames: TypeAlias = Annotated[
    tuple[str, ...], tyro.conf.arg(metavar="NAME"), tyro.conf.UseAppendAction
]
"""The option, for the arguments of a command; it may be given several times."""


def tracking(names: TrackerNames) -> Tracking:
    """Return what `wellposed.training.train` reports to: these trackers, with the figures of a
    report on the run.

    Raises:
        ConfigError: an unknown tracker, or one that is not installed.
    """
    from wellposed.training.loop.tracking import Tracking, check_trackers

    check_trackers(names)
    return Tracking(names, report_images)


def report_images(*runs: Path) -> Images:
    """Return the figures of the report on some runs, as pixels."""
    from wellposed.charts import drawn_images
    from wellposed.report import build_report

    with TemporaryDirectory() as folder, drawn_images() as images:
        build_report(runs, Path(folder) / "report.html")
    return images
