"""What README, documentation and package say they do, against what the code does."""

import re
from pathlib import Path
from typing import Any

import pytest

from wellposed.registry import Registry
from wellposed_lab.compare.variants import VARIANTS
from wellposed_lab.tasks.task import TASKS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
VARIANTS_FILES = "wellposed_lab.compare.variants"


@pytest.mark.parametrize(("heading", "registered"), [("Variants", VARIANTS), ("Tasks", TASKS)])
def test_the_page_of_the_command_lists_every_variant_and_every_task(
    heading: str, registered: Registry[Any]
) -> None:
    page = (ROOT / "docs" / "command.md").read_text("utf-8")
    rows = page.partition(f"## {heading}\n")[2].partition("\n## ")[0].splitlines()
    first = "".join(row.split("|")[1] for row in rows if row.startswith("| `"))
    listed = set(re.findall(r"`(\w+)`", first))
    ours = {
        name
        for name in registered
        if getattr(registered.get(name), "__module__", "").startswith(VARIANTS_FILES)
    }
    assert ours <= listed <= set(registered)


def table_rows(text, heading):
    """The cells of the table whose first heading this is."""
    lines = text.partition(f"| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_readme_and_the_page_of_families_agree():
    page = (ROOT / "docs" / "families.md").read_text("utf-8")
    rows = table_rows(README, "family")
    assert len(rows) == 4
    assert rows == table_rows(page, "family")
