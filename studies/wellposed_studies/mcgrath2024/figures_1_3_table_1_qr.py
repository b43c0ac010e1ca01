"""Figures 1 and 3, Table 1, the QR loss and a pretrained encoder: each trains the cells of McGrath
(2024) it needs.

All share one sweep in the folder of the recipes, so that a training is done once, whichever recipe
asks first.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from wellposed.errors import ConfigError
from wellposed.recipes.recipe import Criterion, Reproduction, Request
from wellposed.statistics import PairedComparison
from wellposed_studies.mcgrath2024 import panels
from wellposed_studies.mcgrath2024.grid import (
    BASELINE,
    PLACES,
    QR_METHODS,
    chosen_cells,
    grid,
    options_of,
    seeds_of,
)
from wellposed_studies.mcgrath2024.judges import judge_alone, judge_shares, judge_table_1
from wellposed_studies.mcgrath2024.results import (
    CellResult,
    about_drift,
    about_qr,
    about_scores,
    best_of,
    cell_results,
    error_rows,
    failures,
    judge_drift,
    qr_shares,
    sweep_row,
    table_rows,
)
from wellposed_studies.mcgrath2024.sweep import (
    SweepSettings,
    default_jobs,
    finished_results,
    open_sweep,
    run_sweep,
)
from wellposed_studies.verdicts import UNCERTAINTY, every

MINI_NOTE = (
    "a small BERT from scratch where the paper fine-tunes a pretrained one; a difference here says"
    " little of his"
)
ENCODER_NOTE = "a pretrained encoder that is not his, fine-tuned for fewer steps than his"
NOTHING = "no training ended"
GRAM = tuple(cell.name for cell in grid() if cell.form == "gram")
QR = tuple(cell.name for cell in grid() if cell.form in QR_METHODS)
PRETRAINED = ("key:1e-2", "query:1e-2", "householder:1e-6")
DRIFT_TEST = (
    "err_orth at the end over its initial value, without a penalty, is below 1 for every weight in"
    " every layer and not for every affinity; one weight significantly above 1 (t-tests over seeds,"
    " Holm-corrected over weights, at 5 %) or every affinity below it is against the claim"
)
NOT_FROM_SCRATCH = (
    "not judged on a model from scratch, whose random weights begin close to orthogonal"
)
_PAIRED = "paired t-tests over seeds, Holm-corrected, at 5 %"


def figure_1(request: Request) -> Reproduction:
    """Every score by strength for key, query and both."""
    cells = _cells(request, GRAM)
    rows = [sweep_row(result) for result in cells]
    criterion = Criterion(
        "some strength of key or query alone is significantly better than the baseline; every one"
        " of them worse is against the claim",
        seeds_of(request),
        _PAIRED,
    )
    return Reproduction(
        rows,
        panels.figure_1(cells),
        about_scores(cells) or NOTHING,
        judge_alone(_tests_alone(cells)),
        _notes(request, cells),
        criterion,
    )


def table_1(request: Request) -> Reproduction:
    """The baseline and the best strength of key, query and both."""
    cells = _cells(request, GRAM)
    tested = {
        place: best.against for place in PLACES if (best := best_of(cells, place)) and best.against
    }
    criterion = Criterion(
        "key and query alone are significantly better than the baseline and both together"
        " significantly worse; one of them significantly the other way is against the claim",
        seeds_of(request),
        _PAIRED,
    )
    return Reproduction(
        table_rows(cells),
        panels.table_1(cells),
        about_scores(cells) or NOTHING,
        judge_table_1(tested),
        _notes(request, cells),
        criterion,
    )


def figure_3(request: Request) -> Reproduction:
    """err_orth of the unconstrained baseline over training."""
    cells = _cells(request, (BASELINE,))
    rows = error_rows(cells)
    criterion = Criterion(f"{DRIFT_TEST}; {NOT_FROM_SCRATCH}", seeds_of(request), UNCERTAINTY)
    pretrained = request.scale == "paper" or request.encoder is not None
    holds = judge_drift(rows) if pretrained else None
    got = about_drift(cells) or NOTHING
    return Reproduction(rows, panels.figure_3(rows), got, holds, _notes(request, cells), criterion)


def qr(request: Request) -> Reproduction:
    """The QR loss on key and query by Householder reflections and by Gram-Schmidt."""
    cells = _cells(request, QR)
    holds = judge_shares([qr_shares(cells, method) for method in QR_METHODS])
    rows = [sweep_row(result) for result in cells]
    criterion = Criterion(
        "with either method the overall score at the least strength is below half of the baseline's"
        " of the same seed",
        seeds_of(request),
        UNCERTAINTY,
    )
    return Reproduction(
        rows,
        panels.figure_1(cells),
        " ".join(about_qr(cells)) or NOTHING,
        holds,
        _notes(request, cells),
        criterion,
    )


def pretrained(request: Request) -> Reproduction:
    """Baseline, key and query at 1e-2 and the QR loss at 1e-6 on the pretrained encoder of the
    request."""
    if request.encoder is None:
        raise ConfigError(
            "a pretrained encoder is fine-tuned here: give --encoder FOLDER, with weights and"
            " tokenizer"
        )
    cells = _cells(request, PRETRAINED)
    drift = error_rows(cells)
    parts = {
        "drift to orthogonality": judge_drift(drift),
        "gain of key or query alone": judge_alone(_tests_alone(cells)),
        "failure of the QR loss": judge_shares([qr_shares(cells, "householder")]),
    }
    words = {True: "confirmed", False: "contradicted", None: "cannot be said"}
    said = "; ".join(f"{part}: {words[verdict]}" for part, verdict in parts.items())
    criterion = Criterion(
        f"three parts, one contradicted is enough against the claim: (1) {DRIFT_TEST}; (2) key or"
        " query at 1e-2 is significantly better than the baseline, both worse is against it; (3)"
        " with the QR loss at 1e-6 the overall score is below half of the baseline's",
        seeds_of(request),
        f"(1), (3) {UNCERTAINTY}; (2) {_PAIRED}",
    )
    got = " ".join([said + ".", about_scores(cells), about_drift(cells), *about_qr(cells)])
    rows = [*map(sweep_row, cells), *drift]
    return Reproduction(
        rows, panels.figure_3(drift), got, every(parts.values()), _notes(request, cells), criterion
    )


def _tests_alone(cells: Sequence[CellResult]) -> list[PairedComparison]:
    return [
        result.against
        for result in cells
        if result.cell.group in ("key", "query") and result.against
    ]


def _cells(request: Request, names: Sequence[str]) -> list[CellResult]:
    """Train what is not there yet and return the baseline and the named cells."""
    if request.data is None:
        raise ConfigError(
            "McGrath (2024) is about three labelled sets at once: give --data FOLDER with"
            " ids-sst-train.csv, quora-train.csv, sts-train.csv and ids-sst-dev.csv, quora-dev.csv,"
            " sts-dev.csv (plain or .gz)"
        )
    encoder = request.encoder
    device = "cpu" if request.scale in ("toy", "mini") else _device()
    settings = SweepSettings(
        data=request.data,
        out=str(
            request.runs("-".join(["mcgrath2024", *([Path(encoder).name] if encoder else [])]))
        ),
        scale=request.scale,
        options=options_of(request.scale, encoder),
        cells=chosen_cells(names),
        seeds=tuple(range(seeds_of(request))),
        device=device,
    )
    open_sweep(settings, "auto")
    jobs = request.jobs or default_jobs(request.scale, device)
    if not run_sweep(settings, jobs=jobs, announce=request.announce):
        raise KeyboardInterrupt
    if len(finished_results(settings)) < len(settings.trainings()):
        raise ConfigError(
            f"{settings.out}: another process is at work on some of these trainings; wait until it"
            " ends"
        )
    return cell_results(settings)


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _notes(request: Request, cells: Sequence[CellResult]) -> tuple[str, ...]:
    differs = () if request.scale == "paper" else (ENCODER_NOTE if request.encoder else MINI_NOTE,)
    return (*failures(cells), *differs)
