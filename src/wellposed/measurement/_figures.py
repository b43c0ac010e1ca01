"""Heat maps and spectra of measured weights; free of torch."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from wellposed.errors import ConfigError, import_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

INK = "#0a0b0c"
"""Text and axes are drawn in this colour, which pages of both colours replace."""
MOST_NUMBERS = 200
"""Cells up to which a map has its numbers written in them."""
MOST_LAYERS = 48
"""Layers up to which each is named."""
COLOUR_MAP = "viridis"
SPECTRUM_POINTS = 48
# `wellposed.roles.ROLE_NAMES`, named again since that module imports torch.
_ATTENTION = ("query", "key", "value", "output")
_LAYER = (*_ATTENTION, "feedforward_in", "feedforward_gate", "feedforward_out")
ROLE_ORDER = (*_LAYER, "latent", "adapter", "token_embedding", "position_embedding")


class HeatMap(NamedTuple):
    """Values by layer (rows) and role (columns); ``None`` where the model has no such weight."""

    layers: list[str]
    roles: list[str]
    values: list[list[float | None]]


def heat_map(rows: Sequence[Mapping[str, Any]], value: str) -> HeatMap:
    """Arrange ``value`` of measurement rows as layers x roles; embeddings, which have no layer, are
    left out.

    Two weights of one layer and role (cross-attention, experts) get a column each.
    """
    layered = [row for row in rows if row.get("layer") is not None]
    columns, layers = _columns(layered), _layers(layered)
    names = sorted(set(columns), key=_role_key)
    places = zip(map(_layer, layered), columns, strict=True)
    cells = {place: row.get(value) for place, row in zip(places, layered, strict=True)}
    grid = [[cells.get((layer, name)) for name in names] for layer in layers]
    return HeatMap([f"{stack} {layer}" for stack, layer in layers], names, grid)


class ErrorShown(NamedTuple):
    """Which orthogonality error a figure shows: its name in a row, and how a figure writes it."""

    name: str
    formula: str


def error_shown(rows: Iterable[Mapping[str, Any]]) -> ErrorShown:
    """Return the scale-free error where every row has it, else (rows of version 0.1, zero weights)
    the raw one."""
    scale_free = ErrorShown(
        "scale_free_orthogonality_error", "|W Wᵀ / s - I| / |I| at the best scale s"
    )
    if all(row.get(scale_free.name) is not None for row in rows):
        return scale_free
    return ErrorShown("orthogonality_error", "max off-diagonal of |W Wᵀ|")


class Spectrum(NamedTuple):
    """Singular values of one weight, and where it lies: 0 for the first layer, 1 for the last."""

    values: Sequence[float]
    depth: float


def save_measurement_figure(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw err_orth as a heat map and one panel of spectra per role; what was not measured is left
    out."""
    if path.suffix not in (".svg", ".png"):
        expected = "a figure is written as .svg or .png"
        raise ConfigError(f"{path}: {expected}, received suffix {path.suffix!r}")
    with figure_style():
        error = error_shown(rows)
        heat = heat_map(rows, error.name)
        roles = spectra_by_role(rows)
        tall, lines = 1.2 + 0.32 * max(len(heat.layers), 1), math.ceil(len(roles) / 3)
        figure = new_figure(max(9, 2.4 + 0.4 * len(heat.roles)), tall + 2.3 * lines, "constrained")
        heights = [tall, 2.3 * lines] if roles else [tall]
        parts = list(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False).flat)
        _draw_heat_map(parts[0], heat, f"Orthogonality error, {error.formula}")
        if roles:
            panels = list(parts[1].subplots(lines, 3, squeeze=False).flat)
            for axes, (name, curves) in zip(panels, roles.items(), strict=False):
                _draw_spectra(axes, curves, short_role(name))
            for axes in panels[len(roles) :]:
                axes.set_visible(False)
            parts[1].supxlabel("share of singular values (colour: layer, dark first)", fontsize=9)
            parts[1].supylabel("singular value", fontsize=9)
        path.parent.mkdir(parents=True, exist_ok=True)
        undated = {"Date": None} if path.suffix == ".svg" else None
        figure.savefig(path, facecolor="white", metadata=undated, dpi=150)
    return path


def error_figure(heat: HeatMap) -> Figure:
    """Return the figure of a map; to be called within `figure_style`."""
    rows, left = len(heat.layers), 0.3 + 0.075 * min(60, max(map(len, heat.layers)))
    row = 0.22 if rows * len(heat.roles) <= MOST_NUMBERS else 0.16 if rows <= MOST_LAYERS else 0.08
    tall = 1.3 + rows * row
    figure = new_figure(11.7, tall)
    _draw_heat_map(figure, heat, "")
    figure.subplots_adjust(left=left / 11.7, right=0.98, top=1 - 0.2 / tall, bottom=1.1 / tall)
    return figure


def _draw_heat_map(part: FigureBase, heat: HeatMap, title: str) -> None:
    """Draw one layers x roles map with the number in every cell, if these are few."""
    import numpy as np
    from matplotlib.colors import LogNorm

    axes = part.subplots()
    if not heat.values:
        axes.set_axis_off()
        axes.set_title(f"{title}: no weight belongs to a layer", loc="left")
        return
    axes.set_title(title, loc="left")
    numbers = [[math.nan if value is None else value for value in line] for line in heat.values]
    values = np.array(numbers)
    drawn = values[np.isfinite(values) & (values > 0)]
    low, high = (drawn.min(), drawn.max()) if len(drawn) else (1e-3, 1.0)
    if high <= 1.01 * low:
        low, high = low / 2, high * 2
    norm, shown = LogNorm(low, high), np.ma.masked_invalid(values.clip(min=low))
    mesh = axes.pcolormesh(shown, norm=norm, cmap=COLOUR_MAP)
    names = [short_role(name) for name in heat.roles]
    axes.set_xticks(np.arange(len(names)) + 0.5, names, rotation=35, ha="right")
    shown = slice(None, None, 1 + len(heat.layers) // MOST_LAYERS)
    axes.set_yticks((np.arange(len(heat.layers)) + 0.5)[shown], heat.layers[shown])
    axes.tick_params(length=0)
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    for (i, j), value in np.ndenumerate(values):
        if not np.isnan(value) and values.size <= MOST_NUMBERS:
            ink = "white" if norm(value) < 0.6 else "black"
            where = {"ha": "center", "va": "center", "fontsize": 7.5, "color": ink}
            axes.text(j + 0.5, i + 0.5, short_number(value), in_layout=False, **where)
    ticks = np.geomspace(low, high, 5)
    bar = part.colorbar(mesh, ax=axes, shrink=0.8, pad=0.02, ticks=ticks, format="%.2g")
    bar.minorticks_off()
    bar.set_label("err_orth")


def _draw_spectra(axes: Axes, curves: Sequence[Spectrum], title: str) -> None:
    """Draw singular values, largest first, against their share of the width; the colour tells the
    depth."""
    import matplotlib as mpl
    import numpy as np

    colours = mpl.colormaps[COLOUR_MAP]
    for values, depth in curves:
        ordered = np.sort(np.asarray(values, dtype=float))[::-1]
        picks = np.unique(np.linspace(0, len(ordered) - 1, SPECTRUM_POINTS).round().astype(int))
        share, colour = (picks + 0.5) / len(ordered), colours(0.28 + 0.57 * depth)
        axes.plot(share, ordered[picks], color=colour, linewidth=1.5)
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left")
    add_grid(axes)


def spectra_by_role(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Spectrum]]:
    """Return, per role, the spectra of its weights."""
    measured = [row for row in rows if row.get("singular_values")]
    layers = _layers([row for row in measured if row["layer"] is not None])
    depth = {layer: index / max(len(layers) - 1, 1) for index, layer in enumerate(layers)}
    curves: dict[str, list[Spectrum]] = {}
    for row in measured:
        shown = Spectrum(row["singular_values"], depth.get(_layer(row), 0.0))
        curves.setdefault(role_name(row), []).append(shown)
    return dict(sorted(curves.items(), key=lambda item: _role_key(item[0])))


def role_name(row: Mapping[str, Any]) -> str:
    """Return the role of a row, with ``cross_`` before that of cross-attention."""
    return f"cross_{row['role']}" if row.get("kind") == "cross" else str(row["role"])


def short_number(value: float) -> str:
    """Return at most four characters or so: ``0.12``, ``3.4``, ``12``, ``1e-6``.

    >>> [short_number(v) for v in (0.1234, 3.44, 12.3, 1.2e-6, 0.0)]
    ['0.12', '3.4', '12', '1e-6', '0']
    """
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return str(value)
    if abs(value) < 0.005 or abs(value) >= 1e4:
        mantissa, _, exponent = f"{value:.0e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    if abs(value) < 1:
        return f"{value:.2f}"
    return f"{value:.1f}" if abs(value) < 10 else f"{value:.0f}"


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a column for each row: its role, followed by the module's name where several rows of a
    layer share the role, as experts do."""
    places = [(row["stack"], row["layer"], role_name(row)) for row in rows]
    seen = Counter(places)
    return [
        place[2] if seen[place] == 1 else f"{place[2]} ({_own_name(row)})"
        for row, place in zip(rows, places, strict=True)
    ]


def _own_name(row: Mapping[str, Any]) -> str:
    """Return the last name of a weight's module, with its entry in a stack of experts."""
    name, parameter = str(row["path"]).rpartition(".")[2], str(row.get("parameter", ""))
    return name + parameter[parameter.rfind("[") :] if parameter.endswith("]") else name


def short_role(name: str) -> str:
    """Return a role as a heading: ``ff in``, ``token emb.``."""
    return name.replace("feedforward_", "ff ").replace("_embedding", " emb.").replace("_", " ")


def _layer(row: Mapping[str, Any]) -> tuple[str, Any]:
    return str(row["stack"]), row["layer"]


def _layers(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, Any]]:
    """Return the layers of rows, encoder before decoder, as data flows."""
    return sorted(set(map(_layer, rows)), key=lambda layer: (layer[0] != "encoder", *layer))


def _role_key(name: str) -> tuple[bool, int, list[str | int]]:
    """Self-attention, feed-forward, then cross-attention; roles in the order data flows, 2 before
    10."""
    role = name.partition(" ")[0].removeprefix("cross_")
    order = ROLE_ORDER.index(role) if role in ROLE_ORDER else len(ROLE_ORDER)
    parts = [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]
    return name.startswith("cross_"), order, parts


@contextmanager
def figure_style() -> Iterator[None]:
    """Set matplotlib's parameters for the time of drawing and saving one of our figures."""
    mpl = import_extra("matplotlib", "lab", "figures")
    inked = ("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color")
    # Without mathematics, as a dollar sign in a variant's name is a dollar sign.
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
        warnings.filterwarnings("ignore", "Glyph")  # what reads an SVG file has fonts of its own
        yield


def new_figure(width: float, height: float, layout: Literal["constrained"] | None = None) -> Figure:
    """Return an empty figure of the given size in inches that no window knows about."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout=layout)


def add_grid(axes: Axes) -> None:
    """Draw thin grey lines behind a plot, which dark and light pages both show."""
    axes.grid(visible=True, color="#888888", alpha=0.25, linewidth=0.5)
