"""Figures 1 and 3, Table 1 and the QR loss of McGrath (2024): each trains the cells of the sweep that it needs.

All four share one sweep in the folder of the recipes, so that a training is done once, whichever recipe asks first.
"""

from __future__ import annotations

from collections.abc import Sequence

from wellposed.errors import ConfigError
from wellposed.recipes.mcgrath2024 import panels
from wellposed.recipes.mcgrath2024.grid import BASELINE, QR_METHODS, SCALES, chosen_cells, grid
from wellposed.recipes.mcgrath2024.results import (
    CellResult,
    about_drift,
    about_qr,
    about_scores,
    best_of,
    cell_results,
    error_rows,
    failures,
    final_ratios,
    qr_share,
    sweep_row,
    table_rows,
)
from wellposed.recipes.mcgrath2024.sweep import SweepSettings, default_jobs, finished_results, open_sweep, run_sweep
from wellposed.recipes.recipe import Criterion, Reproduction, Request

MINI_NOTE = (
    "a small BERT from scratch where the paper fine-tunes a pretrained one; a difference here says little of his"
)
NOTHING = "no training ended"
GRAM = tuple(cell.name for cell in grid() if cell.form == "gram")
QR = tuple(cell.name for cell in grid() if cell.form in QR_METHODS)
SEEDS = {"toy": 2, "mini": 3, "paper": 3}
_PAIRED = "paired t-tests over seeds, Holm-corrected, at 5 %"


def figure_1(request: Request) -> Reproduction:
    """Every score by strength for key, query and both."""
    cells = _cells(request, GRAM)
    tested = [result.against for result in cells if result.cell.group in ("key", "query") and result.against]
    gains = [test.mean_difference or 0 for test in tested if test.significant]
    all_worse = bool(gains) and len(gains) == len(tested)
    holds = True if any(gain > 0 for gain in gains) else False if all_worse else None
    rows = [sweep_row(result) for result in cells]
    criterion = Criterion(
        "some strength of key or query alone is significantly better than the baseline; every one of them worse is "
        "against the claim",
        SEEDS[request.scale],
        _PAIRED,
    )
    return Reproduction(
        rows, panels.figure_1(cells), about_scores(cells) or NOTHING, holds, _notes(request, cells), criterion
    )


def table_1(request: Request) -> Reproduction:
    """The baseline and the best strength of key, query and both."""
    cells = _cells(request, GRAM)
    signs = {"key": 1, "query": 1, "key+query": -1}
    tested = [(best.against, sign) for group, sign in signs.items() if (best := best_of(cells, group)) and best.against]
    agree = [(test.mean_difference or 0) * sign > 0 for test, sign in tested if test.significant]
    holds = False if not all(agree) else True if len(agree) == len(signs) else None
    criterion = Criterion(
        "key and query alone are significantly better than the baseline and both together significantly worse; one of "
        "them significantly the other way is against the claim",
        SEEDS[request.scale],
        _PAIRED,
    )
    return Reproduction(
        table_rows(cells),
        panels.table_1(cells),
        about_scores(cells) or NOTHING,
        holds,
        _notes(request, cells),
        criterion,
    )


def figure_3(request: Request) -> Reproduction:
    """err_orth of the unconstrained baseline over training."""
    cells = _cells(request, (BASELINE,))
    rows = error_rows(cells)
    fall = {role: all(ratio < 1 for ratio in values) for role, values in final_ratios(rows).items()}
    holds = all(fell == (role != "affinity") for role, fell in fall.items()) if fall else None
    criterion = Criterion(
        "err_orth of every weight falls over training without a penalty, and that of the affinities does not",
        SEEDS[request.scale],
        "every seed must agree",
    )
    return Reproduction(
        rows, panels.figure_3(rows), about_drift(cells) or NOTHING, holds, _notes(request, cells), criterion
    )


def qr(request: Request) -> Reproduction:
    """The QR loss on key and query by Householder reflections and by Gram-Schmidt."""
    cells = _cells(request, QR)
    shares = [share for method in QR_METHODS if (share := qr_share(cells, method)) is not None]
    holds = all(share < 0.5 for share in shares) if shares else None
    rows = [sweep_row(result) for result in cells]
    criterion = Criterion(
        "with either method every cell keeps less than half of what the baseline gains over chance",
        SEEDS[request.scale],
        "none known: means over seeds",
    )
    return Reproduction(
        rows, panels.figure_1(cells), " ".join(about_qr(cells)) or NOTHING, holds, _notes(request, cells), criterion
    )


def _cells(request: Request, names: Sequence[str]) -> list[CellResult]:
    """Train what is not there yet and return the baseline and the named cells."""
    if request.data is None:
        raise ConfigError(
            "McGrath (2024) is about three labelled sets at once: give --data FOLDER with ids-sst-train.csv, "
            "quora-train.csv, sts-train.csv and ids-sst-dev.csv, quora-dev.csv, sts-dev.csv (plain or .gz)"
        )
    settings = SweepSettings(
        data=request.data,
        out=str(request.runs("mcgrath2024")),
        scale=request.scale,
        options=SCALES[request.scale],
        cells=chosen_cells(names),
        seeds=tuple(range(SEEDS[request.scale])),
        device=_device() if request.scale == "paper" else "cpu",
    )
    open_sweep(settings, "auto")
    if not run_sweep(settings, jobs=default_jobs(request.scale), announce=request.announce):
        raise KeyboardInterrupt
    if len(finished_results(settings)) < len(settings.trainings()):
        raise ConfigError(f"{settings.out}: another process is at work on some of these trainings; wait until it ends")
    return cell_results(settings)


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _notes(request: Request, cells: Sequence[CellResult]) -> tuple[str, ...]:
    return (*failures(cells), *(() if request.scale == "paper" else (MINI_NOTE,)))
