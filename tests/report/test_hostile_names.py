"""Names that someone else chose: no formula in a CSV, no markup in the page."""

from __future__ import annotations

import csv
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from wellposed.measurement import write_csv
from wellposed.report import aggregate, build_report

VARIANTS = ('=HYPERLINK("http://x")', "--><script>alert(1)</script>", "$\\frac{$", "@SUM(A1)", "]]></style><img src=x>")


class Seen(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.comments: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        assert not any(name.startswith("on") for name, _ in attrs)

    def handle_comment(self, data: str) -> None:
        self.comments.append(data)


@pytest.fixture
def page(tmp_path: Path, make_run: Any) -> Path:
    for number, variant in enumerate(VARIANTS):
        make_run(
            tmp_path / "runs" / str(number), task="<img src=x onerror=y>", variant=variant, value=0.3 + 0.01 * number
        )
    return build_report([tmp_path / "runs"], tmp_path / "page.html")


def test_a_page_shows_hostile_names_as_text(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    seen = Seen()
    seen.feed(text)
    assert not seen.tags & {"script", "img", "iframe", "object", "link", "base", "form"}
    assert not any("script" in comment for comment in seen.comments)
    assert "&lt;script&gt;" in text


def test_no_cell_of_a_csv_is_a_formula(page: Path, tmp_path: Path) -> None:
    files = sorted(page.with_name("page_data").iterdir())
    assert len(files) >= 2
    for path in files:
        with path.open(newline="", encoding="utf-8") as file:
            for row in csv.reader(file):
                assert not any(is_formula(cell) for cell in row), (path.name, row)
    with (page.with_name("page_data") / "results.csv").open(newline="", encoding="utf-8") as file:
        assert "'" + VARIANTS[0] in {cell for row in csv.reader(file) for cell in row}
    assert VARIANTS[0] in aggregate([tmp_path / "runs"]).table()


def is_formula(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return cell[:1] in tuple("=+-@\t\r")
    return False


def test_numbers_stay_numbers(tmp_path: Path) -> None:
    row = {
        "=a": -1.5,
        "b": "-1e-3",
        "c": [-0.5, 0.25],
        "d": None,
        "e": "+1+cmd|' /C calc'!A0",
        "f": "\t=1",
        "g": "plain",
    }
    text = write_csv(tmp_path / "x.csv", list(row), [row]).read_text(encoding="utf-8")
    assert text == "'=a,b,c,d,e,f,g\n-1.5,-1e-3,-0.5 0.25,,'+1+cmd|' /C calc'!A0,'\t=1,plain\n"
