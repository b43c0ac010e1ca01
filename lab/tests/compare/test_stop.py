"""A signal to `compare` is never swallowed: the command always stops, says how to
continue, and exits with 130."""

import signal

import pytest
from tests.support.films import write_films
from tests.support.tables import rotated
from tests.support.words import words as typed

import wellposed_lab.report.aggregate
import wellposed_lab.report.page
import wellposed_lab.training.certified.run
import wellposed_lab.training.loop.train
from wellposed_lab.cli.main import main
from wellposed_lab.compare import compare

COMPARE = typed("compare text_classification --data films.tsv --variants post_ln,rezero --seeds 1 --steps 2 "
"--max-length 5 --model.hidden-size 8 --batch-size 4 "
"--model.num-hidden-layers 1 --model.num-attention-heads 2 --quiet --certify 1 --out")  # fmt: skip
LOOP = wellposed_lab.training.loop.train
# what is called at the moment of the signal, and how many runs have ended then
MOMENTS = {
    "the data is read": (compare, "task_of", 0),
    "evaluating": (LOOP, "evaluate", 1),
    "after the evaluation of test": (LOOP, "save_final", 1),
    "the result is written": (LOOP, "_end", 1),
    "between runs": (compare, "say_nothing", 0),
    "certifying": (wellposed_lab.training.certified.run, "certify_runs", 2),
    "the table": (wellposed_lab.report.aggregate, "aggregate", 2),
    "the report": (wellposed_lab.report.page, "build_report", 2),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("moment", "number"), rotated(MOMENTS, [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
)
def test_a_signal_ends_the_command(moment, number, tmp_path, monkeypatch, capsys):
    module, name, ended = MOMENTS[moment]
    monkeypatch.chdir(tmp_path)
    write_films(tmp_path / "films.tsv")
    out = tmp_path / "out"
    inner = getattr(module, name)
    asked = []

    def signalled(*args, **keywords):
        if not asked:
            asked.append(number)
            signal.raise_signal(number)
        return inner(*args, **keywords)

    monkeypatch.setattr(module, name, signalled)
    before = signal.signal(number, signal.default_int_handler)
    try:
        assert main([*COMPARE, str(out)]) == 130
        assert signal.getsignal(number) == signal.default_int_handler
    finally:
        signal.signal(number, before)
    assert asked
    errors = capsys.readouterr().err
    assert (
        f"interrupted; continue with: wellposed {' '.join(COMPARE)} {out} --resume auto\n" in errors
    )
    assert len(list(out.rglob("result.json"))) == ended
    assert main([*COMPARE, str(out), "--resume", "auto"]) == 0
    assert asked == [number]
