"""Many layers and many weights: a summary first, what follows folded, sizes that can be mailed."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.edited import edited
from tests.support.html_page import Page

from wellposed.report import build_report

LAYERS, EXPERTS = 24, 14


@pytest.fixture(scope="module")
def deep(write_comparison: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Page, int]:
    """Two variants of 24 layers with 4 weights of attention and 28 of experts each."""
    folder = tmp_path_factory.mktemp("deep")
    write_comparison(folder, {"post_ln": [0.4], "rezero": [0.5]})
    for file in folder.glob("**/measure-*.json"):
        with edited(file) as record:
            layer = record["rows"][:6]
            record["rows"] = [
                {**row, "layer": number, "path": f"layers.{number}.{expert}"}
                for number in range(LAYERS)
                for row in layer
                for expert in (range(EXPERTS) if row["role"].startswith("feed") else ["attention"])
            ]
            assert len(record["rows"]) == LAYERS * 32
    out = build_report([folder], folder / "report.html")
    return Page(out.read_text(encoding="utf-8")), out.stat().st_size


def test_spectra_have_one_panel_a_role_and_share_their_axis(deep: tuple[Page, int]) -> None:
    page, _ = deep
    labels = [str(svg["aria-label"]) for svg in page.tags["svg"]]
    first, *more = (label for label in labels if "singular" in label)
    assert len(more) == 5
    assert first.startswith("query over share of singular values: post_ln, before; post_ln, after;")
    assert first.endswith("; rezero, before; rezero, after")
    heights = {str(svg["viewbox"]) for svg in page.tags["svg"]}
    assert len(heights) == 1


def test_a_row_for_each_variant_comes_before_folded_maps(deep: tuple[Page, int]) -> None:
    page, _ = deep
    largest = page.csv("1-listops-orthogonality-largest")
    assert [row["variant"] for row in largest] == ["post_ln", "rezero"]
    every = page.csv("1-listops-weights")
    for row in largest:
        place = [row["variant"], "after", "query"]
        after = [w for w in every if [w[name] for name in ("variant", "when", "role")] == place]
        assert len(after) == LAYERS
        assert float(row["query after"]) == max(float(w["orthogonality_error"]) for w in after)
    maps = [part for part in page.tags["details"] if part.get("data-variant")]
    assert len(maps) == 2
    assert not any("open" in part for part in maps)
    assert len(page.csv("1-listops-orthogonality-0-after")) == LAYERS
    columns = list(page.csv("1-listops-orthogonality-0-after")[0])
    assert columns[5:8] == ["feedforward_in (0)", "feedforward_in (1)", "feedforward_in (2)"]
    assert len(columns) == 1 + 32


def test_a_long_table_says_what_it_leaves_to_the_file(deep: tuple[Page, int]) -> None:
    page, _ = deep
    assert "The first 300 of 1,536 rows; the CSV has all." in page.words
    assert len(page.csv("1-listops-weights")) == 2 * 1536


def test_the_page_can_be_mailed(deep: tuple[Page, int]) -> None:
    assert deep[1] < 4_000_000
