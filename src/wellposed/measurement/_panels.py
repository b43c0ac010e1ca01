"""Curves of what a `Monitor` measured while a model trained; free of torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from wellposed.errors import ConfigError
from wellposed.measurement._figures import figure_style, new_figure, short_role

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, float]]
MOST_NAMED = 10
"""Up to so many layers each one has an entry in the legend."""
_FEW = 30
"""Up to so many points of a curve each one has a marker."""
_DECADE = 10.0
"""An axis is logarithmic if its values span more than this factor."""


class Panel(NamedTuple):
    """One of the numbers of a monitor, and how it is drawn."""

    number: str
    title: str
    scale: str
    worst: Any


PANELS = (
    Panel("sigma_max", "largest singular value", "log", max),
    Panel("scale_free_orthogonality_error", "distance from orthogonal (scale-free)", "log", max),
    Panel("stable_rank", "stable rank", "linear", min),
    Panel("logit_max", "largest attention logit", "linear", max),
    Panel("entropy", "entropy of attention, of 1", "linear", min),
    Panel("kurtosis", "kurtosis of activations", "log", max),
    Panel("grad_norm", "gradient norm", "log", max),
    Panel("update", "step over weight", "log", max),
    Panel("activation_rms", "size of activations (rms)", "log", max),
)


class Curve(NamedTuple):
    """Values over the measured steps of one layer, or of one role in a layer."""

    layer: str
    role: str
    values: list[float]


def monitor_figure(rows: Rows, limits: Mapping[str, float], path: Path | None = None) -> Figure:
    """Draw the panels of all numbers that were measured; save them at ``path`` if it is one."""
    if path is not None and path.suffix not in (".svg", ".png"):
        raise ConfigError(f"{path}: expected .svg or .png, received suffix {path.suffix!r}")
    curves_by_panel = [(panel, curves_of(rows, panel)) for panel in PANELS]
    drawn = [(panel, curves) for panel, curves in curves_by_panel if curves]
    if not drawn:
        raise ConfigError(
            "plot: nothing was measured yet; call monitor.step() after each optimizer.step()"
        )

    with figure_style():
        columns = min(3, len(drawn))
        lines = math.ceil(len(drawn) / columns)
        figure = new_figure(4.2 * columns, 3.1 * lines, layout="constrained")
        figure.set_facecolor("white")
        axes = figure.subplots(lines, columns, squeeze=False).flatten().tolist()
        steps = [row["step"] for row in rows]
        palette = _Palette(drawn)
        for part, (panel, curves) in zip(axes, drawn, strict=False):
            limit = limits.get(panel.number)
            _draw(part, panel, steps, curves, limit=limit, palette=palette)
        for part in axes[len(drawn) :]:
            part.set_axis_off()
        palette.add_legends(figure)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            undated = {"Date": None} if path.suffix == ".svg" else None
            figure.savefig(path, facecolor="white", metadata=undated, dpi=150)
        else:
            figure.draw_without_rendering()  # places the parts while our style is on

    return figure


def curves_of(rows: Rows, panel: Panel) -> list[Curve]:
    """Return a curve for each role and layer, or of the worst head of each layer; NaN is a gap."""
    cells: dict[tuple[str, str], list[str]] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        parts = name.split("/")
        if len(parts) == 3 and parts[-1] == panel.number:
            cells.setdefault(_layer_and_role(parts[1]), []).append(name)

    curves = []
    for (layer, role), names in cells.items():
        values = []
        for row in rows:
            finite = [row[name] for name in names if math.isfinite(row.get(name, math.nan))]
            values.append(panel.worst(finite) if finite else math.nan)
        curves.append(Curve(layer, role, values))

    return curves


def _layer_and_role(subject: str) -> tuple[str, str]:
    """Split ``encoder.3.query`` or ``encoder.3.head0``; heads are no role, clashing names keep their
    path.

    >>> _layer_and_role("decoder.0.cross_query"), _layer_and_role("encoder.3.head11")
    (('decoder 0', 'cross_query'), ('encoder 3', ''))
    """
    plain, at, path = subject.partition("@")
    stack, _, rest = plain.partition(".")
    layer, _, role = rest.partition(".")
    if not layer.isdigit():
        return "", plain  # an embedding
    heads = role.rpartition(".")[2].startswith("head") or path.rpartition(".")[2].startswith("head")
    kind = role.partition(".")[0] if heads and role.startswith("cross.") else ""
    suffix = f"@{path.partition('.head')[0]}" if at else ""
    return f"{stack} {layer}{suffix}", kind if heads else role


class _Palette:
    """One colour for each role and one for each layer, in all panels of a figure."""

    def __init__(self, drawn: Sequence[tuple[Panel, list[Curve]]]) -> None:
        curves = [curve for _, part in drawn for curve in part]
        self.roles = list(dict.fromkeys(curve.role for curve in curves if curve.role))
        self.layers = list(dict.fromkeys(curve.layer for curve in curves if curve.layer))
        self.has_plain = any(not curve.role for curve in curves)

    def depth(self, layer: str) -> float:
        """Return the place of a layer among all of them, above 0 and at most 1."""
        return (self.layers.index(layer) + 1) / len(self.layers) if layer else 1.0

    def style(self, curve: Curve) -> dict[str, Any]:
        """Return the colour of a curve: of its role, fainter in early layers, or of its layer."""
        from matplotlib import colormaps

        if curve.role:
            colour = colormaps["tab20" if len(self.roles) > 10 else "tab10"]
            return {
                "color": colour(self.roles.index(curve.role) % colour.N),
                "alpha": 0.3 + 0.7 * self.depth(curve.layer),
            }
        return {"color": colormaps["viridis"](0.95 * (1 - self.depth(curve.layer)))}

    def add_legends(self, figure: Figure) -> None:
        """Name roles and layers once, below the panels."""
        from matplotlib.lines import Line2D

        roles = [Curve("", role, []) for role in self.roles]
        layers = [Curve(self.layers[index], "", []) for index in _named(len(self.layers))]
        groups = {"roles; later layers are darker": roles}
        groups |= {"layers": layers} if self.has_plain else {}
        sides = ("left", "right")
        for side, (title, curves) in zip(sides, groups.items(), strict=False):
            lines = [Line2D([], [], **self.style(curve)) for curve in curves]
            names = [short_role(curve.role) or curve.layer for curve in curves]
            style: Any = {"fontsize": 8, "title_fontsize": 8, "alignment": "left"}
            style |= {"ncols": min(5, len(lines)), "loc": f"outside lower {side}"}
            if lines:
                figure.legend(lines, names, title=title, **style)


def _draw(
    axes: Axes,
    panel: Panel,
    steps: Sequence[float],
    curves: list[Curve],
    *,
    limit: float | None,
    palette: _Palette,
) -> None:
    """Draw the curves of one panel."""
    axes.set_title(panel.title, loc="left")
    axes.set_xlabel("step")
    marker = "." if len(steps) <= _FEW else ""
    for curve in curves:
        style = palette.style(curve)
        axes.plot(steps, curve.values, linewidth=1.0, marker=marker, markersize=4, **style)

    positive = [value for curve in curves for value in curve.values if value > 0]
    if panel.scale == "log" and positive and max(positive) > _DECADE * min(positive):
        axes.set_yscale("log")
        # Our style has no formulas, which matplotlib's own labels of powers are.
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    if limit is not None and _is_near(limit, curves, panel):
        axes.axhline(limit, color="#b00020", linestyle="--", linewidth=0.8)


def _named(count: int) -> list[int]:
    """Return which of the layers a legend names: all, or some from the first to the last."""
    if count <= MOST_NAMED:
        return list(range(count))
    return [round(quarter * (count - 1) / 4) for quarter in range(5)]


def _is_near(limit: float, curves: Sequence[Curve], panel: Panel) -> bool:
    """Whether values come within half of the limit, so that its line does not flatten the curves."""
    values = [value for curve in curves for value in curve.values if math.isfinite(value)]
    if not values:
        return False
    return min(values) <= 2 * limit if panel.worst is min else max(values) >= limit / 2
