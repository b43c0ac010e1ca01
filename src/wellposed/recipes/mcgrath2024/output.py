"""Files that the sweep of McGrath (2024) writes: his Figure 1, Figure 3 and Table 1, with tests of what they show."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from wellposed.charts import draw
from wellposed.errors import DataError
from wellposed.measurement import text_table, write_csv
from wellposed.recipes.mcgrath2024 import BASELINE, PAPER_TABLE, QR_METHODS, Cell
from wellposed.recipes.mcgrath2024.multitask_options import SETS
from wellposed.recipes.mcgrath2024.sweep import DATA, SweepSettings, finished_results
from wellposed.report import (
    Failure,
    PairedComparison,
    SeedResults,
    compare_seeds,
    holm_correction,
    mean_and_standard_error,
)

COLUMNS = (*SETS, "overall")
HEADINGS = {"sst": "SST accuracy", "para": "Para accuracy", "sts": "STS Pearson", "overall": "overall"}
ROW_NAMES = {BASELINE: "baseline", "key": "key", "query": "query", "key+query": "key and query"}


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

    def by_seed(self) -> SeedResults:
        """Return the overall score of every seed, or why it has none."""
        return SeedResults(
            "cell",
            {run["seed"]: run["scores"]["overall"] for run in self.runs},
            {run["seed"]: Failure("failed", run["error"]) for run in self.failed},
        )

    def seconds(self) -> float:
        """Return the mean processor time of a training."""
        return math.fsum(run["cpu_seconds"] for run in self.runs) / len(self.runs)


def cell_results(settings: SweepSettings) -> list[CellResult]:
    """Return every cell with a result; each is tested against the baseline, with Holm's correction over all cells."""
    found = finished_results(settings)
    cells: list[CellResult] = []
    for cell in settings.cells:
        mine = [run for run in found if run["cell"] == cell.name]
        good = tuple(run for run in mine if run["status"] == "success")
        if mine:
            cells.append(CellResult(cell, good, tuple(run for run in mine if run["status"] != "success")))
    if not cells or cells[0].cell.name != BASELINE:
        return cells
    base, *others = cells
    tests = holm_correction([compare_seeds(result.by_seed(), base.by_seed()) for result in others])
    return [base, *(replace(result, against=test) for result, test in zip(others, tests, strict=True))]


def write_outputs(settings: SweepSettings) -> str:
    """Write tables and figures into the folder of the sweep and return what to print."""
    from wellposed.recipes.mcgrath2024.panels import figure_1, figure_3, table_1

    out = Path(settings.out)
    cells = cell_results(settings)
    rows = error_rows(cells)
    write_csv(out / "sweep.csv", list(sweep_row(cells[0])), [sweep_row(result) for result in cells])
    write_csv(out / "figure-3.csv", ["seed", "step", "weight", "error", "error_over_initial"], rows)
    write_csv(out / "table-1.csv", ["row", "source", "cell", *COLUMNS, *(f"{name}_se" for name in COLUMNS)],
              table_rows(cells))  # fmt: skip
    draw(figure_1(cells), out / "figure-1.svg")
    if rows:
        draw(figure_3(rows), out / "figure-3.svg", columns=5)
    draw(table_1(cells), out / "table-1.svg")
    described = _described(settings)
    text = "\n\n".join([described, _table(cells, text_table), _sweep_table(cells, text_table), *conclusion(cells)])
    markdown = [f"# McGrath (2024), {settings.scale} scale", described, _table(cells, _markdown),
                _sweep_table(cells, _markdown), *(f"- {line}" for line in conclusion(cells))]  # fmt: skip
    (out / "results.md").write_text("\n\n".join(markdown) + "\n", encoding="utf-8")
    return text


def best_of(cells: Sequence[CellResult], group: str) -> CellResult | None:
    """Return the cell of a row of Table 1 with the best mean overall score over its strengths."""
    mine = [result for result in cells if result.cell.group == group and result.runs]
    return max(mine, key=lambda result: result.mean("overall")[0]) if mine else None


def table_rows(cells: Sequence[CellResult]) -> list[dict[str, Any]]:
    """Return Table 1: his row, then ours at the best strength, for each of his four rows."""
    rows: list[dict[str, Any]] = []
    for group, paper in PAPER_TABLE.items():
        rows.append({"row": ROW_NAMES[group], "source": "paper", **paper})
        best = best_of(cells, group)
        if best is not None:
            means = {name: best.mean(name) for name in COLUMNS}
            ours = {name: mean for name, (mean, _) in means.items()}
            errors = {f"{name}_se": error for name, (_, error) in means.items()}
            rows.append({"row": ROW_NAMES[group], "source": "ours", "cell": best.cell.name, **ours, **errors})
    return rows


def error_rows(cells: Sequence[CellResult]) -> list[dict[str, Any]]:
    """Return err_orth of the baseline over training, beside its value divided by the first."""
    rows = []
    for run in next((result.runs for result in cells if result.cell.name == BASELINE), ()):
        first = run["errors"][0]
        for moment in run["errors"]:
            rows += [
                {"seed": run["seed"], "step": moment["step"], "weight": name, "error": value,
                 "error_over_initial": value / first[name] if first[name] else None}
                for name, value in moment.items() if name != "step"
            ]  # fmt: skip
    return rows


def conclusion(cells: Sequence[CellResult]) -> list[str]:
    """Return what the sweep says about each of his claims, with its uncertainty."""
    lines = [line for line in (about_scores(cells), about_drift(cells), *about_qr(cells)) if line]
    return [*lines, *failures(cells)]


def failures(cells: Sequence[CellResult]) -> list[str]:
    """Return one line for each training that diverged."""
    return [f"Failed: {run['cell']} seed {run['seed']}: {run['error']}" for result in cells for run in result.failed]


def about_scores(cells: Sequence[CellResult]) -> str:
    """Return the penalised cells against the baseline; empty where nothing can be compared."""
    base = best_of(cells, BASELINE)
    compared = [(result, result.against) for result in cells if result.cell.form == "gram" and result.against]
    unsaid = [f"{result.cell.name}: {test.verdict}" for result, test in compared if test.obstacle]
    tested = [(result, test) for result, test in compared if not test.obstacle]
    if base is None or not tested:
        return f"Key and query penalties: {'; '.join(unsaid)}" if unsaid else ""
    best, against = max(tested, key=lambda pair: pair[0].mean("overall")[0])
    different = [f"{result.cell.name} is {test.verdict}" for result, test in tested if test.significant]
    said = "; ".join(different) or f"none of the {len(tested)} penalised cells differs significantly from the baseline"
    if all(test.p_value is None for _, test in tested):
        said = "nothing can be tested with so few seeds"
    said = "; ".join([said, *unsaid])
    error = against.standard_error
    width = "" if error is None else f" +- {error:.4f}"
    seen = f" His gain of 0.0024, of one run each, is {0.0024 / error:.1f} of these standard errors." if error else ""
    seeds = f"{len(base.runs)} seed{'s' if len(base.runs) != 1 else ''}"
    return (
        f"Key and query penalties (paper: key or query alone gain 0.0024, both lose 0.0068): {said} (paired t-tests "
        f"over {seeds}, Holm over every cell). The best, {best.cell.name}, differs from the baseline's "
        f"{_number(base.mean('overall'))} by {against.mean_difference:+.4f}{width}: {against.verdict}.{seen}"
    )


def final_ratios(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Return err_orth at the end over its initial value by role, one number a layer and seed."""
    last = max((row["step"] for row in rows), default=0)
    found: dict[str, list[float]] = {}
    for role in ("query", "key", "value", "token_embedding", "affinity"):
        ratios = [
            row["error_over_initial"] for row in rows
            if row["step"] == last and role in row["weight"].split(".") and row["error_over_initial"] is not None
        ]  # fmt: skip
        if ratios:
            found[role] = ratios
    return found


def about_drift(cells: Sequence[CellResult]) -> str:
    """Return how the baseline's own err_orth moved; empty where it was not trained."""
    ratios = final_ratios(error_rows(cells))
    parts = [
        f"{role} {_number(mean_and_standard_error(values))} (below 1 in {sum(v < 1 for v in values)} of {len(values)})"
        for role, values in ratios.items()
    ]
    if not parts:
        return ""
    return (
        "Drift of the unconstrained baseline, err_orth at the end over its initial value, all layers and seeds (paper: "
        f"every weight below 1, the key in every layer, the affinity not): {'; '.join(parts)}."
    )


def _weakest_qr(cells: Sequence[CellResult], method: str) -> CellResult | None:
    mine = [result for result in cells if result.cell.form == method and result.runs]
    return min(mine, key=lambda result: result.cell.strength, default=None)


def qr_share(cells: Sequence[CellResult], method: str) -> float | None:
    """Return the overall score of a QR form at its least strength over the baseline's; None without both."""
    base, weakest = best_of(cells, BASELINE), _weakest_qr(cells, method)
    return weakest.mean("overall")[0] / base.mean("overall")[0] if base and weakest else None


def about_qr(cells: Sequence[CellResult]) -> list[str]:
    """Return one line for each QR form with a result."""
    base = best_of(cells, BASELINE)
    lines = []
    for method in QR_METHODS:
        weakest, share = _weakest_qr(cells, method), qr_share(cells, method)
        if base is None or weakest is None or share is None:
            continue
        verdict = weakest.against.verdict if weakest.against else "not tested"
        lines.append(
            f"QR loss by {method} (paper: a failure, accuracy more than halved even at 1e-6, and too slow): at "
            f"{weakest.cell.name} the overall score is {_number(weakest.mean('overall'))}, {100 * share:.0f} % of "
            f"the baseline's: {verdict}; a training takes {weakest.seconds() / base.seconds():.2f} times its processor "
            "time."
        )
    return lines


def _described(settings: SweepSettings) -> str:
    options = settings.options
    model = options.encoder or (
        f"a BERT of {options.num_hidden_layers} layers and width {options.hidden_size}, trained from scratch"
    )
    path = Path(settings.out) / DATA
    try:
        sets = json.loads(path.read_bytes()) if path.exists() else {}
        rows = "; ".join(
            f"{name} {data['train_rows']} of {data['train_rows_available']} train rows, {data['valid_rows']} dev rows, "
            f"{data['rows_cut']} rows cut to {options.max_length} tokens"
            for name, data in sets.items()
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path}: not the description of the data of a sweep ({type(error).__name__}: {error}); restore the "
            "file, or remove it: the page then says nothing about the data"
        ) from error
    return (
        f"Model: {model}; {options.steps} steps of {options.batch_size} rows from each set; seeds "
        f"{', '.join(map(str, settings.seeds))}. Data: {rows}. Scores are of the dev files, as in the paper; overall = "
        "(sst + para + (sts + 1) / 2) / 3."
    )


Table = Callable[[str, Sequence[str], Sequence[Sequence[str]]], str]


def _table(cells: Sequence[CellResult], draw: Table) -> str:
    body = []
    for row in table_rows(cells):
        numbers = [_number((row[name], row.get(f"{name}_se"))) for name in COLUMNS]
        body.append([row["row"], "paper says" if row["source"] == "paper" else f"we got ({row['cell']})", *numbers])
    title = "Table 1: paper says / we got (mean +- standard error; strength chosen on the same dev rows, as he did)"
    return draw(title, ["penalty", "", *HEADINGS.values()], body)


def _sweep_table(cells: Sequence[CellResult], draw: Table) -> str:
    body = []
    for result in cells:
        numbers = [_number(result.mean(name)) if result.runs else "failed" for name in COLUMNS]
        verdict = result.against.verdict if result.against else "the first" if result.cell.name == BASELINE else "-"
        body.append([result.cell.name, *numbers, verdict])
    return draw("Figure 1: the sweep", ["cell", *HEADINGS.values(), "overall against baseline"], body)


def sweep_row(result: CellResult) -> dict[str, Any]:
    """Return a cell as a row of ``sweep.csv``."""
    against = result.against
    row: dict[str, Any] = {
        "cell": result.cell.name, "place": result.cell.place, "form": result.cell.form,
        "strength": result.cell.strength, "seeds": len(result.runs), "failed": len(result.failed),
    }  # fmt: skip
    for name in COLUMNS:
        row[name], row[f"{name}_se"] = result.mean(name) if result.runs else (None, None)
    row["cpu_seconds"] = result.seconds() if result.runs else None
    row["difference"] = against.mean_difference if against else None
    row["difference_se"] = against.standard_error if against else None
    row["p_value"], row["p_holm"] = (against.p_value, against.p_holm) if against else (None, None)
    row["verdict"] = against.verdict if against else None
    return row


def _markdown(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return f"**{title}**\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _number(value: tuple[float, float | None]) -> str:
    mean, error = value
    return f"{mean:.4f}" if error is None else f"{mean:.4f} +- {error:.4f}"


def strengths_of(cells: Sequence[CellResult]) -> Mapping[str, list[CellResult]]:
    """Return the cells with results by group, weakest strength first; the baseline is left out."""
    groups: dict[str, list[CellResult]] = {}
    for result in sorted(cells, key=lambda result: result.cell.strength):
        if result.runs and result.cell.name != BASELINE:
            groups.setdefault(result.cell.group, []).append(result)
    return groups
