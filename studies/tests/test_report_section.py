"""Folders of `reproduce` in the report: claim, verdict with its test, table, drawing; hostile ones
too."""

import base64
import json
import re

import pytest
from tests.support.html_page import Page

from wellposed.errors import DataError
from wellposed_lab.charts import Panel, Series, draw
from wellposed_lab.report.aggregate import aggregate
from wellposed_lab.report.page import build_report
from wellposed_studies.evidence import VERDICTS

CLAIM = {
    "recipe": "kim2021/figure-2", "scale": "mini", "paper_says": "the bound is tight", "we_got": "0.877 at N = 100",
    "holds": True, "criterion": {"test": "the ratio is at least 0.8", "seeds": 3, "uncertainty": "attained values"},
    "notes": ["<script>alert(1)</script>"], "seconds": 12.5, "data": None,
    "command": "wellposed reproduce kim2021/figure-2 --scale mini",
}  # fmt: skip


def write_artefact(folder, claim=CLAIM):
    folder.mkdir(exist_ok=True)
    (folder / "kim2021-figure-2.json").write_text(json.dumps(claim))
    (folder / "kim2021-figure-2.csv").write_text("bound,name,tokens\n0.5,=1+1,100\n0.25,<b>,1000\n")
    panel = Panel("bound", "tokens", "ratio", [Series("upper", [100, 1000], [1, 2])])
    draw([panel], folder / "kim2021-figure-2.svg")


@pytest.mark.parametrize(
    ("holds", "verdict"),
    [*VERDICTS.items()],
)
def test_a_claim_stands_with_its_verdict_and_the_test_of_it(tmp_path, holds, verdict):
    write_artefact(tmp_path / "out", {**CLAIM, "holds": holds})
    text = build_report([tmp_path / "out"], tmp_path / "page.html").read_text(encoding="utf-8")
    page = Page(text)
    assert f"<dt>verdict</dt><dd>{verdict}</dd>" in text
    for name in ("paper_says", "we_got", "command"):
        assert CLAIM[name] in page.words
    assert "the ratio is at least 0.8" in page.words
    assert len(page.tags["script"]) == 1
    assert "&lt;script&gt;" in text
    rows = page.csv("kim2021-figure-2")
    assert [(row["bound"], row["name"], row["tokens"]) for row in rows] == [
        ("0.5", "'=1+1", "100"), ("0.25", "<b>", "1000"),
    ]  # fmt: skip
    (image,) = page.tags["img"]
    content = re.sub("^data:image/svg[+]xml;base64,", "", str(image["src"]))
    assert base64.b64decode(content) == (tmp_path / "out" / "kim2021-figure-2.svg").read_bytes()


def test_several_claims_share_an_overview_and_runs_their_page(tmp_path):
    for name in ("a", "b"):
        write_artefact(tmp_path / name)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").write_text("")
    write_artefact(tmp_path / "run")  # of a run, so of no recipe
    page = Page(build_report([tmp_path], tmp_path / "page.html").read_text("utf-8"))
    rows = page.csv("claims")
    assert [(row["name"], row["verdict"]) for row in rows] == [
        ("kim2021/figure-2", "confirmed")
    ] * 2
    assert "1 run not counted" in page.words


def test_other_files_are_no_claims_and_damaged_ones_are_named(tmp_path):
    (tmp_path / "notes.json").write_text('{"recipe": "soup"}')
    (tmp_path / "cut.json").write_text('{"recipe": "so')
    with pytest.raises(DataError, match="no run folder"):
        build_report([tmp_path], tmp_path / "page.html")
    write_artefact(tmp_path)
    assert aggregate([tmp_path]).table() == ""
    for damage in (b"a,b\n\xff\xfe,1\n", b"a,b\n1,2\n1,2,3\n", b"a,a\n1,2\n"):
        (tmp_path / "kim2021-figure-2.csv").write_bytes(damage)
        with pytest.raises(DataError, match="make it again"):
            build_report([tmp_path], tmp_path / "page.html")
