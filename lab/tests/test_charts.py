"""Charts: axes that are compared are shared, legends stand outside, short logarithmic axes have
numbers, boxes."""

import re
from xml.etree import ElementTree

import pytest

from wellposed_lab.charts import Panel, Series, draw, embedded, figure_of, fitted


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
    low, high = values[0] * 0.9, values[-1] * 1.1
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
