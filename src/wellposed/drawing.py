"""A look for all figures: drawn with matplotlib as files, or as inline SVG that follows the page's
text colour.

Free of torch and of pyplot's global state: a figure here is an object, never the current one.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from html import escape
from typing import TYPE_CHECKING, Any

from wellposed.errors import missing_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#0a0b0c"
"""Text and axes are drawn in this colour, which inline SVG replaces by currentColor."""
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8a8a8a")
"""Okabe and Ito (2008): told apart with any kind of colour vision; grey is last, and black is left
out for dark pages."""

_IMAGES: ContextVar[dict[str, Any] | None] = ContextVar("drawn_images", default=None)


@contextmanager
def drawn_images() -> Iterator[dict[str, Any]]:
    """Yield a dictionary that each figure drawn for a page or a file goes to as well.

    It holds pixels, (height, width, 3) uint8, by the prefix of the figure or the stem of its file.
    """
    images: dict[str, Any] = {}
    token = _IMAGES.set(images)
    try:
        yield images
    finally:
        _IMAGES.reset(token)


def note_image(name: str, figure: Figure) -> None:
    """Give ``figure`` to `drawn_images`, where that is open."""
    if (images := _IMAGES.get()) is None:
        return
    import numpy as np
    from matplotlib.image import imread

    out = io.BytesIO()
    figure.savefig(out, format="png", facecolor="white", dpi=100)
    out.seek(0)
    images[name] = np.round(imread(out)[..., :3] * 255).astype(np.uint8)


@contextmanager
def figure_style() -> Iterator[None]:
    """Set matplotlib's parameters for the time of drawing and saving one of our figures."""
    matplotlib = _matplotlib()
    style: dict[str, Any] = {
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "axes.labelsize": 9,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlesize": 10,
        "figure.facecolor": "none",
        "axes.facecolor": "none",
        "font.size": 9,
        "legend.frameon": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "wellposed",
        "text.color": INK,
        "text.parse_math": False,  # a dollar sign in a variant's name is a dollar sign
        "xtick.color": INK,
        "ytick.color": INK,
    }
    with matplotlib.rc_context({**matplotlib.rcParamsDefault, **style, "backend": "agg"}):
        yield


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of the given size in inches that no window knows about."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def add_grid(axes: Axes) -> None:
    """Draw thin grey lines behind a plot, which dark and light pages both show."""
    axes.grid(visible=True, color="#888888", alpha=0.25, linewidth=0.5)


def svg_markup(figure: Figure, *, prefix: str, label: str) -> str:
    """Return ``figure`` as an ``<svg>`` element to put in a page: no ids shared with other figures,
    no date.

    Text and axes take the colour of the surrounding text; ``label`` is what a screen reader says.
    """
    note_image(prefix, figure)
    out = io.StringIO()
    figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    markup = out.getvalue()
    markup = markup[markup.index("<svg") :]
    markup = re.sub(r"<metadata>.*?</metadata>", "", markup, flags=re.DOTALL)
    markup = re.sub(r'\bid="', f'id="{prefix}-', markup)
    markup = re.sub(r'href="#', f'href="#{prefix}-', markup)
    markup = re.sub(r"url\(#", f"url(#{prefix}-", markup)
    markup = markup.replace(INK, "currentColor")
    width = float(figure.get_size_inches()[0]) * 96
    style = f"width:100%;max-width:{width:.0f}px;height:auto"
    opening = f'<svg role="img" aria-label="{escape(label, quote=True)}" style="{style}"'
    return re.sub(r"<svg", lambda _: opening, markup, count=1).strip()


def _matplotlib() -> Any:
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise missing_extra("matplotlib", "report", "figures") from error
    return mpl
