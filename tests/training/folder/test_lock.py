"""A run folder has one writer: a second one is refused, a killed one is followed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support import stub_task as stub
from tests.support.runs import start_stub, wait_for_rows

from wellposed.errors import ConfigError
from wellposed.training.folder.lock import NAME, only_writer


@pytest.mark.slow
def test_a_second_writer_is_refused_until_the_first_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = start_stub(out, 100000, 0.01, 0.1, "auto")
    config = stub.make_config(
        steps=100000, dropout=0.1, log_every=1, eval_every=5, checkpoint_every=3
    )
    try:
        wait_for_rows(first, out, 4)
        with pytest.raises(ConfigError, match=f"process {first.pid} on .* is writing this run"):
            stub.run(config, out, resume="auto")
    finally:
        first.kill()
        first.communicate()
    assert first.returncode == -signal.SIGKILL
    assert (out / NAME).read_text().startswith(f"process {first.pid} on ")
    with only_writer(out):
        assert (out / NAME).read_text().startswith(f"process {os.getpid()} on ")
    assert not (out / NAME).exists()


def test_the_lock_ends_with_the_block_and_a_stale_file_is_no_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / NAME).write_text("process 1 on another-host\n")
    assert stub.run(stub.make_config(steps=2), out).status == "success"
    assert not (out / NAME).exists()
    with pytest.raises(KeyError), only_writer(out):
        raise KeyError
    with (
        only_writer(out),
        pytest.raises(ConfigError, match=f"process {os.getpid()} on "),
        only_writer(out),
    ):
        pass
    with only_writer(out, enabled=False), only_writer(out):
        pass


WITH_CHILD = """
import os, sys, time
from pathlib import Path
from wellposed.training.folder.lock import only_writer
with only_writer(Path(sys.argv[1])):
    if not os.fork():
        print(os.getpid(), flush=True)  # by the child, which has let go of the lock when it comes here
    time.sleep(100)
"""


def test_a_child_that_outlives_its_killed_parent_holds_no_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITH_CHILD, str(tmp_path)]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        parent.kill()
        parent.wait()
        os.kill(child, 0)
        with only_writer(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()


@pytest.mark.parametrize("kind", ["link", "hard link", "file", "pipe", "folder"])
def test_what_is_no_lock_of_ours_is_refused_and_left_as_it_is(tmp_path: Path, kind: str) -> None:
    """A link named run.lock emptied the file that it leads to."""
    out, precious = tmp_path / "run", tmp_path / "precious"
    out.mkdir()
    precious.write_text("of the user")
    make: dict[str, Callable[[], object]] = {
        "link": lambda: (out / NAME).symlink_to(precious),
        "hard link": lambda: (out / NAME).hardlink_to(precious),
        "file": lambda: (out / NAME).write_text("of the user"),
        "pipe": lambda: os.mkfifo(out / NAME),
        "folder": lambda: (out / NAME).mkdir(),
    }
    make[kind]()
    with (
        pytest.raises(ConfigError, match=r"run\.lock: a link, or a file of something else"),
        only_writer(out),
    ):
        pass
    assert precious.read_text() == "of the user"
    assert kind in ("pipe", "folder") or (out / NAME).read_text() == "of the user"
