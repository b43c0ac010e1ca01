"""`report --watch`: a whole page at every moment, written again when a run logs, at rest after
Ctrl-C."""

import json
import signal
import subprocess
import sys
import time
from functools import partial

from tests.support.html_page import Page

from wellposed.report import build_report


def until(holds, seconds=120):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.1)


def watching(runs, out):
    """Start the command; a session in the background ignores Ctrl-C and would hand that down."""
    words = [sys.executable, "-m", "wellposed", "report", str(runs), "--watch", "--out", str(out)]
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(words, **pipes, preexec_fn=heard)


def refreshes(page):
    return any(meta.get("http-equiv") == "refresh" for meta in page.tags["meta"])


def test_it_follows_a_run_and_ends_with_a_whole_page(make_run, tmp_path):
    runs, out = tmp_path / "runs", tmp_path / "page.html"
    with watching(runs, out) as process:
        assert process.stdout.readline().startswith("waiting: runs cannot be read")
        make_run(tmp_path / "made", value=0.42)
        whole = (tmp_path / "made" / "result.json").read_bytes()
        (tmp_path / "made" / "result.json").unlink()
        (tmp_path / "made").rename(runs)
        until(out.exists)
        going = Page(out.read_text(encoding="utf-8"))
        assert refreshes(going)
        assert "0 finished runs" in going.words
        assert [(row["step"], row["steps"]) for row in going.csv("running")] == [("100", "100")]
        (runs / "result.json").write_bytes(whole)
        until(lambda: "1 finished run," in out.read_text(encoding="utf-8"))
        (runs / "result.json").write_bytes(whole[:40])
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 0
    assert "not valid JSON" in said
    last = Page(out.read_text(encoding="utf-8"))
    assert "1 finished run," in last.words
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp")] == []


def test_the_page_after_the_end_does_not_load_itself_again(make_run, tmp_path):
    make_run(tmp_path / "run")
    out = tmp_path / "page.html"
    assert refreshes(Page(build_report([tmp_path], out, refresh=2).read_text(encoding="utf-8")))
    with watching(tmp_path, out) as process:
        assert process.stdout.readline() == f"report: {out}\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 0
    assert not refreshes(Page(out.read_text(encoding="utf-8")))


def test_runs_that_go_on_are_shown_apart(compare, make_run, tmp_path):
    folder = compare({"post_ln": [0.4, 0.41]})
    going = make_run(folder / "rezero" / "seed-0", variant="rezero")
    (going / "result.json").unlink()
    rows = (going / "metrics.jsonl").read_text().split("\n")
    (going / "metrics.jsonl").write_text("\n".join(rows[:6]) + "\n" + rows[6][:20])
    page = Page(build_report([folder], tmp_path / "page.html").read_text(encoding="utf-8"))
    (row,) = page.csv("running")
    last = [json.loads(line) for line in rows[:6] if '"train"' in line][-1]
    assert (row["step"], float(row["train"])) == (str(last["step"]), last["loss"])
    labels = [str(svg.get("aria-label")) for svg in page.tags["svg"]]
    assert "listops: training loss (nats) over step: rezero, seed 0" in labels
    assert {row["variant"] for row in page.csv("1-listops-curves")} == {"post_ln"}
