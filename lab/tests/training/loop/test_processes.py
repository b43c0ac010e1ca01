"""Several processes are one run; signals and kills of a real process."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lab.tests.support import stub_task
from lab.tests.support.runs import rows, start_stub, wait_for_rows
from lab.tests.support.two_processes import start_two
from tests.support.words import python
from tests.support.words import words as typed

from wellposed_lab.cli.main import main
from wellposed_lab.training.folder import checkpoints
from wellposed_lab.training.loop.processes import StopRequest, run_until_stopped

SCRIPT = Path(stub_task.__file__)
DATA = "To be, or not to be, that is the question. "
COMMAND = typed("train char_lm --seq-len 16 --batch-size 4 --schedule constant --eval-every 2 "
"--log-every 1 --model.hidden-size 16 --model.num-attention-heads 2 "
"--model.dropout 0 --model.num-hidden-layers 1")  # fmt: skip


def command(*words, processes=1):
    """Run ``python -m wellposed``, under torchrun if there are several processes."""
    torchrun = f"torch.distributed.run --standalone --nproc_per_node={processes} -m"
    launcher = typed(torchrun) if processes > 1 else []
    alone = {**os.environ, "OMP_NUM_THREADS": "1"}
    return python("-m", [*launcher, "wellposed", *words], env=alone, timeout=200)


def write_data(folder, **characters):
    """Write a file of so many characters for each split; return that of train."""
    for split, count in characters.items():
        (folder / f"{split}.txt").write_text((DATA * 70)[:count])
    return str(folder / "train.txt")


def assert_same_losses(one, other, rel=0.0001):
    """Compare all rows but their seconds, to rounding."""
    for left, right in zip(rows(one), rows(other), strict=True):
        assert left.keys() == right.keys()
        for name in left.keys() - {"split", "best", "isometry_error"}:
            assert left[name] == pytest.approx(right[name], rel=rel), name


@pytest.mark.slow
def test_torchrun_makes_one_run_that_as_many_continue(tmp_path):
    """The splits have 3 and 1 batches, which two processes cannot share evenly."""
    data = write_data(tmp_path, train=16 * 4 * 9, valid=16 * 4 * 3, test=16 * 4)
    words = [*COMMAND, "--data", data, "--penalty.query", "0.1", "--constrain.where", "key"]
    done = command(*words, "--steps", "4", "--out", str(tmp_path / "two"), processes=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("success: ") == 1
    one = [*words, "--gradient-accumulation", "2", "--out", str(tmp_path / "one")]
    assert command(*one, "--steps", "4").returncode == 0
    assert_same_losses(tmp_path / "one", tmp_path / "two")

    done = command(*words, "--steps", "7", "--out", str(tmp_path / "two"), "--resume", "auto")
    assert done.returncode == 2
    assert "begun by 2 processes, received" in done.stderr
    logged = rows(tmp_path / "two", "train")
    assert all(row["penalty"] > 0 and row["isometry_error"] < 1e-5 for row in logged)


@pytest.mark.slow
def test_two_processes_compare_together(tmp_path):
    data = write_data(tmp_path, train=len(DATA) * 60)
    what = typed("--variants post_ln,pre_ln --seeds 1 --steps 3 --eval-batches 2 --quiet")
    words = ["compare", *COMMAND[1:], "--data", data, *what]
    done = command(*words, "--out", str(tmp_path / "two"), processes=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("report: ") == 1
    assert main([*words, "--gradient-accumulation", "2", "--out", str(tmp_path / "one")]) == 0
    one = tmp_path / "one"
    two = tmp_path / "two"
    for variant in ("post_ln", "pre_ln"):
        assert_same_losses(one / variant / "seed-0", two / variant / "seed-0")
    names = [{path.name for path in folder.iterdir()} for folder in (one, two)]
    assert names[0] == names[1]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_commands_of_one_process_refuse_several(monkeypatch, capsys, rank):
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    for name, message in (("doctor", "without torchrun"), ("report", "")):
        assert main([name]) == 2
        errors = capsys.readouterr().err
        assert errors.count("\n") == 1
        assert f"wellposed: {name} runs in one process" in errors
        assert message in errors


def test_sharding_by_the_launcher_is_refused_before_anything_is_done(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert main([*COMMAND, "--steps", "2", "--out", str(tmp_path / "run")]) == 2
    assert "would shard the weights (FSDP)" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_process_that_dies_ends_the_other_in_one_line(tmp_path):
    first, second = start_two(SCRIPT, tmp_path / "run", "100000", "0.01", "0.1", "never")
    try:
        wait_for_rows(first, tmp_path / "run", 4)
        second.kill()
        _, stderr = first.communicate(timeout=60)
    finally:
        first.kill()
        second.communicate()
    assert first.returncode == 1
    expected = "process 0 of 2: another process of this run has ended"
    assert stderr.splitlines()[-1].startswith(expected)
    assert "Traceback" not in stderr


@pytest.mark.slow
def test_a_signal_ends_the_run_in_order(tmp_path):
    """One process for each signal, side by side."""
    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    started = {number: start_stub(tmp_path / number.name, 100000, 0.01) for number in signals}
    try:
        for number, process in started.items():
            wait_for_rows(process, tmp_path / number.name, 8)
            process.send_signal(number)
        for number, process in started.items():
            out = tmp_path / number.name
            (stdout, stderr) = process.communicate(timeout=60)
            assert (process.returncode, stdout) == (130, "cancelled\n")
            assert "Traceback" not in stderr
            assert "continue with --resume auto" in stderr
            info = json.loads((out / "result.json").read_text())["train_info"]
            assert info["status"] == "cancelled"
            newest, damaged = checkpoints.newest_complete(out)
            assert newest is not None
            assert not damaged
            assert checkpoints.step_of(newest) == info["steps"]
    finally:
        for process in started.values():
            process.kill()


def test_handlers_are_put_back_and_other_threads_left_alone():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopRequest():
        assert signal.getsignal(signal.SIGINT) != before[0]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before

    def enter():
        with StopRequest() as stop:
            return stop.requested

    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(enter).result()


def test_a_hangup_that_is_ignored_stays_ignored():
    """`nohup wellposed train ...` outlives its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_request_inside_another_is_heard_by_both():
    with StopRequest() as outer:
        with StopRequest() as inner:
            signal.raise_signal(signal.SIGTERM)
        assert (outer.requested, inner.requested) == (True, True)
        with StopRequest() as later:
            assert later.requested, "what was asked before it began"
            with pytest.raises(KeyboardInterrupt, match="second signal"):
                signal.raise_signal(signal.SIGTERM)
    with StopRequest() as other:
        assert not other.requested


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the script forks")
def test_killed_at_the_last_renames(tmp_path):
    """At random moments it is killed by the smallest search for faults."""
    alone = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    where = {"env": {**os.environ, **alone}, "cwd": Path(__file__).parents[4]}
    done = python("-m lab.tests.support.kill_and_resume", [tmp_path], **where)
    assert done.returncode == 0, done.stderr
    outcomes = json.loads(done.stdout.splitlines()[-1])
    assert len(outcomes) >= 2 * 3  # of env.json, manifest.json and result.json at least
    for outcome in outcomes:
        assert outcome == {"killed": -9, "resumed": 0, "litter": [], "different": []}, outcomes


def test_a_signal_that_meets_a_finaliser_is_told_in_one_line(capsys):
    class Slow:
        def __del__(self):
            signal.raise_signal(signal.SIGTERM)

    def work():
        Slow()
        return 0

    assert run_until_stopped(work, "it again") == 130
    assert capsys.readouterr().err == "interrupted; continue with: it again\n"
