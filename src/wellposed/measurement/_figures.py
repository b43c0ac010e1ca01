"""Heat maps of measured weights; free of torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from wellposed.errors import ConfigError, import_extra

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK = "#0a0b0c"
"""Colour of text and axes, which light and dark pages replace."""
MOST_LAYERS = 48
"""Up to so many layers every one is named."""


class HeatMap(NamedTuple):
    """Values by layer (rows) and role (columns); ``None`` if the model has no such weight."""

    layers: list[str]
    roles: list[str]
    values: list[list[float | None]]


def heat_map(rows: Iterable[Mapping[str, Any]], value: str) -> HeatMap:
    """Arrange ``value`` of rows as layers x roles, without embeddings; a cell keeps its largest."""
    cells: dict[tuple[str, Any], dict[str, float | None]] = {}
    for row in rows:
        if row.get("layer") is not None:
            cell = cells.setdefault((str(row["stack"]), row["layer"]), {})
            name = role_name(row)
            numbers = [number for number in (cell.get(name), row.get(value)) if number is not None]
            cell[name] = max(numbers, default=None)
    layers = sorted(cells, key=lambda layer: (layer[0] != "encoder", *layer))
    names = list(dict.fromkeys(name for cell in cells.values() for name in cell))
    grid = [[cells[layer].get(name) for name in names] for layer in layers]
    return HeatMap([f"{stack} {layer}" for stack, layer in layers], names, grid)


def save_measurement_figure(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw the scale-free orthogonality error of each layer and role."""
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"{path}: expected .svg or .png, received suffix {path.suffix!r}")
    with figure_style():
        figure = error_figure(heat_map(rows, "scale_free_orthogonality_error"))
        path.parent.mkdir(parents=True, exist_ok=True)
        undated = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, facecolor="white", metadata=undated, dpi=150)
    return path


def error_figure(heat: HeatMap) -> Figure:
    """Draw a heat map; call it within `figure_style`."""
    import numpy as np
    from matplotlib.colors import LogNorm

    rows = len(heat.layers)
    left = 0.3 + 0.075 * min(60, max(map(len, heat.layers), default=0))
    tall = 1.3 + rows * (0.2 if rows <= MOST_LAYERS else 0.08)
    figure = new_figure(11.7, tall)
    axes = figure.subplots()
    if not heat.values:
        axes.set_axis_off()
        axes.set_title("err_orth: no weight belongs to a layer", loc="left")
        return figure
    figure.subplots_adjust(left=left / 11.7, right=0.98, top=1 - 0.2 / tall, bottom=1.1 / tall)
    values = np.array(heat.values, dtype=float)
    drawn = values[np.isfinite(values) & (values > 0)]
    low, high = (drawn.min(), drawn.max()) if len(drawn) else (1e-3, 1.0)
    if high <= 1.01 * low:
        low = low / 2
        high = high * 2
    cells = np.ma.masked_invalid(values.clip(min=low))
    mesh = axes.pcolormesh(cells, norm=LogNorm(low, high), cmap="viridis")
    names = [short_role(name) for name in heat.roles]
    axes.set_xticks(np.arange(len(names)) + 0.5, names, rotation=35, ha="right")
    labelled = slice(None, None, 1 + len(heat.layers) // MOST_LAYERS)
    axes.set_yticks((np.arange(len(heat.layers)) + 0.5)[labelled], heat.layers[labelled])
    axes.tick_params(length=0)
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    ticks = np.geomspace(low, high, 5)
    bar = figure.colorbar(mesh, ax=axes, shrink=0.8, pad=0.02, ticks=ticks, format="%.2g")
    bar.minorticks_off()
    bar.set_label("err_orth")
    return figure


def role_name(row: Mapping[str, Any]) -> str:
    """Return the role of a row, with ``cross_`` in front for cross-attention."""
    return f"cross_{row['role']}" if row.get("kind") == "cross" else str(row["role"])


def short_role(name: str) -> str:
    """Return a role as a heading: ``ff in``, ``token emb.``."""
    return name.replace("feedforward_", "ff ").replace("_embedding", " emb.").replace("_", " ")


@contextmanager
def figure_style() -> Iterator[None]:
    """Set matplotlib's parameters while one of our figures is drawn and saved."""
    mpl = import_extra("matplotlib", "plots", "figures")
    inked = ("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color")
    # No formulas: a dollar sign in a variant's name stays a dollar sign.
    absent = ("axes.spines.right", "axes.spines.top", "legend.frameon", "text.parse_math")
    sizes = {"axes.labelsize": 9, "axes.titlesize": 10, "font.size": 9}
    style: Any = {
        **mpl.rcParamsDefault,
        **dict.fromkeys(inked, INK),
        **dict.fromkeys(absent, False),
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "svg.fonttype"), "none"),
    }
    style |= {**sizes, "svg.hashsalt": "wellposed", "backend": "agg"}
    with mpl.rc_context(style), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # readers of an SVG file use their own fonts
        yield


def new_figure(width: float, height: float, layout: Literal["constrained"] | None = None) -> Figure:
    """Return an empty figure, in inches, that opens no window."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout=layout)
