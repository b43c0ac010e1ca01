"""The sweep of McGrath (2024) over its seeds: rows of his figures and table, tests against the
baseline, and words."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from wellposed.statistics import (
    Failure,
    PairedComparison,
    SeedResults,
    compare_seeds,
    holm_correction,
    mean_and_standard_error,
    paired_comparison,
)
from wellposed_studies.mcgrath2024.grid import BASELINE, PAPER_TABLE, QR_METHODS, Cell
from wellposed_studies.mcgrath2024.multitask_options import SETS
from wellposed_studies.mcgrath2024.sweep import SweepSettings, finished_results
from wellposed_studies.runs import plus_minus
from wellposed_studies.verdicts import every, within

COLUMNS = (*SETS, "overall")
ROW_NAMES = {BASELINE: "baseline", "key": "key", "query": "query", "key+query": "key and query"}
ROLES = ("query", "key", "value", "token_embedding", "affinity")


@dataclass(frozen=True)
class CellResult:
    """A cell over its seeds, and its overall score against the baseline's on the same seeds."""

    cell: Cell
    runs: tuple[dict[str, Any], ...]
    failed: tuple[dict[str, Any], ...]
    against: PairedComparison | None = None

    def mean(self, column: str) -> tuple[float, float | None]:
        """Return mean and standard error of one score over the seeds."""
        return mean_and_standard_error([run["scores"][column] for run in self.runs])

    def text(self, column: str) -> str:
        """Return `mean` in words."""
        return plus_minus(self.mean(column), 4) if self.runs else "failed"

    def by_seed(self) -> SeedResults:
        """Return the overall score of every seed, or why it has none."""
        return SeedResults(
            "cell",
            {run["seed"]: run["scores"]["overall"] for run in self.runs},
            {run["seed"]: Failure("failed", run["error"]) for run in self.failed},
        )

    def seconds(self) -> float:
        """Return the mean processor time of a training."""
        return fmean(run["cpu_seconds"] for run in self.runs)


def cell_results(settings: SweepSettings) -> list[CellResult]:
    """Return every cell with a result; each is tested against the baseline, with Holm's correction
    over all cells."""
    found = finished_results(settings)
    cells: list[CellResult] = []
    for cell in settings.cells:
        mine = [run for run in found if run["cell"] == cell.name]
        good = tuple(run for run in mine if run["status"] == "success")
        if mine:
            cells.append(
                CellResult(cell, good, tuple(run for run in mine if run["status"] != "success"))
            )
    if not cells or cells[0].cell.name != BASELINE:
        return cells
    base, *others = cells
    tests = holm_correction([compare_seeds(result.by_seed(), base.by_seed()) for result in others])
    return [
        base,
        *(replace(result, against=test) for result, test in zip(others, tests, strict=True)),
    ]


def best_of(cells: Sequence[CellResult], group: str) -> CellResult | None:
    """Return the cell of a row of Table 1 with the best mean overall score over its strengths."""
    mine = [result for result in cells if result.cell.group == group and result.runs]
    return max(mine, key=lambda result: result.mean("overall")[0], default=None)


def by_strength(cells: Sequence[CellResult]) -> dict[str, list[CellResult]]:
    """Return the cells with results by group, weakest strength first; the baseline is left out."""
    groups: dict[str, list[CellResult]] = {}
    for result in sorted(cells, key=lambda result: result.cell.strength):
        if result.runs and result.cell.name != BASELINE:
            groups.setdefault(result.cell.group, []).append(result)
    return groups


def sweep_row(result: CellResult) -> dict[str, Any]:
    """Return a cell as a row of ``sweep.csv``."""
    against = result.against
    return {
        "cell": result.cell.name,
        **result.cell.parameters(),
        "seeds": len(result.runs),
        "failed": len(result.failed),
        **_score_columns(result),
        "cpu_seconds": result.seconds() if result.runs else None,
        "difference": against and against.mean_difference,
        "difference_se": against and against.standard_error,
        "p_value": against and against.p_value,
        "p_holm": against and against.p_holm,
        "verdict": against and against.verdict,
    }


def _score_columns(result: CellResult) -> dict[str, float | None]:
    columns: dict[str, float | None] = {}
    for name in COLUMNS:
        columns[name], columns[f"{name}_se"] = result.mean(name) if result.runs else (None, None)
    return columns


def table_rows(cells: Sequence[CellResult]) -> list[dict[str, Any]]:
    """Return Table 1: his row, then ours at the best strength, for each of his four rows."""
    rows: list[dict[str, Any]] = []
    for group, paper in PAPER_TABLE.items():
        rows.append({"row": ROW_NAMES[group], "source": "paper", **paper})
        best = best_of(cells, group)
        if best is not None:
            rows.append(
                {
                    "row": ROW_NAMES[group],
                    "source": "ours",
                    "cell": best.cell.name,
                    **_score_columns(best),
                }
            )
    return rows


def error_rows(cells: Sequence[CellResult], kind: str = "errors") -> list[dict[str, Any]]:
    """Return err_orth of the baseline over training, or its ``scale_free_errors``, beside its value
    over the first."""
    baseline = next((result.runs for result in cells if result.cell.name == BASELINE), ())
    return [
        {
            "seed": run["seed"],
            "step": moment["step"],
            "weight": name,
            "error": value,
            "error_over_initial": value / first if (first := run[kind][0][name]) else None,
        }
        for run in baseline
        for moment in run.get(kind, ())
        for name, value in moment.items()
        if name != "step"
    ]


def ratios_by_weight(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return err_orth at the end over its initial value of every weight, one number a seed."""
    last = max((row["step"] for row in rows), default=0)
    found: dict[str, list[float]] = {}
    for row in rows:
        if row["step"] == last and row["error_over_initial"] is not None:
            found.setdefault(row["weight"], []).append(row["error_over_initial"])
    return found


def judge_drift(rows: Sequence[Mapping[str, Any]]) -> bool | None:
    """Return whether err_orth of every weight he shows fell, and that of the affinities did not."""
    shown = {
        weight: ratios
        for weight, ratios in ratios_by_weight(rows).items()
        if set(weight.split(".")) & {*ROLES}
    }
    if not all(math.isfinite(ratio) for ratios in shown.values() for ratio in ratios):
        return None
    # Of sixty weights that did not move some are two errors above 1 by chance.
    tests = holm_correction(
        [paired_comparison(ratios, [1.0] * len(ratios)) for ratios in shown.values()]
    )
    fell = {
        weight: _fell(ratios, test)
        for (weight, ratios), test in zip(shown.items(), tests, strict=True)
    }
    affinities = every(fall for weight, fall in fell.items() if weight.startswith("affinity"))
    weights = every(fall for weight, fall in fell.items() if not weight.startswith("affinity"))
    return every([weights, None if affinities is None else not affinities]) if fell else None


def _fell(ratios: Sequence[float], against_1: PairedComparison) -> bool | None:
    no_spread = (
        against_1.pairs > 1 and against_1.p_value is None
    )  # equal on all seeds: nothing to doubt
    if (against_1.significant or no_spread) and (against_1.mean_difference or 0.0) > 0:
        return False
    return within(ratios, high=1) or None


def final_ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return err_orth at the end over its initial value by role, one number a layer and seed."""
    found: dict[str, list[float]] = {}
    for weight, ratios in ratios_by_weight(rows).items():
        for role in weight.split("."):
            found.setdefault(role, []).extend(ratios)
    return {role: found[role] for role in ROLES if role in found}


def qr_share(cells: Sequence[CellResult], method: str) -> float | None:
    """Return the overall score of a QR form at its least strength over the baseline's; None without
    both."""
    base, weakest = best_of(cells, BASELINE), _weakest(cells, method)
    return weakest.mean("overall")[0] / base.mean("overall")[0] if base and weakest else None


def qr_shares(cells: Sequence[CellResult], method: str) -> list[float]:
    """Return `qr_share` of every seed that has both."""
    base, weakest = best_of(cells, BASELINE), _weakest(cells, method)
    if base is None or weakest is None:
        return []
    ours, plain = weakest.by_seed().values, base.by_seed().values
    return [ours[seed] / plain[seed] for seed in ours if seed in plain]


def _weakest(cells: Sequence[CellResult], method: str) -> CellResult | None:
    mine = [result for result in cells if result.cell.form == method and result.runs]
    return min(mine, key=lambda result: result.cell.strength, default=None)


def conclusion(cells: Sequence[CellResult]) -> list[str]:
    """Return what the sweep says about each of his claims, with its uncertainty."""
    lines = [line for line in (about_scores(cells), about_drift(cells), *about_qr(cells)) if line]
    return [*lines, *failures(cells)]


def failures(cells: Sequence[CellResult]) -> list[str]:
    """Return one line for each training that diverged."""
    return [
        f"Failed: {run['cell']} seed {run['seed']}: {run['error']}"
        for result in cells
        for run in result.failed
    ]


def about_scores(cells: Sequence[CellResult]) -> str:
    """Return the penalised cells against the baseline; empty where nothing can be compared."""
    base = best_of(cells, BASELINE)
    compared = [
        (result, result.against)
        for result in cells
        if result.cell.form == "gram" and result.against
    ]
    unsaid = [f"{result.cell.name}: {test.verdict}" for result, test in compared if test.obstacle]
    tested = [(result, test) for result, test in compared if not test.obstacle]
    if base is None or not tested:
        return f"Key and query penalties: {'; '.join(unsaid)}" if unsaid else ""
    best, against = max(tested, key=lambda pair: pair[0].mean("overall")[0])
    different = [
        f"{result.cell.name} is {test.verdict}" for result, test in tested if test.significant
    ]
    said = (
        "; ".join(different)
        or f"none of the {len(tested)} penalised cells differs significantly from the baseline"
    )
    if all(test.p_value is None for _, test in tested):
        said = "nothing can be tested with so few seeds"
    error = against.standard_error
    width = "" if error is None else f" +- {error:.4f}"
    seen = (
        f" His gain of 0.0024, of one run each, is {0.0024 / error:.1f} of these standard errors."
        if error
        else ""
    )
    return (
        "Key and query penalties (paper: key or query alone gain 0.0024, both lose 0.0068):"
        f" {'; '.join([said, *unsaid])} (paired t-tests over {len(base.runs)}"
        f" seed{'s' if len(base.runs) != 1 else ''}, Holm over every cell). The best,"
        f" {best.cell.name}, differs from the baseline's {base.text('overall')} by"
        f" {against.mean_difference:+.4f}{width}: {against.verdict}.{seen}"
    )


def about_drift(cells: Sequence[CellResult]) -> str:
    """Return how the baseline's own err_orth moved; empty where it was not trained."""
    raw, scale_free = (
        _ratios_in_words(error_rows(cells, kind)) for kind in ("errors", "scale_free_errors")
    )
    if not raw:
        return ""
    return (
        "Drift of the unconstrained baseline, err_orth at the end over its initial value, all"
        " layers and seeds (paper: "
        f"every weight below 1, the key in every layer, the affinity not): {raw}."
        f"{f' The same of the error that does not change with the scale: {scale_free}.' if scale_free else ''}"
    )


def _ratios_in_words(rows: Sequence[Mapping[str, Any]]) -> str:
    return "; ".join(
        f"{role} {plus_minus(mean_and_standard_error(values), 4)} (below 1 in"
        f" {sum(v < 1 for v in values)} of {len(values)})"
        for role, values in final_ratios(rows).items()
    )


def about_qr(cells: Sequence[CellResult]) -> list[str]:
    """Return one line for each QR form with a result."""
    base = best_of(cells, BASELINE)
    lines = []
    for method in QR_METHODS:
        weakest, share = _weakest(cells, method), qr_share(cells, method)
        if base is None or weakest is None or share is None:
            continue
        verdict = weakest.against.verdict if weakest.against else "not tested"
        lines.append(
            f"QR loss by {method} (paper: a failure, accuracy more than halved even at 1e-6, and"
            f" too slow): at {weakest.cell.name} the overall score is {weakest.text('overall')},"
            f" {100 * share:.0f} % of the baseline's: {verdict}; a training takes"
            f" {weakest.seconds() / base.seconds():.2f} times its processor time."
        )
    return lines
