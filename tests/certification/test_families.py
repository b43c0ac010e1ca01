"""The table of what `certify` answers for each family is the one in the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.support.families import FAMILIES, table

PAGE = Path(__file__).parents[2] / "docs" / "families.md"


def test_the_table_of_the_documentation_is_what_certify_answers():
    assert table() in PAGE.read_text("utf-8"), (
        "replace the table of docs/families.md by tests.support.families.table()"
    )


def test_ten_families_or_more_are_asked():
    assert len(FAMILIES) >= 10


def test_the_reason_quoted_is_the_one_printed(capsys: pytest.CaptureFixture[str]):
    page = PAGE.read_text("utf-8")
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], {})
    quoted = " ".join(
        line.removeprefix("> ") for line in page.splitlines() if line.startswith("> ")
    )
    assert capsys.readouterr().out.strip() == quoted
