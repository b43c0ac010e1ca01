"""The harness of faults at its smallest: nothing is found in the package, what is planted is found."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tools.faults.harness import Answer, fork, wait
from tools.faults.kills import differences

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the harness forks and reads /proc"),
]


def test_every_family_at_its_smallest(tmp_path):
    rows = tmp_path / "rows.json"
    page = tmp_path / "page.md"
    options = ["--count", "4", "--rows", str(rows), "--page", str(page)]
    command = [sys.executable, "-m", "tools.faults", *options]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3]
    )
    assert done.returncode == 0, done.stderr[-3000:]
    families = json.loads(rows.read_text())
    assert set(families) == {"kills", "writers", "damage", "values", "hostile"}
    tried = sum(row["tried"] for family in families.values() for row in family["rows"])
    assert tried > 40
    assert f"In all {tried:,} tries, 0 faults." in page.read_text()


def _raise():
    raise ValueError("foreign")


def _say(text, status):
    os.write(2, text.encode())
    return status


@pytest.mark.parametrize(
    ("work", "kind"),
    [
        (lambda: time.sleep(60), "hung"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "crashed"),
        (lambda: len(bytearray(8 << 30)), "crashed"),
        (_raise, "crashed"),
        (lambda: _say("Traceback (most recent call last)", 1), "foreign"),
        (lambda: _say("\x1b[31m", 2), "unclear"),
        (lambda: _say("no such file", 2), None),
    ],
)
def test_what_is_planted_is_found(tmp_path, work, kind):
    child = fork(work, tmp_path / "log", memory=1 << 30)
    assert (tmp_path / "log").is_file()
    # A busy machine takes seconds to fork.
    answer = Answer(wait(child, 2 if kind == "hung" else 60), (tmp_path / "log").read_text())
    assert answer.fault() == kind


def test_a_file_that_is_not_what_an_undisturbed_command_leaves_is_named():
    undisturbed = {"a": b"1", "b": [1]}
    assert differences(undisturbed, {"a": b"1", "b": [1]}) == []
    assert differences(undisturbed, {"a": b"2", "c": []}) == ["a", "b", "c"]
