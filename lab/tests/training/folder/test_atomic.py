"""Files that are old or new and never half, also where two processes write the same one; and the one
writer of a run folder."""

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from lab.tests.support import stub_task as stub
from lab.tests.support.runs import start_stub, wait_for_rows

from wellposed.errors import ConfigError
from wellposed_lab.training.folder import atomic
from wellposed_lab.training.folder.result import MetricsFile
from wellposed_lab.training.folder.run_folder import LOCK, RunFolder

WRITER = """
import sys
from pathlib import Path
from wellposed_lab.training.folder.atomic import open_replacing
with open_replacing(Path(sys.argv[1])) as file:
    file.write(b"half")
    file.flush()
    print("half", flush=True)
    sys.stdin.readline()
    file.write(b" and half")
"""


def start(path):
    words = [sys.executable, "-c", WRITER, str(path)]
    pipe = subprocess.PIPE
    child = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True)
    assert next(iter(child.stdout or ())) == "half\n"
    return child


def test_two_writers_of_one_file_leave_a_whole_one(tmp_path):
    """With one temporary name for both, the one that ended first published the half of the
    other."""
    path = tmp_path / "page.html"
    other = start(path)
    atomic.replace_file(path, b"whole")
    assert path.read_bytes() == b"whole"
    other.communicate("\n")
    assert other.returncode == 0
    assert path.read_bytes() == b"half and half"
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]


def test_what_a_killed_writer_left_goes_with_the_next_one(tmp_path):
    path = tmp_path / "page.html"
    other = start(path)
    other.send_signal(signal.SIGKILL)
    other.communicate()
    assert [entry.name for entry in tmp_path.iterdir()] == [f".tmp-{other.pid}-page.html"]
    atomic.replace_file(path, b"whole")
    assert [entry.name for entry in tmp_path.iterdir()] == ["page.html"]


def test_the_record_of_files_comes_last(tmp_path, monkeypatch):
    order = []
    replace = Path.replace

    def noted(path, target):
        order.append(Path(target).name)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", noted)
    with atomic.replace_files(tmp_path / "new") as temporary:
        (temporary / "a.json").write_text("{}")
        (temporary / "b.csv").write_text("x")
        assert list((tmp_path / "new").glob("[!.]*")) == []
    assert order == ["b.csv", "a.json"]
    with pytest.raises(KeyError), atomic.replace_files(tmp_path / "new") as temporary:
        raise KeyError((temporary / "a.json").write_text("[]"))
    left = {entry.name: entry.read_text() for entry in (tmp_path / "new").iterdir()}
    assert left == {"a.json": "{}", "b.csv": "x"}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
@pytest.mark.parametrize("kind", ["pipe", "link", "file"])
def test_a_folder_replaces_whatever_has_its_name(tmp_path, kind):
    """``shutil.rmtree`` of a pipe waits for ever."""
    path = tmp_path / "final"
    make = {"pipe": os.mkfifo, "link": lambda path: path.symlink_to(tmp_path), "file": Path.touch}
    make[kind](path)
    with atomic.replace_folder(path) as temporary:
        (temporary / "a").write_text("a")
    assert [entry.name for entry in path.iterdir()] == ["a"]
    assert not path.is_symlink()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes here")
def test_nothing_is_written_through_a_link_nor_in_the_place_of_a_pipe(tmp_path):
    precious = tmp_path / "precious"
    absent = tmp_path / "absent"
    precious.write_text("of the user")
    (tmp_path / f".tmp-{os.getpid()}-page.html").symlink_to(precious)
    atomic.replace_file(tmp_path / "page.html", b"new")
    assert precious.read_text() == "of the user"
    assert (tmp_path / "page.html").read_text() == "new"
    (tmp_path / "metrics.jsonl").symlink_to(absent)
    with closing(MetricsFile(tmp_path)) as rows:
        rows.append({"step": 1})
    assert not absent.exists()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="is a pipe or a device"):
        atomic.replace_file(tmp_path / "pipe", b"new")


@pytest.mark.parametrize(
    ("name", "why"), [("", "is a folder, expected a file"), ("a/b", "No such")]
)
def test_an_error_of_writing_names_the_file_that_was_asked_for(tmp_path, name, why):
    with pytest.raises(OSError, match=f"{why}.*: '{tmp_path / name}'"):
        atomic.replace_file(tmp_path / name, b"new")
    path = tmp_path / "page.html"
    with pytest.raises(OSError, match=f"full: '{path}'"), atomic.open_replacing(path):
        raise OSError(28, "full")


@pytest.mark.slow
def test_a_second_writer_is_refused_until_the_first_is_killed(tmp_path):
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
    assert (out / LOCK).read_text().startswith(f"process {first.pid} on ")
    with RunFolder(out).lock():
        assert (out / LOCK).read_text().startswith(f"process {os.getpid()} on ")
    assert not (out / LOCK).exists()


def test_the_lock_ends_with_the_block_and_a_stale_file_is_no_run(tmp_path):
    out = tmp_path / "run"
    out.mkdir()
    (out / LOCK).write_text("process 1 on another-host\n")
    assert stub.run(stub.make_config(steps=2), out).status == "success"
    assert not (out / LOCK).exists()
    with pytest.raises(KeyError), RunFolder(out).lock():
        raise KeyError
    refused = pytest.raises(ConfigError, match=f"process {os.getpid()} on ")
    with RunFolder(out).lock(), refused, RunFolder(out).lock():
        pass
    with RunFolder(out, writes=False).lock(), RunFolder(out).lock():
        pass


@pytest.mark.parametrize("kind", ["link", "hard link", "file", "pipe", "folder"])
def test_what_is_no_lock_of_ours_is_refused_and_left_as_it_is(tmp_path, kind):
    """A link named run.lock emptied the file that it leads to."""
    out = tmp_path / "run"
    precious = tmp_path / "precious"
    out.mkdir()
    precious.write_text("of the user")
    make = {
        "link": lambda: (out / LOCK).symlink_to(precious),
        "hard link": lambda: (out / LOCK).hardlink_to(precious),
        "file": lambda: (out / LOCK).write_text("of the user"),
        "pipe": lambda: os.mkfifo(out / LOCK),
        "folder": lambda: (out / LOCK).mkdir(),
    }
    make[kind]()
    expected = r"run\.lock: expected the lock file of the run, found a link"
    with pytest.raises(ConfigError, match=expected), RunFolder(out).lock():
        pass
    assert precious.read_text() == "of the user"
    assert kind in ("pipe", "folder") or (out / LOCK).read_text() == "of the user"
