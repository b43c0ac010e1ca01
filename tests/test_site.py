"""The documentation builds without a warning, is named by its titles, can be read at any width,
and its search finds what readers look for."""

import json
import os
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
from tests.support.browser import AROUND, WIDTHS, frame, needs_chromium, visit

import wellposed

ROOT = Path(__file__).parents[1]
ZENSICAL = Path(sys.executable).with_name("zensical")
CONFIG = (ROOT / "mkdocs.yml").read_text("utf-8")
ADDRESS = "https://example.org/wellposed"
needs_zensical = [
    pytest.mark.slow,
    pytest.mark.skipif(not ZENSICAL.is_file(), reason="needs the extra docs"),
]
PAGES = ("index", "tutorial", "families", "command", "theory/l2", "reproduction")
TALLEST = 12_000
# In a page: code that is cut, text of the copy buttons, the height, addresses, and folded details.
PROBE = """<script>addEventListener("load", () => setTimeout(() => {
  const all = (of) => [...document.querySelectorAll(of)];
  const wide = (item) => item.scrollWidth > item.clientWidth + 1;
  const copied = [];
  document.execCommand = () => copied.push(document.activeElement.value);
  all(".md-code__button[data-md-type=copy]").forEach((item) => item.click());
  const loaded = performance.getEntriesByType("resource").map((item) => item.name);
  parent.postMessage(JSON.stringify({
    width: innerWidth,
    height: document.documentElement.scrollHeight,
    cut: all("pre > code, .md-typeset__scrollwrap").filter(wide).map((item) => item.textContent),
    copied,
    formulas: all(".katex").length,
    outside: loaded.filter((item) => !item.startsWith("file:")),
    open: all("details[open] h2").map((item) => item.id),
  }), "*");
}, 1000));</script>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the folder of the built site."""
    root = tmp_path_factory.mktemp("built")
    for name in ("mkdocs.yml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, root)
    for name in ("docs", "src", "lab", "tools"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    built = subprocess.run(
        [ZENSICAL, "build", "--strict"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "WELLPOSED_REPOSITORY": ADDRESS},
    )
    # Warnings about docstrings, which --strict does not count.
    assert "griffe: " not in built.stdout + built.stderr
    return root / "site"


def words(html):
    return " ".join(unescape(re.sub("<[^>]+>", "", html)).split())


def test_no_page_is_named_twice_and_no_address_is_made_up():
    nav = CONFIG.partition("\nnav:\n")[2].partition("\ntheme:")[0]
    assert re.findall(r"^.*\S: +\S+\.md$", nav, re.MULTILINE) == [], "a page is named by its title"
    assert "\nrepo_url: !ENV [WELLPOSED_REPOSITORY, null]\n" in CONFIG


def test_the_page_of_how_tos_lists_them_in_the_order_of_the_navigation():
    nav = CONFIG.partition("- howto/index.md\n")[2].partition("\n  - Verbs:")[0]
    page = (ROOT / "docs" / "howto" / "index.md").read_text("utf-8").partition("\n## ")[2]
    names = re.findall(r"\]\(([\w./]+\.md)\) \|$", page, re.MULTILINE)
    listed = [os.path.normpath(Path("howto", name)) for name in names]
    assert listed == re.findall(r"- (\S+\.md)$", nav, re.MULTILINE)


@pytest.mark.usefixtures("site")
class TestBuilt:
    pytestmark = needs_zensical

    def test_the_search_finds_how_to_install_and_not_what_changed(self, site):
        built = json.loads((site / "search.json").read_text("utf-8"))
        entries = {item["location"]: item["title"] for item in built["items"]}
        assert entries["index.html#install"] == entries["install.html"] == "Install"
        assert len(entries) > 1000
        assert [entry for entry in entries if entry.startswith("changelog")] == []

    def test_entries_are_named_as_their_pages(self, site):
        start = (site / "index.html").read_text("utf-8")
        nav = start.partition("md-nav--primary")[2].partition("md-sidebar--secondary")[0]
        links = re.findall(r'<a href="([^"#]+)" class="md-nav__link[^>]*>(.*?)</a>', nav, re.DOTALL)
        assert len(links) > 60
        for address, label in links:
            page = (site / address).read_text("utf-8")
            title = page.partition("<h1")[2].partition(">")[2].partition("</h1>")[0]
            assert words(label) == words(title.partition('<a class="headerlink"')[0]), address

    def test_every_header_has_the_version_and_a_plain_link(self, site):
        for page in site.rglob("*.html"):
            header = page.read_text("utf-8").partition("<header")[2].partition("</header>")[0]
            assert f'<span class="site-version">{wellposed.__version__}</span>' in header
            assert f'href="{ADDRESS}"' in header
            assert 'data-md-component="source"' not in header, "it asks the host for stars"


@pytest.fixture(scope="module")
def browsed(site, tmp_path_factory):
    """Return for each page and width what a browser shows."""
    results = {}
    for name in PAGES:
        page = site / f"{name}.html"
        page.write_text(page.read_text("utf-8").replace("</body>", f"{PROBE}</body>"), "utf-8")
        link = "#kim2021figure-2-medium" if name == "reproduction" else ""
        around = site / "around.html"
        frames = [frame(width, page.as_uri() + link) for width in WIDTHS]
        around.write_text(AROUND + "".join(frames), "utf-8")
        probes, console = visit(
            around.as_uri(), tmp_path_factory.mktemp("profile"), milliseconds=9_000
        )
        assert len(probes) == len(WIDTHS), console
        results |= {(name, probe["width"]): probe for probe in probes}
    return results


class TestInBrowser:
    pytestmark = needs_zensical + needs_chromium

    def test_nothing_is_cut_on_a_wide_screen_nor_loaded_from_outside(self, browsed):
        for (name, width), page in browsed.items():
            assert page["outside"] == [], name
            assert width == min(WIDTHS) or page["cut"] == [], name
        assert browsed["theory/l2", max(WIDTHS)]["formulas"] > 100

    def test_prompts_are_not_copied_and_lines_stay(self, browsed):
        for page in browsed.values():
            for text in page["copied"]:
                assert not re.search(r"^(>>>|\.\.\.|\$)( |$)", text, re.MULTILINE), text
        copied = browsed["index", max(WIDTHS)]["copied"]
        line = 'wp.constrain_(model, optimizer, to="spectral", bound="rms:1")'
        (changed,) = (text for text in copied if line in text)
        assert "import wellposed as wp" in changed.splitlines()
        assert line in changed.splitlines()
        assert "lr=3e-3" not in changed
        assert sum("\nimport wellposed as wp\n\nmodel =" in text for text in copied) == 1

    def test_results_are_folded_and_a_link_opens_its_own(self, browsed):
        for width in WIDTHS:
            page = browsed["reproduction", width]
            assert page["open"] == ["kim2021figure-2-medium"]
            assert page["height"] < TALLEST
