"""Every Python block of the README and of the documentation runs as printed."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCKS = {page: BLOCK.findall(page.read_text("utf-8")) for page in PAGES}
RUN_EACH = """
import json, sys
for number, code in enumerate(json.load(sys.stdin)):
    exec(compile(code, f"block {number}", "exec"), {"__name__": "__main__"})
"""


@pytest.mark.parametrize("page", [page for page in PAGES if BLOCKS[page]], ids=lambda page: page.stem)
def test_every_block_runs_by_itself(page: Path) -> None:
    words = [sys.executable, "-c", RUN_EACH]
    code = json.dumps(BLOCKS[page])
    done = subprocess.run(words, input=code, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, f"{page.name}: {done.stderr[-2000:]}"


def test_ten_answers_have_ten_lines_at_most() -> None:
    page = ROOT / "docs" / "ten.md"
    assert len(re.findall(r"^## How do I ", page.read_text("utf-8"), re.MULTILINE)) == len(BLOCKS[page]) == 10
    assert max(len([line for line in code.splitlines() if line.strip()]) for code in BLOCKS[page]) <= 10


def test_the_readme_is_short_and_names_both_commands() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= 150
    assert "make demo" in text
    assert "make test" in text


def test_every_public_name_has_its_place_in_the_reference() -> None:
    spec = importlib.util.spec_from_file_location("reference_pages", ROOT / "tools" / "reference_pages.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    stale = [path.name for path, text in tool.pages().items() if not path.is_file() or path.read_text("utf-8") != text]
    assert stale == [], "run: python tools/reference_pages.py"
