"""Names that someone else chose: no formula in a CSV, no markup in the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.edited import edited
from tests.support.html_page import Page

from wellposed.measurement import write_csv
from wellposed.report import aggregate, build_report

VARIANTS = (
    '=HYPERLINK("http://x")',
    "--><script>alert(1)</script>",
    "$\\frac{$",
    "@SUM(A1)",
    "]]></style><img src=x>",
)
EVIL = "<script>alert('x')</script>&\"$x^{$"


@pytest.fixture
def page(tmp_path: Path, make_run: Any) -> Path:
    for number, variant in enumerate(VARIANTS):
        make_run(
            tmp_path / "runs" / str(number),
            task="<img src=x onerror=y>",
            variant=variant,
            value=0.3 + 0.01 * number,
            command=("wellposed", EVIL),
            model={EVIL: EVIL},
            status="failed" if number == 0 else "success",
        )
    run = tmp_path / "runs" / "1"
    with edited(tmp_path / "runs" / "0" / "result.json") as record:
        record["train_info"]["reason"] = EVIL
    with edited(run / "result.json") as record:
        record["data"] = {EVIL: EVIL}
    with edited(run / "env.json") as record:
        record[EVIL] = EVIL
    for name in ("measure-initial.json", "measure-final.json"):
        with edited(run / name) as record:
            record["rows"][0]["role"] = record["rows"][0]["stack"] = EVIL
    return build_report([tmp_path / "runs"], tmp_path / "page.html")


def test_a_page_shows_hostile_names_as_text(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    seen = Page(text)
    assert not set(seen.tags) & {"img", "iframe", "object", "link", "base", "form", "embed"}
    assert len(seen.tags["script"]) == text.count("<script") == 1
    assert EVIL in seen.words
    assert "<!--" not in text
    assert "alert" not in seen.script
    every = {name for each in seen.tags.values() for attrs in each for name in attrs}
    assert not any(name.startswith("on") for name in every)
    assert "&lt;script&gt;" in text


def test_no_cell_of_a_csv_is_a_formula(page: Path, tmp_path: Path) -> None:
    seen = Page(page.read_text(encoding="utf-8"))
    names = seen.csv_names()
    assert len(names) >= 5
    for name in names:
        for row in seen.csv(name):
            assert not any(is_formula(cell) for pair in row.items() for cell in pair), (name, row)
    assert "'" + VARIANTS[0] in {cell for row in seen.csv("results") for cell in row.values()}
    assert VARIANTS[0] in aggregate([tmp_path / "runs"]).table()


def is_formula(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return cell[:1] in tuple("=+-@\t\r")
    return False


def test_numbers_stay_numbers(tmp_path: Path) -> None:
    cells = (-1.5, "-1e-3", [-0.5, 0.25], None, "+1+cmd|' /C calc'!A0", "\t=1", "plain")
    row = dict(zip(("=a", *"bcdefg"), cells, strict=True))
    text = write_csv(tmp_path / "x.csv", list(row), [row]).read_text(encoding="utf-8")
    assert text == "'=a,b,c,d,e,f,g\n-1.5,-1e-3,-0.5 0.25,,'+1+cmd|' /C calc'!A0,'\t=1,plain\n"
