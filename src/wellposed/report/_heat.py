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

    def colour(self, value: float) -> str:
        if not math.isfinite(value):
            return "bad"
        level = (
            0 if value <= self.low else min(LEVELS - 1, int(math.log(value / self.low) / self.step))
        )
        return f"heat h{level}"

    def ends(self) -> list[tuple[str, str]]:
        return [
            (f"heat h{k}", short_number(self.low * math.exp(k * self.step))) for k in range(LEVELS)
        ]


def heat_maps(name: str, weights: Weights) -> dict[str, Any] | None:
    """Return the maps of all variants on one scale; None where no weight belongs to a layer."""
    error = error_shown(row for _, before, after in weights for row in (*before, *after))
    maps = [
        (variant, heat_map(before, error.name), heat_map(after, error.name))
        for variant, before, after in weights
    ]
    values = [
        v for _, *pair in maps for heat in pair for v in _values(heat) if v > 0 and math.isfinite(v)
    ]
    if not any(heat.layers for _, *pair in maps for heat in pair):
        return None
    scale = _Scale(values)
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
    for variant, first, last in maps:
        before, after = _worst(first), _worst(last)
        cells = {
            f"{role} after": _change(before.get(role), after.get(role), scale) for role in roles
        }
        rows.append(
            {"variant": variant, **cells, **{f"{role} before": before.get(role) for role in roles}}
        )
    return Table(
        f"{name}-largest",
        "Largest error over layers, before → after training",
        [
            Column("variant", "variant", "text"),
            *(Column(f"{role} after", short_role(role)) for role in roles),
            *(Column(f"{role} before", "", "hidden") for role in roles),
        ],
        rows,
    )


def _change(before: float | None, after: float | None, scale: _Scale) -> Cell | None:
    if after is None:
        return None
    start = "-" if before is None else short_number(before)
    return Cell(after, f"{start} → {short_number(after)}", scale.colour(after))


def _map(name: str, heat: HeatMap, scale: _Scale) -> Table:
    rows = [
        {
            "layer": layer,
            **{role: _cell(value, scale) for role, value in zip(heat.roles, line, strict=True)},
        }
        for layer, line in zip(heat.layers, heat.values, strict=True)
    ]
    columns = [
        Column("layer", "layer", "text"),
        *(Column(role, short_role(role)) for role in heat.roles),
    ]
    return Table(name, f"{name.rpartition('-')[2]} training", columns, rows)


def _cell(value: float | None, scale: _Scale) -> Cell | None:
    return None if value is None else Cell(value, short_number(value), scale.colour(value))


def _worst(heat: HeatMap) -> dict[str, float]:
    columns = zip(heat.roles, zip(*heat.values, strict=True), strict=True)
    present = {role: [value for value in column if value is not None] for role, column in columns}
    return {role: max(column) for role, column in present.items() if column}


def _values(heat: HeatMap) -> list[float]:
    return [v for line in heat.values for v in line if v is not None]
