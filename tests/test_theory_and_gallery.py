"""The theory pages and the gallery: formulas that will be rendered, anchors that are named, pictures that are fresh."""

import csv
import json
import re
import runpy
import statistics
from pathlib import Path
from xml.etree import ElementTree

import pytest
from PIL import Image
from tests.support.browser import needs_chromium

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "theory"
PAGES = sorted(FOLDER.glob("*.md"))
TOOL = runpy.run_path(str(ROOT / "tools" / "theory_pictures.py"))
PICTURES = TOOL["pictures"]()

CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
FORMULA = re.compile(r"\\\((?:(?!\\\().)+?\\\)|\\\[(?:(?!\\\[).)+?\\\]", re.DOTALL)
COMMAND = re.compile(r"\\[A-Za-z]+")
ANCHOR = re.compile(r"^#+ .*\{ #([\w-]+) \}$", re.MULTILINE)
NOTED = re.compile(r"theory notes?\s+(B\d+'?(?:(?:, | to | and )B\d+)*)")


def prose(page):
    """The text of a page without code."""
    return CODE.sub("", page.read_text("utf-8"))


def unrendered(text):
    """Mathematics outside the delimiters of arithmatex."""
    return re.findall(r"\\[A-Za-z]+|\\[()\[\]]|\w\^\{|\$", FORMULA.sub("", text))


def named(noted):
    """The notes of ``B1``, of ``B1, B3`` and of ``B1 to B4``."""
    numbers = [int(number) for number in re.findall(r"B(\d+)", noted)]
    if " to " in noted:
        numbers = list(range(numbers[0], numbers[-1] + 1))
    return [f"B{number}" for number in numbers]


def files(*folders):
    for folder in folders:
        yield from (path for path in (ROOT / folder).rglob("*") if path.suffix in {".py", ".md"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_formula_is_left_as_text(page):
    text = prose(page)
    assert unrendered(text) == []
    headings = [line for line in text.splitlines() if line.startswith("#")]
    assert not any("\\" in line for line in headings), "the menu shows it raw"
    rows = [line for line in text.splitlines() if line.lstrip().startswith("|")]
    cells = [formula for row in rows for formula in FORMULA.findall(row)]
    assert not any("|" in formula for formula in cells), "it ends the cell"
    for block in re.findall(r"^ *\\\[.+?\\\]$", text, re.DOTALL | re.MULTILINE):
        assert "\n\n" not in block
        apart = re.search(r"\n\s*\n" + re.escape(block) + r"(\n\s*\n|\s*$)", text)
        assert apart, f"blank lines around {block}"


def test_a_formula_outside_its_delimiters_is_found():
    assert unrendered(r"where \(c \le 1\) and (\text{tok})") == [r"\text"]
    assert unrendered(r"a line \(that is never closed, and \(c\)") == [r"\("]
    assert unrendered("where N^{1/4} and $x$") == ["N^{", "$", "$"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_is_one_that_the_site_can_render(page):
    assets = ROOT / "docs" / "assets"
    scripts = (assets / "katex" / "katex.min.js", assets / "render_math.js")
    katex_source = "".join(script.read_text("utf-8") for script in scripts)
    used = set(COMMAND.findall(" ".join(FORMULA.findall(prose(page)))))
    environments = {rf"\{word}" for word in ("begin", "end")}
    unknown = [
        command for command in sorted(used - environments) if f'"\\{command}"' not in katex_source
    ]
    assert unknown == []


def test_every_note_that_is_named_has_its_anchor():
    anchors = [anchor for page in PAGES for anchor in ANCHOR.findall(page.read_text("utf-8"))]
    assert sorted(set(anchors)) == sorted(anchors)
    notes = [f"B{number}" for number in range(1, 14)] + [f"L{number}" for number in range(1, 7)]
    assert set(notes) <= set(anchors)
    missing = [
        f"{path.relative_to(ROOT)}: {note}"
        for path in files("src", "tests", "docs")
        for noted in NOTED.findall(re.sub(r"\s+", " ", path.read_text("utf-8")))
        for note in named(noted)
        if note not in anchors
    ]
    assert missing == []
    assert named("B1 to B4") == ["B1", "B2", "B3", "B4"]


def test_every_link_to_a_note_leads_to_its_anchor():
    broken = []
    for path in files("docs"):
        links = re.findall(r"\]\(([\w./-]+\.md)#([BL]\d[\w-]*)\)", path.read_text("utf-8"))
        for target, anchor in links:
            page = path.parent / target
            if not page.is_file() or anchor not in ANCHOR.findall(page.read_text("utf-8")):
                broken.append(f"{path.relative_to(ROOT)}: {target}#{anchor}")
    assert broken == []


def test_every_picture_is_drawn_and_shown():
    drawn = {path.stem for path in (FOLDER / "pictures").glob("*.svg")}
    numbered = {path.stem for path in (FOLDER / "pictures").glob("*.json")}
    text = "".join(page.read_text("utf-8") for page in PAGES)
    linked = set(re.findall(r"\]\(pictures/([\w-]+)\.svg\)", text))
    assert drawn == numbered == linked == set(PICTURES)


@pytest.mark.parametrize("name", sorted(PICTURES))
def test_a_picture_shows_the_bounds_of_today_above_the_attacks(name):
    saved = json.loads((FOLDER / "pictures" / f"{name}.json").read_text("utf-8"))
    drawing = (FOLDER / "pictures" / f"{name}.svg").read_text("utf-8")
    for panel, (title, curves) in zip(saved, PICTURES[name].items(), strict=True):
        assert panel["title"] == title
        assert panel["tokens"] == list(TOOL["TOKENS"])
        for curve, today in zip(panel["curves"], curves, strict=True):
            assert curve["label"] == today.label
            assert f"bound: {today.label}" in drawing
            bounds = [today.bound(n) for n in TOOL["TOKENS"]]
            assert curve["bound"] == pytest.approx(bounds, rel=1e-6)
            assert (curve["attack"] is None) == (today.attack is None)
            if today.attack is not None:
                for attack, bound in zip(curve["attack"], curve["bound"], strict=True):
                    assert 0 < attack / bound <= 1 + 1e-9


@pytest.mark.parametrize("name", sorted(PICTURES))
def test_the_attack_of_a_picture_can_be_repeated(name):
    saved = json.loads((FOLDER / "pictures" / f"{name}.json").read_text("utf-8"))[0]
    curves = next(iter(PICTURES[name].values()))
    number = next(n for n, curve in enumerate(curves) if curve.attack is not None)
    curve = curves[number].attack(TOOL["TOKENS"][0], None)
    # The ascent is deterministic, except for rounding on another machine.
    assert curve.value == pytest.approx(saved["curves"][number]["attack"][0], rel=1e-2)


GALLERY = runpy.run_path(str(ROOT / "tools" / "gallery.py"))
GALLERY_PAGE = ROOT / "docs" / "gallery.md"
TELL = "run: python -m tools.gallery"
SCREENS = {
    f"{name}-{width}.png": (width, GALLERY["HEIGHT"])
    for name in ("report", "site")
    for width in GALLERY["WIDTHS"]
}


def test_every_picture_is_there_small_and_shown():
    linked = re.findall(r"\]\(([^)]+\.(?:svg|png))\)", GALLERY_PAGE.read_text("utf-8"))
    files = {path.name for path in GALLERY["PICTURES"].iterdir()}
    made = {f"{name}.svg" for name in (*GALLERY["MADE"], "depth", "answer")}
    assert {Path(name).name for name in linked} == files == made | SCREENS.keys()
    for path in GALLERY["PICTURES"].glob("*.svg"):
        assert path.stat().st_size < 150_000
        assert GALLERY["INK"] not in path.read_text("utf-8")
        assert ElementTree.parse(path).getroot().tag.endswith("svg")


@pytest.mark.parametrize("name", GALLERY["DRAWN"])
def test_a_picture_of_committed_rows_is_fresh(name):
    committed = (GALLERY["PICTURES"] / f"{name}.svg").read_text("utf-8")
    assert GALLERY["picture"](name, GALLERY["DRAWN"][name]) == committed, TELL


def test_ink_background_and_digits_are_made_fit_for_both_pages():
    ground = '<g id="patch_1">\n <path d="M 1.23456 2" style="fill: #ffffff"/>\n</g>'
    drawn = f'{ground}<text style="fill: {GALLERY["INK"]}">0.12345</text>'
    made = GALLERY["for_both_pages"](drawn + '<path style="fill: #ffffff"/>')
    assert 'd="M 1.23 2" style="fill: none"' in made
    assert f'{GALLERY["GREY"]}">0.12345</text>' in made
    assert made.endswith('<path style="fill: #ffffff"/>')


def test_learning_rates_are_drawn_as_medians_of_seeds(tmp_path, monkeypatch):
    labels = ("no cap", "capped at 1", "capped at 2", "capped at 4", "warm-up")
    names = ("", " capped at 1", " capped at 2", " capped at 4", ", warm-up", " orthogonal")
    rows = [
        {"model": norm + name, "rate": f"{rate:g}", "seed": seed, "valid": 0, "test": loss}
        for index, norm in enumerate(("post-LN", "qk-norm", "pre-LN"))
        for number, name in enumerate(names)
        if norm == "post-LN" or name != ", warm-up"
        for rate in (1e-3, 3e-3)
        for seed, loss in enumerate((2 + number + index, 1.5 + 100 * rate, 1.25))
    ]
    with (tmp_path / "frontier-rates.csv").open("w", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [*rows[0], "failed"], restval="")
        writer.writeheader()
        # The order of the file is not that of the curves.
        writer.writerows(sorted(rows, key=lambda row: row["model"], reverse=True))
    drawn = []
    used = GALLERY["draw_rates"].__globals__
    monkeypatch.setitem(used, "ROWS", tmp_path)
    picture = GALLERY["picture"]("rates", GALLERY["draw_rates"])
    assert all(f">{label}</text>" in picture for label in labels)
    assert used["INK"] not in picture
    monkeypatch.setitem(used, "draw", lambda panels, path, **_: drawn.extend(panels))
    GALLERY["draw_rates"](tmp_path / "rates.svg")
    assert [(panel.title, panel.x_scale) for panel in drawn] == [
        ("post-LN", "log"),
        ("pre-LN", "log"),
    ]
    for panel, expected in zip(drawn, (labels, labels[:4]), strict=True):
        assert tuple(curve.label for curve in panel.series) == expected
        for curve, name in zip(panel.series, names, strict=False):
            losses = [
                [row["test"] for row in rows if (row["model"], row["rate"]) == (model, rate)]
                for model, rate in ((panel.title + name, f"{rate:g}") for rate in (1e-3, 3e-3))
            ]
            assert curve.x == [1e-3, 3e-3]
            assert curve.y == [statistics.median(values) for values in losses]
            assert curve.band == ([*map(min, losses)], [*map(max, losses)])


@pytest.mark.parametrize("name", SCREENS)
def test_a_picture_of_a_page_is_small_and_of_its_width(name):
    path = GALLERY["PICTURES"] / name
    assert path.stat().st_size <= 250_000
    with Image.open(path) as image:
        assert (image.format, image.size, image.mode) == ("PNG", SCREENS[name], "P")


def test_pictures_of_pages_need_the_pages_and_a_browser(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.which", lambda _: "chromium")
    with pytest.raises(SystemExit) as refused:
        GALLERY["take_screens"](tmp_path)
    assert str(tmp_path / "report.html") in str(refused.value)
    assert "make demo" in str(refused.value)
    monkeypatch.setattr("shutil.which", lambda _: None)
    with pytest.raises(SystemExit) as refused:
        GALLERY["take_screens"](tmp_path)
    assert "apt install chromium" in str(refused.value)
    assert "\n" not in str(refused.value)


class TestInBrowser:
    pytestmark = needs_chromium

    @pytest.mark.parametrize("width", GALLERY["WIDTHS"])
    def test_a_page_is_shown_at_the_width_of_its_picture(self, tmp_path, width):
        page = tmp_path / "page of one colour.html"
        taken = tmp_path / "taken.png"
        rule = f"@media (width: {width}px) {{ body {{ background: #0000ff }} }}"
        page.write_text(f"<style>{rule}</style>", "utf-8")
        GALLERY["take_screen"](page, width, taken)
        with Image.open(taken) as image:
            assert image.size == (width, GALLERY["HEIGHT"])
            assert image.convert("RGB").getcolors() == [(width * GALLERY["HEIGHT"], (0, 0, 255))]


def test_letters_of_the_front_page_can_be_read_on_a_phone():
    """A picture is scaled down to the 374 pixels of the text; the legend has letters of 8 points."""
    picture = (ROOT / "docs" / "assets" / "gallery" / "methods.svg").read_text("utf-8")
    width = float(re.search(r'width="([\d.]+)pt"', picture)[1])
    sizes = [float(size) for size in re.findall(r"font(?:-size)?: (?:[a-z]+ )?([\d.]+)px", picture)]
    assert len(sizes) > 10
    assert min(sizes) * min(1.0, 374 / width) >= 8
