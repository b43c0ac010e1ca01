"""The gallery: its page shows every picture that the tool makes; those of committed rows are fresh."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]
TOOL = runpy.run_path(str(ROOT / "tools" / "gallery.py"))
PAGE = ROOT / "docs" / "gallery.md"
TELL = "run: python -m tools.gallery"


def test_every_picture_is_there_small_and_shown() -> None:
    shown = re.findall(r"\]\(([^)]+\.svg)\)", PAGE.read_text("utf-8"))
    files = {path.name for path in TOOL["PICTURES"].iterdir()}
    assert {Path(name).name for name in shown} == files == {f"{name}.svg" for name in TOOL["MADE"]}
    for path in TOOL["PICTURES"].iterdir():
        assert path.stat().st_size < 150_000
        assert TOOL["INK"] not in path.read_text("utf-8")
        assert ElementTree.parse(path).getroot().tag.endswith("svg")


@pytest.mark.parametrize("name", TOOL["DRAWN"])
def test_a_picture_of_committed_rows_is_fresh(name: str) -> None:
    assert TOOL["picture"](name) == (TOOL["PICTURES"] / f"{name}.svg").read_text("utf-8"), TELL


def test_ink_background_and_digits_are_made_fit_for_both_pages() -> None:
    ground = '<g id="patch_1">\n <path d="M 1.23456 2" style="fill: #ffffff"/>\n</g>'
    drawn = f'{ground}<text style="fill: {TOOL["INK"]}">0.12345</text>'
    made = TOOL["for_both_pages"](drawn + '<path style="fill: #ffffff"/>')
    assert 'd="M 1.23 2" style="fill: none"' in made
    assert f'{TOOL["GREY"]}">0.12345</text>' in made
    assert made.endswith('<path style="fill: #ffffff"/>')
