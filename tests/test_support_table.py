"""The table of families and verbs in the documentation is what a trial of each cell gives."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from tests.support.support_table import FAMILIES, VERBS, read_table, row, table

ROOT = Path(__file__).parents[1]
STALE = "run: python tools/support_table.py"


def printed() -> str:
    """Return the table of the page."""
    tool = runpy.run_path(str(ROOT / "tools" / "support_table.py"))
    page = tool["PAGE"].read_text("utf-8")
    return page.partition(tool["BEGIN"])[2].partition(tool["END"])[0].strip()


def test_the_page_has_a_row_for_every_family_and_a_column_for_every_verb() -> None:
    rows = read_table(printed())
    assert list(rows) == list(FAMILIES)
    assert len(FAMILIES) >= 10
    assert {len(cells) for cells in rows.values()} == {len(VERBS)}
    assert table(rows) == printed(), STALE


@pytest.mark.parametrize("family", FAMILIES)
def test_the_row_of_a_family_is_what_a_trial_gives(family: str) -> None:
    assert read_table(printed())[family] == row(family), STALE
