"""Heat maps and spectra of measured weights; free of torch."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from wellposed.drawing import add_grid, figure_style, new_figure
from wellposed.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

COLOUR_MAP = "viridis"
SPECTRUM_POINTS = 48
# `wellposed.roles.ROLE_NAMES`, named again since that module imports torch.
ROLE_ORDER = (
    "query",
    "key",
    "value",
    "output",
    "feedforward_in",
    "feedforward_gate",
    "feedforward_out",
    "token_embedding",
    "position_embedding",
)


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
    columns = _columns(layered)
    layers = sorted({(str(row["stack"]), int(row["layer"])) for row in layered}, key=_layer_key)
    names = sorted(set(columns), key=_role_key)
    cells = {
        ((str(row["stack"]), int(row["layer"])), name): row.get(value)
        for row, name in zip(layered, columns, strict=True)
    }
    grid = [[cells.get((layer, name)) for name in names] for layer in layers]
    return HeatMap([f"{stack} {layer}" for stack, layer in layers], names, grid)


class ErrorShown(NamedTuple):
    """Which orthogonality error a figure shows: its name in a row, and how a figure writes it."""

    name: str
    formula: str


def error_shown(rows: Iterable[Mapping[str, Any]]) -> ErrorShown:
    """Return the scale-free error where every row has it, else (rows of version 0.1, zero weights)
    the raw one."""
    if all(row.get("scale_free_orthogonality_error") is not None for row in rows):
        return ErrorShown(
            "scale_free_orthogonality_error", "|W Wᵀ / s - I| / |I| at the best scale s"
        )
    return ErrorShown("orthogonality_error", "max off-diagonal of |W Wᵀ|")


def shared_log_norm(maps: Sequence[HeatMap]) -> Normalize:
    """Return one logarithmic colour scale for all maps, so that their colours can be compared."""
    from matplotlib.colors import LogNorm

    values = [
        v
        for m in maps
        for line in m.values
        for v in line
        if v is not None and v > 0 and math.isfinite(v)
    ]
    low, high = (min(values), max(values)) if values else (1e-3, 1.0)
    if high < low * 1.01:
        low, high = low / 2, high * 2
    return LogNorm(low, high)


def draw_heat_map(axes: Axes, heat: HeatMap, norm: Normalize, title: str) -> Any:
    """Draw one layers x roles map with the number in every cell; None where no weight belongs to a
    layer."""
    import matplotlib as mpl
    import numpy as np

    if not heat.values:
        axes.set_axis_off()
        axes.set_title(f"{title}: no weight belongs to a layer", loc="left")
        return None
    values = np.array(
        [
            [np.nan if v is None else max(v, float(norm.vmin or 0)) for v in line]
            for line in heat.values
        ]
    )
    colours = mpl.colormaps[COLOUR_MAP].resampled(64)
    mesh = axes.pcolormesh(np.ma.masked_invalid(values), norm=norm, cmap=colours, edgecolors="none")
    axes.set_xticks(
        [i + 0.5 for i in range(len(heat.roles))],
        [short_role(name) for name in heat.roles],
        rotation=35,
        ha="right",
    )
    axes.set_yticks([i + 0.5 for i in range(len(heat.layers))], heat.layers)
    axes.tick_params(length=0)
    axes.invert_yaxis()
    axes.set_title(title, loc="left")
    for spine in axes.spines.values():
        spine.set_visible(False)
    for i, line in enumerate(heat.values):
        for j, value in enumerate(line):
            if value is not None:
                red, green, blue, _ = colours(norm(values[i, j]))
                ink = "#ffffff" if 0.3 * red + 0.59 * green + 0.11 * blue < 0.55 else "#000000"
                axes.text(
                    j + 0.5,
                    i + 0.5,
                    short_number(value),
                    ha="center",
                    va="center",
                    fontsize=7.5,
                    color=ink,
                )
    return mesh


def add_colour_bar(figure: Figure, mesh: Any, axes: Any, label: str) -> None:
    """Add a colour bar whose numbers are written plainly."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = float(mesh.norm.vmin), float(mesh.norm.vmax)
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low < 100 else (1,)
    ticks = [step * 10.0**k for k in decades for step in steps if low <= step * 10.0**k <= high]
    bar = figure.colorbar(mesh, ax=axes, shrink=0.8, pad=0.02)
    bar.solids.set_rasterized(False)  # type: ignore[union-attr]  # a page that forbids images must show it
    bar.ax.yaxis.set_major_locator(FixedLocator(ticks if len(ticks) > 1 else [low, high]))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}"))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.set_label(label)


class Spectrum(NamedTuple):
    """Singular values of one weight, and where it lies: 0 for the first layer, 1 for the last."""

    values: Sequence[float]
    depth: float


def draw_spectra(axes: Axes, curves: Sequence[Spectrum], title: str) -> None:
    """Draw singular values, largest first, against their share of the width; the colour tells the
    depth."""
    import matplotlib as mpl
    import numpy as np

    colours = mpl.colormaps[COLOUR_MAP]
    for values, depth in curves:
        ordered = np.sort(np.asarray(values, dtype=float))[::-1]
        picks = np.unique(np.linspace(0, len(ordered) - 1, SPECTRUM_POINTS).round().astype(int))
        share = (picks + 0.5) / len(ordered)
        axes.plot(
            share,
            ordered[picks],
            color=colours(0.28 + 0.57 * depth),
            linewidth=1.5,
        )
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom=0)
    axes.set_title(title, loc="left")
    add_grid(axes)


def save_measurement_figure(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw err_orth as a heat map and one panel of spectra per role; what was not measured is left
    out."""
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(
            f"{path}: a figure is written as .svg or .png, received suffix {path.suffix!r}"
        )
    with figure_style():
        error = error_shown(rows)
        heat = heat_map(rows, error.name)
        roles = spectra_by_role(rows)
        tall = 1.2 + 0.32 * max(len(heat.layers), 1)
        lines = math.ceil(len(roles) / 3)
        wide = max(9, 2.4 + 0.4 * len(heat.roles))
        figure = new_figure(wide, tall + 2.3 * lines)
        parts = figure.subfigures(
            2 if roles else 1, 1, height_ratios=[tall, 2.3 * lines] if roles else [1], squeeze=False
        )
        axes = parts[0, 0].subplots()
        norm = shared_log_norm([heat])
        mesh = draw_heat_map(axes, heat, norm, f"Orthogonality error, {error.formula}")
        if mesh is not None:
            add_colour_bar(parts[0, 0], mesh, axes, "err_orth")
        if roles:
            panels = list(parts[1, 0].subplots(lines, 3, squeeze=False).flat)
            for axes, (name, curves) in zip(panels, roles.items(), strict=False):
                draw_spectra(axes, curves, short_role(name))
            for axes in panels[len(roles) :]:
                axes.set_visible(False)
            parts[1, 0].supxlabel(
                "share of singular values (colour: layer, dark first)", fontsize=9
            )
            parts[1, 0].supylabel("singular value", fontsize=9)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(
            path,
            facecolor="white",
            metadata={"Date": None} if path.suffix == ".svg" else None,
            dpi=150,
        )
    return path


def spectra_by_role(
    rows: Sequence[Mapping[str, Any]],
) -> dict[str, list[Spectrum]]:
    """Return, per role, the spectra of its weights."""
    measured = [row for row in rows if row.get("singular_values")]
    layers = sorted(
        {(str(row["stack"]), row["layer"]) for row in measured if row["layer"] is not None},
        key=_layer_key,
    )
    depth = {layer: index / max(len(layers) - 1, 1) for index, layer in enumerate(layers)}
    curves: dict[str, list[Spectrum]] = {}
    for row in measured:
        shade = depth.get((str(row["stack"]), row["layer"]), 0.0)
        role = f"cross_{row['role']}" if row.get("kind") == "cross" else str(row["role"])
        curves.setdefault(role, []).append(Spectrum(row["singular_values"], shade))
    return dict(sorted(curves.items(), key=lambda item: _role_key(item[0])))


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
    return (
        f"{value:.2f}" if abs(value) < 1 else f"{value:.1f}" if abs(value) < 10 else f"{value:.0f}"
    )


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Role of every row, ``cross_`` before that of cross-attention; twins (experts) carry their
    module's name."""
    names = [
        f"cross_{row['role']}" if row.get("kind") == "cross" else str(row["role"]) for row in rows
    ]
    places = [(row["stack"], row["layer"], name) for row, name in zip(rows, names, strict=True)]
    seen = Counter(places)
    return [
        name if seen[place] == 1 else f"{name} ({str(row['path']).rpartition('.')[2]})"
        for row, name, place in zip(rows, names, places, strict=True)
    ]


def short_role(name: str) -> str:
    """Return a role as a heading: ``ff in``, ``token emb.``."""
    return name.replace("feedforward_", "ff ").replace("_embedding", " emb.").replace("_", " ")


def _layer_key(layer: tuple[str, Any]) -> tuple[bool, str, Any]:
    """Encoder before decoder, as data flows."""
    return (layer[0] != "encoder", layer[0], layer[1])


def _role_key(name: str) -> tuple[bool, int, list[str | int]]:
    """Self-attention, feed-forward, then cross-attention; roles in the order data flows, 2 before
    10."""
    role = name.partition(" ")[0].removeprefix("cross_")
    order = ROLE_ORDER.index(role) if role in ROLE_ORDER else len(ROLE_ORDER)
    parts = re.split(r"(\d+)", name)
    return (
        name.startswith("cross_"),
        order,
        [int(part) if part.isdecimal() else part for part in parts],
    )
