"""Every page of the built documentation in a real browser, at two widths: no error, no request, no
raw formula."""

import json
import shutil
import subprocess
import sys
import threading
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from tests.support.browser import AROUND, WIDTHS, frame, no_chromium, visit

ROOT = Path(__file__).parents[1]
ZENSICAL = Path(sys.executable).with_name("zensical")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ZENSICAL.is_file(), reason="needs the extra docs"),
]
FOLDER = "/below/a/folder/"

# The first thing in every page.
PROBE = f"<script>{(ROOT / 'tests/support/site_probe.js').read_text('utf-8')}</script>"


class Handler(SimpleHTTPRequestHandler):
    """Remembers what is asked for and is not there."""

    server: Any

    def send_error(self, code, *rest):
        self.server.missing.append(self.path)
        super().send_error(code, *rest)

    def log_message(self, *_):
        """Say nothing."""


@contextmanager
def serving(root):
    """Serve the site below a folder from a thread, with the probe in every page."""
    pages = [path for path in sorted(root.rglob("*.html")) if path.stem != "404"]
    names = [f"/{path.relative_to(root).as_posix()}" for path in pages]
    for path in pages:
        path.write_text(path.read_text("utf-8").replace("<head>", "<head>" + PROBE, 1), "utf-8")
    for width in WIDTHS:
        frames = [frame(width, name) for name in names]
        (root / f"around{width}.html").write_text(AROUND + "".join(frames), "utf-8")
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(root)))
    server.pages, server.missing = names, []
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    for name in ("mkdocs.yml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder)
    for name in ("docs", "src", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(
        [ZENSICAL, "build", "--strict"], cwd=folder, check=True, capture_output=True, timeout=280
    )
    root = tmp_path_factory.mktemp("served")
    shutil.copytree(folder / "site", root / FOLDER.strip("/"))
    with serving(root) as started:
        yield started


def opened(server, profile, width):
    """Open every page in a frame of its own, where no other name resolves."""
    nowhere = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    address = f"http://127.0.0.1:{server.server_port}/around{width}.html"
    return visit(address, profile, [nowhere], milliseconds=20_000)


def elsewhere(server, found):
    """Return what a page asked for outside the site."""
    home = f"http://127.0.0.1:{server.server_port}{FOLDER}"
    return [name for name in found["resources"] if not name.startswith((home, "data:", "blob:"))]


@no_chromium
@pytest.mark.timeout(600)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_opens_without_an_error_or_a_foreign_request(server, tmp_path, width):
    assert len(server.pages) >= 25
    found, console = opened(server, tmp_path / "profile", width)
    assert console == []
    assert sorted(each["page"] for each in found) == sorted(server.pages)
    assert server.missing == []
    for each in found:
        faults = [
            *each["errors"],
            *each["raw"],
            *each["prompts"],
            *each["pictures"],
            *elsewhere(server, each),
        ]
        assert faults == [], each["page"]
        assert each["wide"] <= width == each["width"], each["page"]
    assert sum(each["formulas"] for each in found) > 300


def test_the_search_finds_how_to_install_and_not_what_changed(server):
    with urlopen(f"http://127.0.0.1:{server.server_port}{FOLDER}search.json") as answer:
        entries = {item["location"]: item["title"] for item in json.load(answer)["items"]}
    assert entries["index.html#install"] == "Install"
    assert len(entries) > 1000
    assert [place for place in entries if place.startswith("changelog")] == []


@no_chromium
def test_faults_are_seen(tmp_path):
    planted = (
        "<html><head></head><body><img"
        ' src="http://foreign.invalid/a.png"><script>nothing()</script>'
        '<div class="highlight"><code>&gt;&gt;&gt; 1</code></div></body></html>'
    )
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "planted.html").write_text(planted)
    with serving(tmp_path / "site") as server:
        (found,), console = opened(server, tmp_path / "profile", 390)
        assert elsewhere(server, found) == found["pictures"] == ["http://foreign.invalid/a.png"]
        assert found["prompts"] == [">>> 1"]
    assert any("nothing is not defined" in error for error in found["errors"])
    assert len(console) == 1
