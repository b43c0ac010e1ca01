"""The page in a real browser, of 1, 3 and 8 variants, at two widths: the answer first, nothing on
top of anything, no request, no error; tables sort."""

import base64
import hashlib
from pathlib import Path

import pytest
from tests.support.browser import AROUND, WIDTHS, frame, needs_chromium, visit

from wellposed_lab.report.page import build_report

pytestmark = needs_chromium
LONG = "a variant with a long name:1e-4"
NAMES = ("post_ln", LONG, "oc3", "pre_ln", "rezero", "t_fixup", "lipschitz", "orthogonal")
MEANS = (0.41, 0.355, 0.455, 0.46, 0.47, 0.48, 0.49, 0.5)
FIRST_ANSWER = 500
LARGEST_PAGE = 3 * 2**20

# Runs at the end of the page; what it finds goes to the frame around it.
PROBE = Path(__file__).with_name("probe.js").read_text(encoding="utf-8").strip()


def probed(page):
    """Open a copy of ``page`` with the probe in it at both widths."""
    text = page.read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(PROBE.encode()).digest()).decode()
    text = text.replace("script-src '", f"script-src 'sha256-{digest}' '")
    text = text.replace("</body>", f"<script>{PROBE}</script></body>")
    page.with_name("probed.html").write_text(text, encoding="utf-8")
    frames = [frame(width, "probed.html") for width in WIDTHS] + [frame(1400, "probed.html#attack")]
    around = page.with_name("frames.html")
    around.write_text(AROUND + "".join(frames), encoding="utf-8")
    profile = page.parent / "profile"
    probes, console = visit(around.as_uri(), profile, milliseconds=5_000)
    assert len(probes) == len(frames), console
    return sorted(probes, key=lambda view: view["width"][0]), console


@pytest.fixture(scope="module", params=[1, 3, 8])
def visited(write_comparison, tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("browser")
    count = request.param
    seeds = (-0.01, 0.0, 0.012)[: 3 if count == 8 else 2]
    values = {
        name: [round(mean + gain + 0.001 * k * position, 4) for k, gain in enumerate(seeds)]
        for position, (name, mean) in enumerate(zip(NAMES[:count], MEANS, strict=False))
    }
    write_comparison(folder / "runs", values, layers=24)
    page = build_report([folder / "runs"], folder / "report.html")
    assert page.stat().st_size < LARGEST_PAGE
    probes, console = probed(page)
    for view in probes:
        view["names"] = NAMES[:count]
    return probes, console


def test_the_answer_comes_first_and_all_can_be_read(visited):
    for view, width in zip(visited[0], (*WIDTHS, 1400), strict=True):
        assert view["verdict"] < view["first"] < FIRST_ANSWER
        assert view["overprinted"] == view["tiny"] == view["pale"] == []
        assert view["checked"] > 250
        # Only tables scroll sideways; they say so, and the keyboard reaches them.
        assert view["width"][0] == width >= view["width"][1]
        assert view["stuck"] == []
        assert all(wide == hinted for wide, hinted in view["hinted"])
    assert any(wide for wide, _ in visited[0][0]["hinted"])


def test_nothing_is_fetched_and_what_is_injected_does_not_run(visited):
    probes, console = visited
    for view in probes:
        assert view["resources"] == view["before"] == []
    (attacked,) = (view for view in probes if view["violations"])
    assert attacked["hit"] == 0
    assert sorted(attacked["violations"]) == ["img-src", "script-src-attr"]
    assert len(console) == sum("Content Security Policy" in line for line in console) == 2


def test_a_click_sorts_and_a_second_turns_it_round(visited):
    for view in visited[0]:
        names = list(view["names"])
        rising = sorted(names, key=lambda name: MEANS[NAMES.index(name)])
        assert view["buttons"] == 0
        assert view["order"] == [names, ["ascending", *rising], ["descending", *rising[::-1]]]
