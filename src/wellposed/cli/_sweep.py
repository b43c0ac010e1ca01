"""``wellposed sweep STUDY``: a paper's grid of settings, each with several seeds, in as many
processes as wanted."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from wellposed.cli.imports import ImportedFiles
from wellposed.cli.load import start_source
from wellposed.cli.parser import parse_words
from wellposed.cli.tracking import TrackerNames, tracking
from wellposed.errors import ConfigError, unknown_name
from wellposed.plugins import imported_files
from wellposed.recipes.mcgrath2024.grid import SCALES, chosen_cells, further_cells, grid, options_of
from wellposed.recipes.mcgrath2024.sweep import (
    SweepSettings,
    default_jobs,
    finished_results,
    open_sweep,
    run_sweep,
)
from wellposed.recipes.mcgrath2024.tracked import track_sweep, track_training

STUDIES = {"mcgrath2024": "orthogonality penalties on key and query weights, three tasks at once"}


@dataclass(frozen=True)
class SweepArguments:
    """Options of a sweep."""

    data: Path
    """Folder of ids-sst-train.csv, quora-train.csv, sts-train.csv and their dev files, plain or
    gzip."""
    scale: str = "mini"
    """mini: a small BERT from scratch, under 20 minutes on two cores; medium: a wider one for more
    steps, hours; paper: BERT base on every row; toy: seconds."""
    out: Path | None = None
    """Folder of the sweep; runs/mcgrath2024-SCALE where not given."""
    resume: str = "never"
    """never | auto: keep finished trainings of --out and go on; also how a further process joins
    in."""
    seeds: int = 3
    """Trainings of every cell, seeds 0, 1, ...; more may be added with --resume auto."""
    jobs: int | None = None
    """Processes; by default one for each CPU core at mini and medium scale, else one."""
    cells: str = ""
    """Only these cells, comma separated (key:1e-2, householder:1e-6, and value or embedding, which
    are trained where named alone); the baseline is always among them."""
    encoder: Annotated[str | None, tyro.conf.arg(name="from", aliases=("--encoder",))] = None
    """Train this encoder in place of the one of the scale: a folder, a hub name, a finished run, or
    a config.json (random weights). A pretrained one is fine-tuned at 5e-5, for 200 steps at mini
    scale and 1000 at medium."""
    imports: ImportedFiles = ()
    """Run this Python file first, in every process: model classes and families that it registers
    can be trained."""
    steps: int | None = None
    """Optimizer steps, in place of those of the scale."""
    batch_size: int | None = None
    """Rows of each of the three sets in a step, in place of those of the scale."""
    learning_rate: float | None = None
    """Peak learning rate, in place of that of the scale."""
    sts_loss: Literal["squared_error", "cosine"] | None = None
    """Loss of sentence similarity: squared_error (of every scale), or cosine of a batch's outputs
    and scores."""
    device: str = "cpu"
    """Where to train: cpu, cuda, cuda:1, ..."""
    track: TrackerNames = ()
    """Also report the trainings, when they end, and what comes of them to this tracker of
    Accelerate: trackio, tensorboard, wandb, mlflow, ...; may be repeated."""
    quiet: bool = False
    """Print the tables and the conclusion only."""


def run(words: Sequence[str]) -> int:
    """Run or resume a sweep; print tables and conclusion and return the exit status."""
    if not words or words[0] in {"-h", "--help"}:
        print(_usage())
        return 0
    if words[0] not in STUDIES:
        raise unknown_name("study", words[0], STUDIES)
    options = parse_words(
        SweepArguments, words[1:], prog=f"wellposed sweep {words[0]}", description=__doc__ or ""
    )
    settings = _settings(options)
    tracking(options.track)
    open_sweep(settings, options.resume)
    total = len(settings.trainings())
    jobs = options.jobs if options.jobs is not None else default_jobs(options.scale, options.device)
    if not options.quiet:
        print(
            f"{len(settings.cells)} cells x {len(settings.seeds)} seeds = {total} trainings in"
            f" {settings.out}",
            flush=True,
        )
    finished = run_sweep(
        settings, jobs=jobs, announce=_ignore if options.quiet else _announce, report=track_training
    )
    if not finished:
        again = [*words, *([] if "--resume" in words else ["--resume", "auto"])]
        print(f"interrupted; continue with: wellposed sweep {shlex.join(again)}", file=sys.stderr)
        return 130
    results = finished_results(settings)
    if len(results) < total:
        print(
            f"{len(results)} of {total} trainings are done; another process has the rest and writes"
            " the tables"
        )
        return 0

    from wellposed.measurement.figures import drawn_images
    from wellposed.recipes.mcgrath2024.output import write_outputs

    with drawn_images() as images:
        print(write_outputs(settings))
    track_sweep(settings, images)
    print(
        f"written: {settings.out}/results.md, table-1.csv, figure-1.svg, figure-3.svg,"
        " sweep.csv, ..."
    )
    return 1 if any(result["status"] != "success" for result in results) else 0


def _settings(options: SweepArguments) -> SweepSettings:
    if options.scale not in SCALES:
        raise unknown_name("scale", options.scale, SCALES)
    if options.seeds < 1:
        raise ConfigError(f"--seeds {options.seeds}: expected at least 1")
    encoder = None if options.encoder is None else start_source(options.encoder)
    own = ("steps", "batch_size", "learning_rate", "sts_loss")
    changes = {name: value for name in own if (value := getattr(options, name)) is not None}
    return SweepSettings(
        data=str(options.data),
        out=str(options.out or Path("runs") / f"mcgrath2024-{options.scale}"),
        scale=options.scale,
        options=dataclasses.replace(options_of(options.scale, encoder), **changes),
        cells=chosen_cells([name.strip() for name in options.cells.split(",") if name.strip()]),
        seeds=tuple(range(options.seeds)),
        device=options.device,
        imports=imported_files(),
        track=options.track,
    )


def _announce(line: str) -> None:
    print(line, flush=True)


def _ignore(line: str) -> None:
    del line


def _usage() -> str:
    rows = "\n".join(f"  {name}  {summary}" for name, summary in STUDIES.items())
    return (
        f"usage: wellposed sweep STUDY --data DIR [OPTIONS]\n\nstudies:\n{rows}\n\ncells of"
        " mcgrath2024:\n  "
        + "\n  ".join(cell.name for cell in (*grid(), *further_cells()))
        + "\n\n`wellposed sweep STUDY --help` lists the options."
    )
