"""Files that the sweep of McGrath (2024) writes: his Figure 1, Figure 3 and Table 1, with tests of
what they show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from wellposed.charts import draw
from wellposed.errors import DataError
from wellposed.finite_json import from_json
from wellposed.measurement import text_table, write_csv
from wellposed.training.folder.durable_files import replace_files
from wellposed_studies.mcgrath2024.grid import BASELINE
from wellposed_studies.mcgrath2024.panels import HEADINGS, figure_1, figure_3, table_1
from wellposed_studies.mcgrath2024.results import (
    COLUMNS,
    CellResult,
    cell_results,
    conclusion,
    error_rows,
    sweep_row,
    table_rows,
)
from wellposed_studies.mcgrath2024.sweep import DATA, SweepSettings
from wellposed_studies.runs import plus_minus

DrawTable = Callable[[str, Sequence[str], Sequence[Sequence[str]]], str]


def write_outputs(settings: SweepSettings) -> str:
    """Write tables and figures into the folder of the sweep and return what to print."""
    cells = cell_results(settings)
    rows = error_rows(cells)
    columns = ["row", "source", "cell", *COLUMNS, *(f"{name}_se" for name in COLUMNS)]
    described, said = _described(settings), conclusion(cells)
    page = [f"# McGrath (2024), {settings.scale} scale", described, *_tables(cells, _markdown)]
    with replace_files(Path(settings.out), last=".md") as out:
        write_csv(
            out / "sweep.csv", list(sweep_row(cells[0])), [sweep_row(result) for result in cells]
        )
        write_csv(
            out / "figure-3.csv", ["seed", "step", "weight", "error", "error_over_initial"], rows
        )
        write_csv(out / "table-1.csv", columns, table_rows(cells))
        draw(figure_1(cells), out / "figure-1.svg")
        if rows:
            draw(figure_3(rows), out / "figure-3.svg", columns=5)
        draw(table_1(cells), out / "table-1.svg")
        text = "\n\n".join([*page, *(f"- {line}" for line in said)])
        (out / "results.md").write_text(f"{text}\n", encoding="utf-8")
    return "\n\n".join([described, *_tables(cells, text_table), *said])


def _described(settings: SweepSettings) -> str:
    options = settings.options
    model = options.encoder or (
        f"a BERT of {options.num_hidden_layers} layers and width {options.hidden_size}, trained"
        " from scratch"
    )
    path = Path(settings.out) / DATA
    try:
        sets = from_json(path.read_bytes()) if path.exists() else {}
        rows = "; ".join(
            f"{name} {data['train_rows']} of {data['train_rows_available']} train rows,"
            f" {data['valid_rows']} dev rows, {data['rows_cut']} rows cut to {options.max_length}"
            " tokens"
            for name, data in sets.items()
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{path}: not the description of the data of a sweep ({type(error).__name__}: {error});"
            " restore the file, or remove it: the page then says nothing about the data"
        ) from error
    return (
        f"Model: {model}; {options.steps} steps of {options.batch_size} rows from each set; seeds"
        f" {', '.join(map(str, settings.seeds))}. Data: {rows}. Scores are of the dev files, as in"
        " the paper; overall = (sst + para + (sts + 1) / 2) / 3."
    )


def _tables(cells: Sequence[CellResult], draw_table: DrawTable) -> list[str]:
    """Return Table 1 and the cells of Figure 1 as text."""
    table = [
        [
            row["row"],
            "paper says" if row["source"] == "paper" else f"we got ({row['cell']})",
            *(plus_minus((row[name], row.get(f"{name}_se")), 4) for name in COLUMNS),
        ]
        for row in table_rows(cells)
    ]
    sweep = [[result.cell.name, *map(result.text, COLUMNS), _verdict(result)] for result in cells]
    title = (
        "Table 1: paper says / we got (mean +- standard error; strength chosen on the same dev"
        " rows, as he did)"
    )
    return [
        draw_table(title, ["penalty", "", *HEADINGS.values()], table),
        draw_table(
            "Figure 1: the sweep", ["cell", *HEADINGS.values(), "overall against baseline"], sweep
        ),
    ]


def _verdict(result: CellResult) -> str:
    if result.against is not None:
        return result.against.verdict
    return "the first" if result.cell.name == BASELINE else "-"


def _markdown(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return f"**{title}**\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines)
