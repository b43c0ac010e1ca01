"""The rate that `compare` prints for a variant is the one it was trained at."""

from pathlib import Path

import pytest

from wellposed_lab.compare.rates import Search, rate_runs
from wellposed_lab.report.runs import rate_notes
from wellposed_lab.training.config import RunConfig


@pytest.mark.parametrize(
    ("used", "words"),
    [
        (1e-3, "0.001, the best of 3"),
        (0.05, "0.05 (50 times 0.001), the best of 3"),
        (5e-4, "0.0005 (0.5 times 0.001), the best of 3"),
        (None, "0.001, the best of 3"),
    ],
)
def test_the_chosen_rate_is_named_with_that_of_the_base(used, words):
    row = {"variant": "a", "loss": 1.0, "learning_rate": used}
    rows = [{**row, "rate": rate, "chosen": rate == 1e-3} for rate in (3e-4, 1e-3, 3e-3)]
    (note,) = rate_notes(rows)
    assert note.startswith(f"a: learning rate {words}")


def test_a_trial_names_the_rate_of_its_configuration():
    wanted = [("post_ln", 1e-3), ("transject", 1e-3)]
    trials = rate_runs(RunConfig("char_lm"), wanted, Search((1e-3,)), Path("out"))
    for trial in trials:
        assert trial.label.endswith(f"at {trial.config.train.learning_rate:g}")
    assert [trial.label.rpartition(" ")[2] for trial in trials] == ["0.001", "0.05"]
