"""The documentation builds without a warning, and its search finds what readers look for."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ZENSICAL = Path(sys.executable).with_name("zensical")


@pytest.mark.slow
@pytest.mark.skipif(not ZENSICAL.is_file(), reason="needs the extra docs")
def test_the_search_finds_how_to_install_and_not_what_changed(tmp_path):
    for name in ("mkdocs.yml", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("docs", "src", "tools"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(
        [ZENSICAL, "build", "--strict"], cwd=tmp_path, check=True, capture_output=True, timeout=280
    )
    built = json.loads((tmp_path / "site" / "search.json").read_text("utf-8"))
    entries = {item["location"]: item["title"] for item in built["items"]}
    assert entries["index.html#install"] == "Install"
    assert len(entries) > 1000
    assert [place for place in entries if place.startswith("changelog")] == []
