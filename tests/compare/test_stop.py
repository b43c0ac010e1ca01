"""A signal to `compare` or `reproduce` is never swallowed: whatever the command is at, it stops, says
how to go on and exits with 130."""

import signal

import pytest
from tests.support.words import words as typed

import wellposed.recipes.reproduce
import wellposed.report
import wellposed.training.certified.run
import wellposed.training.loop.train
from wellposed.cli import main
from wellposed.compare import compare

COMPARE = typed("compare listops --variants post_ln,rezero --seeds 1 --steps 2 --min-length 5 "
"--max-length 9 --num-train 32 --num-valid 8 --num-test 12 --model.hidden-size 8 --batch-size 4 "
"--model.num-hidden-layers 1 --model.num-attention-heads 2 --quiet --certify 1 --out")  # fmt: skip
FIGURE = typed("reproduce kim2021/figure-2 --scale toy --quiet --out")
LOOP = wellposed.training.loop.train
# the words, what is called at the moment of the signal, and how many runs have ended then
MOMENTS = {
    "the data is read": (COMPARE, compare, "task_of", 0),
    "evaluating": (COMPARE, LOOP, "evaluate", 1),
    "after the evaluation of test": (COMPARE, LOOP, "save_final", 1),
    "the result is written": (COMPARE, LOOP, "_end", 1),
    "between runs": (COMPARE, compare, "say_nothing", 0),
    "certifying": (COMPARE, wellposed.training.certified.run, "certify_runs", 2),
    "the table": (COMPARE, wellposed.report, "aggregate", 2),
    "the report": (COMPARE, wellposed.report, "build_report", 2),
    "a figure": (FIGURE, wellposed.recipes.reproduce, "draw", 0),
}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_signal_ends_the_command(moment, number, tmp_path, monkeypatch, capsys):
    words, module, name, ended = MOMENTS[moment]
    inner, asked = getattr(module, name), []

    def signalled(*args, **how):
        if not asked:
            asked.append(number)
            signal.raise_signal(number)
        return inner(*args, **how)

    monkeypatch.setattr(module, name, signalled)
    before = signal.signal(number, signal.default_int_handler)
    try:
        assert main([*words, str(tmp_path)]) == 130
        assert signal.getsignal(number) == signal.default_int_handler
    finally:
        signal.signal(number, before)
    assert asked
    said, again = capsys.readouterr().err, "" if words is FIGURE else " --resume auto"
    assert f"interrupted; go on with: wellposed {' '.join(words)} {tmp_path}{again}\n" in said
    assert len(list(tmp_path.rglob("result.json"))) == ended
    assert main([*words, str(tmp_path), *again.split()]) == 0
    assert asked == [number]
