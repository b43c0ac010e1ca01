"""Orthogonality error by layer and role as tables with coloured cells, a summary before the single
layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from wellposed.measurement.figures import HeatMap, error_shown, heat_map, short_number, short_role
from wellposed.report._html_table import Cell, Column, Table

LEVELS = 9
"""Colours of the scale; the page's style names them h0, h1, ..."""
OPEN_ROWS = 30
"""Layers of all variants together up to which the maps are open."""
Rows = Sequence[Mapping[str, Any]]
Weights = Sequence[tuple[str, Rows, Rows]]


class _Scale:
    """One logarithmic colour scale."""

    def __init__(self, values: Sequence[float]) -> None:
        self.low, high = (min(values), max(values)) if values else (1e-3, 1.0)
        self.step = math.log(max(high / self.low, 1.01)) / LEVELS

    def cell(self, value: float | None, text: str = "") -> Cell | None:
        """Return a value in its colour; None where there is none."""
        if value is None:
            return None
        style = "bad"
        if math.isfinite(value):
            level = int(math.log(value / self.low) / self.step) if value > self.low else 0
            style = f"heat h{min(LEVELS - 1, level)}"
        return Cell(value, f"{text}{short_number(value)}", style)

    def ends(self) -> list[tuple[str, str]]:
        least = [self.low * math.exp(k * self.step) for k in range(LEVELS)]
        return [(f"heat h{k}", short_number(value)) for k, value in enumerate(least)]


def heat_maps(name: str, weights: Weights) -> dict[str, Any] | None:
    """Return the maps of all variants on one scale; None where no weight belongs to a layer."""
    error = error_shown(row for _, *pair in weights for rows in pair for row in rows)
    maps = [
        (variant, heat_map(before, error.name), heat_map(after, error.name))
        for variant, before, after in weights
    ]
    every = [heat for _, *pair in maps for heat in pair]
    if not any(heat.layers for heat in every):
        return None
    values = [value for heat in every for line in heat.values for value in line]
    scale = _Scale([value for value in values if value and value > 0 and math.isfinite(value)])
    return {
        "formula": error.formula,
        "summary": _summary(name, maps, scale),
        "maps": [
            (
                variant,
                [_map(f"{name}-{k}-before", first, scale), _map(f"{name}-{k}-after", last, scale)],
            )
            for k, (variant, first, last) in enumerate(maps)
        ],
        "scale": scale.ends(),
        "open": sum(len(last.layers) for _, _, last in maps) <= OPEN_ROWS,
    }


def _summary(name: str, maps: Sequence[tuple[str, HeatMap, HeatMap]], scale: _Scale) -> Table:
    roles = list(dict.fromkeys(role for _, *pair in maps for heat in pair for role in heat.roles))
    rows = []
    for variant, *pair in maps:
        row: dict[str, Any] = {"variant": variant}
        before, after = (_worst(heat) for heat in pair)
        for role in roles:
            start = row[f"{role} before"] = before.get(role)
            text = "-" if start is None else short_number(start)
            row[f"{role} after"] = scale.cell(after.get(role), f"{text} → ")
        rows.append(row)
    columns = [
        Column("variant", "variant", "text"),
        *(Column(f"{role} after", short_role(role)) for role in roles),
        *(Column(f"{role} before", "", "hidden") for role in roles),
    ]
    caption = "Largest error over layers, before → after training"
    return Table(f"{name}-largest", caption, columns, rows)


def _map(name: str, heat: HeatMap, scale: _Scale) -> Table:
    lines = zip(heat.layers, heat.values, strict=True)
    rows = [
        {"layer": layer, **dict(zip(heat.roles, map(scale.cell, line), strict=True))}
        for layer, line in lines
    ]
    roles = [Column(role, short_role(role)) for role in heat.roles]
    caption = f"{name.rpartition('-')[2]} training"
    return Table(name, caption, [Column("layer", "layer", "text"), *roles], rows)


def _worst(heat: HeatMap) -> dict[str, float]:
    columns = zip(heat.roles, zip(*heat.values, strict=True), strict=True)
    present = {role: [value for value in column if value is not None] for role, column in columns}
    return {role: max(column) for role, column in present.items() if column}
