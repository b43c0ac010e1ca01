"""The page in a real browser: no request, no error, no sideways scroll; tables sort, variants
toggle, curves speak."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from tests.support.words import words as typed

from wellposed.report import build_report

CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs the program chromium on PATH")

Visited = tuple[list[dict[str, Any]], list[str]]
WIDTHS = (390, 1400)
VALUES = {
    "post_ln": [0.40, 0.42],
    "a variant with a long name:1e-4": [0.35, 0.36],
    "oc3": [0.45, 0.46],
}

# Runs at the end of the page; what it finds goes to the frame around it.
PROBE = """{
const violations = [];
document.addEventListener("securitypolicyviolation", (event) => violations.push(event.violatedDirective));
const seen = (element) => element.getClientRects().length > 0;
const luminance = (colour) => {
  const [r, g, b] = colour.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const parse = (text) => text.match(/[0-9.]+/g).map(Number);
const behind = (element) => {
  for (let each = element; each; each = each.parentElement) {
    const colour = parse(getComputedStyle(each).backgroundColor);
    if (colour[3] !== 0) return colour.slice(0, 3);
  }
  return [255, 255, 255];
};
const contrast = (element) => {
  const style = getComputedStyle(element);
  const ink = parse(element instanceof SVGElement ? style.fill : style.color).slice(0, 3);
  const [high, low] = [luminance(ink), luminance(behind(element))].sort((a, b) => b - a);
  return (high + 0.05) / (low + 0.05);
};
const texts = () => [...document.body.querySelectorAll("*")].filter((element) =>
  !["SCRIPT", "STYLE"].includes(element.tagName) && seen(element) &&
  [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim()));
const column = () => [...document.querySelector("table").tBodies[0].rows].map((row) => row.cells[0].textContent);
const press = (element, key) => element.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const tip = document.querySelector("#tip");

setTimeout(() => {
  const found = { dark: matchMedia("(prefers-color-scheme: dark)").matches };
  document.querySelectorAll("details").forEach((part) => (part.open = true));
  found.width = [innerWidth, document.documentElement.scrollWidth];
  found.pale = texts().filter((e) => contrast(e) < 4.5).map((e) => [e.tagName, e.textContent, contrast(e)]);
  found.checked = texts().length;
  found.stuck = [...document.querySelectorAll("*")].filter((e) => e.scrollWidth > e.clientWidth + 1 && e.tabIndex < 0 &&
    ["auto", "scroll"].includes(getComputedStyle(e).overflowX)).map((e) => e.outerHTML.slice(0, 80));

  const means = [...document.querySelectorAll("thead button")].filter((b) => b.textContent === "mean");
  found.buttons = [...document.querySelectorAll("thead th")].filter((th) => !th.querySelector("button")).length;
  found.order = [column()];
  for (const _ of [1, 2]) {
    means[0].click();
    found.order.push([means[0].parentElement.getAttribute("aria-sort"), ...column()]);
  }

  const marks = () => [...document.querySelectorAll('svg [data-variant="0"]')].filter(seen).length;
  const box = document.querySelector("#variants input");
  found.marks = [marks()];
  box.click();
  found.marks.push(marks());
  const panel = document.querySelector(".panel svg");
  panel.focus();
  press(panel, "End");
  found.focused = document.activeElement === panel;
  found.hiddenTip = tip.textContent;
  box.click();
  found.marks.push(marks());
  press(panel, "End");
  found.tip = tip.textContent;
  press(panel, "Escape");
  found.gone = tip.hidden;
  const area = panel.getBoundingClientRect();
  panel.dispatchEvent(new PointerEvent("pointermove", { clientX: area.right - 3, clientY: area.top + 50 }));
  found.pointed = tip.textContent;

  found.resources = performance.getEntriesByType("resource").map((entry) => entry.name);
  found.before = [...violations];
  if (location.hash === "#attack") {
    document.body.insertAdjacentHTML("beforeend", '<img src="http://127.0.0.1:9/x"><p onclick="window.hit = 1">x</p>');
    document.body.lastElementChild.click();
  }
  setTimeout(() => {
    found.hit = window.hit ?? 0;
    found.violations = violations;
    parent.postMessage(JSON.stringify(found), "*");
  }, 300);
}, 100);
}"""
FRAMES = """<!doctype html><body><script>
addEventListener("message", (event) => {
  const pre = document.createElement("pre");
  pre.textContent = event.data;
  document.body.append(pre);
});
</script>"""


def visit(page: Path, *, dark: bool = False) -> Visited:
    """Open a copy of ``page`` with the probe in it at both widths; return what it found, and the
    console."""
    text = page.read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(PROBE.encode()).digest()).decode()
    text = text.replace("script-src '", f"script-src 'sha256-{digest}' '").replace(
        "</body>", f"<script>{PROBE}</script></body>"
    )
    copy = page.with_name("probed.html")
    copy.write_text(text, encoding="utf-8")
    frames = [(width, "") for width in WIDTHS] + [(1400, "#attack")]
    around = page.with_name("frames.html")
    around.write_text(
        FRAMES
        + "".join(
            f'<iframe width="{w}" height="900" src="{copy.name}{to}"></iframe>' for w, to in frames
        ),
        encoding="utf-8",
    )
    words = typed(
        [CHROMIUM], "--headless --no-sandbox --disable-gpu --enable-logging=stderr --dump-dom"
    )
    words += [
        "--virtual-time-budget=5000",
        *(["--blink-settings=preferredColorScheme=0"] if dark else []),
    ]
    words += [f"--user-data-dir={page.parent / 'profile'}", around.as_uri()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=True)
    found = [
        json.loads(unescape(each))
        for each in re.findall(r"<pre>(.*?)</pre>", done.stdout, re.DOTALL)
    ]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert len(found) == len(frames), console
    return sorted(found, key=lambda each: each["width"][0]), console


@pytest.fixture(scope="module")
def page(write_comparison: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("browser")
    write_comparison(folder / "runs", VALUES)
    return build_report([folder / "runs"], folder / "report.html")


@pytest.fixture(scope="module", params=["light", "dark"])
def visited(page: Path, request: pytest.FixtureRequest) -> Visited:
    found, console = visit(page, dark=request.param == "dark")
    assert all(each["dark"] is (request.param == "dark") for each in found)
    return found, console


def test_nothing_is_fetched_nothing_is_wrong(visited: Visited) -> None:
    found, console = visited
    for each in found:
        assert each["resources"] == []
        assert each["before"] == []
    attacked = [line for line in console if "Content Security Policy" in line]
    assert console == attacked
    assert len(attacked) == 2


def test_what_is_injected_neither_runs_nor_fetches(visited: Visited) -> None:
    (attacked,) = (each for each in visited[0] if each["violations"])
    assert attacked["hit"] == 0
    assert sorted(attacked["violations"]) == ["img-src", "script-src-attr"]


def test_only_tables_scroll_sideways_and_the_keyboard_reaches_them(visited: Visited) -> None:
    for each, width in zip(visited[0], (*WIDTHS, 1400), strict=True):
        assert each["width"][0] == width
        assert each["width"][1] <= width
        assert each["stuck"] == []


def test_every_text_stands_out(visited: Visited) -> None:
    for each in visited[0]:
        assert each["checked"] > 300
        assert each["pale"] == []


def test_a_click_sorts_and_a_second_turns_it_round(visited: Visited) -> None:
    first, long, last = VALUES
    for each in visited[0]:
        assert each["buttons"] == 0
        assert each["order"] == [
            [first, long, last],
            ["ascending", long, first, last],
            ["descending", last, first, long],
        ]


def test_a_toggle_hides_a_variant_in_all_charts(visited: Visited) -> None:
    for each in visited[0]:
        before, hidden, after = each["marks"]
        panels = 3 + 6
        assert before >= panels
        assert (hidden, after) == (0, before)
        assert "post_ln" not in each["hiddenTip"]
        assert "oc3" in each["hiddenTip"]


def test_curves_say_their_values_to_keys_and_pointer(visited: Visited) -> None:
    for each in visited[0]:
        assert each["focused"]
        assert each["tip"].startswith("step: 100post_ln: ")
        assert " to " in each["tip"]
        assert each["gone"]
        assert each["pointed"] == each["tip"]
