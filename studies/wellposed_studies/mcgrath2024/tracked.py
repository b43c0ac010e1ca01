"""A sweep in trackers: one record for each training, when it ends, and one for the tables and
figures of all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wellposed.training.loop.tracking import Images, Trackers, Tracking
from wellposed_studies.mcgrath2024.results import COLUMNS, cell_results
from wellposed_studies.mcgrath2024.sweep import STUDY, SweepSettings, Training


def track_training(settings: SweepSettings, training: Training, record: Mapping[str, Any]) -> None:
    """Send the orthogonality over the steps and the scores of a finished training."""
    folder = settings.result_path(training).with_suffix("")
    if settings.track:
        folder.mkdir(exist_ok=True)
    config = {
        "cell": training.cell.name,
        **training.cell.parameters(),
        "seed": training.seed,
        **settings.identity(),
    }
    title = f"{STUDY} {training.cell.name} seed {training.seed}"
    with Trackers(Tracking(settings.track), folder, title=title, config=config) as trackers:
        for moment in record.get("errors", ()):
            trackers.row({"split": "orthogonality_error", **moment})
        scores = {f"{name},valid": value for name, value in record.get("scores", {}).items()}
        trackers.end(scores, succeeded=record["status"] == "success")


def track_sweep(settings: SweepSettings, images: Images) -> None:
    """Send the mean scores of every cell, and the figures."""
    means = {
        f"{name},{result.cell.name}": result.mean(name)[0]
        for result in cell_results(settings)
        for name in COLUMNS
        if result.runs
    }
    tracking = Tracking(settings.track, lambda _: images)
    with Trackers(
        tracking, Path(settings.out), title=f"{STUDY} sweep", config=settings.identity()
    ) as trackers:
        trackers.end(means, succeeded=True)
