"""Every Python block of the README and of the documentation runs as printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCKS = [(page, number, code) for page in PAGES for number, code in enumerate(BLOCK.findall(page.read_text("utf-8")))]


@pytest.mark.parametrize(
    ("page", "code"), [pytest.param(page, code, id=f"{page.name}-{number}") for page, number, code in BLOCKS]
)
def test_the_block_runs(page: Path, code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, f"{page.name}: {done.stderr[-2000:]}"


def test_the_readme_is_short_and_names_both_commands() -> None:
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= 150
    assert "make demo" in text
    assert "make test" in text
