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
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="needs the program chromium on PATH"),
]

Visited = tuple[list[dict[str, Any]], list[str]]
WIDTHS = (390, 1400)
VALUES = {
    "post_ln": [0.40, 0.42],
    "a variant with a long name:1e-4": [0.35, 0.36],
    "oc3": [0.45, 0.46],
}

# Runs at the end of the page; what it finds goes to the frame around it.
PROBE = Path(__file__).with_name("probe.js").read_text(encoding="utf-8").strip()
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
