"""Every Python block of the README and of the documentation runs as printed."""

from __future__ import annotations

import multiprocessing
import re
import runpy
from pathlib import Path

import pytest
from tests.support.block import run_block

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch"])  # once for all blocks; each is a process of its own
BLOCKS = [
    (page, number, code)
    for page in PAGES
    for number, code in enumerate(BLOCK.findall(page.read_text("utf-8")))
]


@pytest.mark.parametrize(
    ("page", "code"),
    [pytest.param(page, code, id=f"{page.name}-{number}") for page, number, code in BLOCKS],
)
def test_the_block_runs(page: Path, code: str, tmp_path: Path) -> None:
    said = tmp_path / "said.txt"
    process = PROCESSES.Process(target=run_block, args=(code, ROOT, said))
    process.start()
    process.join()
    assert process.exitcode == 0, f"{page.name}: {said.read_text('utf-8')[-2000:]}"


def test_ten_answers_have_ten_lines_at_most() -> None:
    page = ROOT / "docs" / "ten.md"
    blocks = [code for where, _, code in BLOCKS if where == page]
    assert (
        len(re.findall(r"^## How do I ", page.read_text("utf-8"), re.MULTILINE))
        == len(blocks)
        == 10
    )
    assert max(len([line for line in code.splitlines() if line.strip()]) for code in blocks) <= 10


def test_the_readme_is_short_and_names_both_commands() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= 150
    assert "make demo" in text
    assert "make test" in text


def test_every_public_name_has_its_place_in_the_reference() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "reference_pages.py"))
    stale = [
        path.name
        for path, text in tool["pages"]().items()
        if not path.is_file() or path.read_text("utf-8") != text
    ]
    assert stale == [], "run: python tools/reference_pages.py"
