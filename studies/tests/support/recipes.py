"""Checks of the files that every recipe writes, with any verdict."""

import csv
import json
import math

from wellposed_studies.evidence import FIELDS
from wellposed_studies.recipe import RECIPES, Request


def check_reproduced(done):
    """Compare the three files with the result: every row in the table, every panel drawn, no
    verdict at toy scale."""
    table, figure, claim = done.files
    with table.open(newline="") as file:
        written = list(csv.DictReader(file))
    assert len(written) == len(done.result.rows) > 0
    for line, row in zip(written, done.result.rows, strict=True):
        for name, value in row.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                assert float(line[name]) == value or math.isnan(value), name
            elif value is not None:
                assert line[name].removeprefix("'") == str(value), name
    markup = figure.read_text()
    assert markup.count("<svg") == 1
    assert "mathdefault" not in markup
    for panel in done.result.panels:
        assert all(len(series.x) == len(series.y) for series in panel.series)
        for word in (panel.title + " " + panel.x_label).split():
            assert word.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") in markup
    values = json.loads(claim.read_text())
    assert values["holds"] is None, "toy sizes show nothing"
    assert values["paper_says"] == RECIPES.get(done.name).claim
    assert values["we_got"] == done.result.got
    assert values["notes"] == list(done.result.notes)
    power = RECIPES.get(done.name).power
    criterion = done.result.criterion
    if power is None:
        assert values["power"] is None
    else:
        assert values["power"] == power(Request("toy", table.parent))
        assert criterion is None or criterion.seeds == values["power"]["seeds"], (
            "the plan is what was trained"
        )
    assert "nan" not in done.result.got
    assert "verdict:    undecided" in done.row()
    trained = values["kind"] == "trained"
    assert (tuple(values["size"]) == FIELDS) if trained else values["size"] is None
