"""Charts: axes that are compared are shared, legends stand outside, short logarithmic axes have
numbers, boxes."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from wellposed.measurement import figure_style
from wellposed_lab.charts import (
    COLOURS,
    Panel,
    Series,
    coinciding,
    coinciding_note,
    draw,
    embedded,
    figure_of,
    fitted,
)


def texts(path):
    return re.findall(r"<text[^>]*>([^<]*)</text>", path.read_text(encoding="utf-8"))


def panel(values, *, y_label="loss", label="a", **more):
    series = Series(label, range(1, len(values) + 1), values)
    return Panel("panel", "step", y_label, [series], **more)


def numbers(path):
    labels = [label.replace("−", "-") for label in texts(path)]
    return [float(label) for label in labels if re.fullmatch(r"[0-9.e+-]+", label)]


def test_panels_of_one_quantity_share_its_axis(tmp_path):
    draw([panel([1, 2]), panel([1, 90])], tmp_path / "shared.svg")
    assert sorted(numbers(tmp_path / "shared.svg")).count(80) == 2
    draw([panel([1, 2]), panel([1, 90], y_label="score")], tmp_path / "apart.svg")
    assert sorted(numbers(tmp_path / "apart.svg")).count(80) == 1


@pytest.mark.parametrize(
    ("values", "count"), [((1.0, 1.06), 3), ((1.0, 8.0), 3), ((2.0, 60.0), 3), ((1.0, 1e6), 3)]
)
def test_a_logarithmic_axis_has_three_numbers_however_short(tmp_path, values, count):
    draw([panel(values, y_scale="log")], tmp_path / "log.svg")
    low = values[0] * 0.9
    high = values[-1] * 1.1
    assert sum(low <= value <= high for value in numbers(tmp_path / "log.svg")) >= count


def test_one_legend_where_labels_look_the_same_else_one_a_panel(tmp_path):
    draw([panel([1, 2], label="same"), panel([1, 3], label="same")], tmp_path / "one.svg")
    assert texts(tmp_path / "one.svg").count("same") == 1
    two = [Series(name, [1, 2], [1, 2]) for name in ("first", "same")]
    other = Panel("panel", "step", "loss", two)
    draw([panel([1, 2], label="same"), other], tmp_path / "two.svg")
    assert texts(tmp_path / "two.svg").count("same") == 2
    draw([panel([1, 2], legend=False)], tmp_path / "none.svg")
    assert "a" not in texts(tmp_path / "none.svg")


def test_a_zero_stands_alone_on_a_logarithmic_axis(tmp_path):
    curve = Series("a", [0.0, 0.005, 0.01, 0.2], [1.0, 0.9, 0.5, 0.1])
    draw([Panel("p", "radius", "accuracy", [curve], x_scale="symlog")], tmp_path / "zero.svg")
    labels = texts(tmp_path / "zero.svg")
    assert {"0", "0.01", "0.1"} <= set(labels)
    assert "0.001" not in labels


def test_an_axis_is_logarithmic_where_values_are_far_apart_and_every_value_can_be_drawn():
    for values, scale in (([1.0, 900.0], "log"), ([1.0, 2.0], "linear"), ([-1.0, 80.0], "linear")):
        (drawn,) = fitted([panel(values)])
        assert drawn.y_scale == scale
    (drawn,) = fitted([panel([-1.7e308, 1.7e308])])
    assert max(map(abs, drawn.series[0].y)) == 1e250
    assert fitted([panel([1.0, 900.0], y_limits=(0, 1))])[0].y_scale == "linear"


def test_a_part_of_a_page_shares_no_name():
    panels = [Panel("<b>", "step", "loss", [Series("a", [1, 2], [1, 2], colour=k)]) for k in (0, 7)]
    parts = [embedded(lambda: figure_of(panels), name, '"loss"') for name in ("one", "two")]
    ids = [re.findall(r' id="([^"]*)"', part) for part in parts]
    assert len({*ids[0], *ids[1]}) == len(ids[0]) + len(ids[1]) > 10
    for part, names in zip(parts, ids, strict=True):
        root = ElementTree.fromstring(
            part.replace("<svg ", '<svg xmlns:xlink="x" ', part.count("xmlns:xlink") == 0)
        )
        assert root.get("aria-label") == '"loss"'
        assert {*re.findall(r'(?:href="|url\()#([^")]*)', part)} <= {*names}
        assert not any(word in part for word in ("<!--", "<style", "<b>"))


def test_a_long_title_is_broken_into_lines(tmp_path):
    words = "the bound of the theorem over the sharper bound in the norm that is named here"
    draw([Panel(words, "x", "y", [Series("a", [1], [1])])] * 4, tmp_path / "title.svg")
    assert words not in texts(tmp_path / "title.svg")
    assert max(map(len, texts(tmp_path / "title.svg"))) < 48


def curves(*values, style="solid", x=None):
    places = x or range(1, len(values[0]) + 1)
    series = [Series(name, places, y, style) for name, y in zip("abcd", values, strict=False)]
    return Panel("panel", "step", "loss", series)


@pytest.mark.parametrize(
    ("panel_of", "groups", "note"),
    [
        (curves([1, 2, 3], [1, 2, 4]), [], ""),
        (curves([1, 2, 3], [1, 2, 3]), [[0, 1]], "a and b coincide"),
        (curves([1, 2, 3], [1, 2, 3.002]), [[0, 1]], "a and b coincide"),
        (curves([1, 2], [5, 6], [1, 2], [1, 2]), [[0, 2, 3]], "a, c and d coincide"),
        (curves([1], [1], style="rings"), [[0, 1]], "a and b coincide"),
        (curves([1, 2], [1, 2], style="bars"), [], ""),
        (curves([1, float("nan")], [1, float("nan")]), [[0, 1]], "a and b coincide"),
        (curves([2, 2], [2, 2]), [[0, 1]], "a and b coincide"),
    ],
)
def test_curves_that_coincide_are_found_and_named(panel_of, groups, note):
    assert coinciding(panel_of) == groups
    assert coinciding_note(panel_of) == note


@pytest.mark.parametrize("style", ["solid", "dashed", "dotted", "rings", "dots"])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_every_curve_is_visible_where_all_coincide(style, count):
    """Count the pixels of each colour in the picture."""
    x = [1] if style in ("rings", "dots") else range(1, 60)
    panel_of = curves(*[[2 + 0.1 * k for k in x]] * count, style=style, x=x)
    with figure_style():
        figure = figure_of([replace(panel_of, legend=False)])
        figure.set_facecolor("white")
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        pixels = np.asarray(canvas.buffer_rgba())[..., :3].reshape(-1, 3)
    for colour in COLOURS[:count]:
        wanted = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
        assert (np.abs(pixels.astype(int) - wanted).sum(1) < 60).sum() >= 8, colour
