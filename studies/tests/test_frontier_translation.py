"""``reproduce frontier/translation``: its verdict on both sides, and steps that are doubled until every
model gains less than 1 % of its loss or overfits."""

import json
import math

import pytest

from wellposed_lab.training.config import RunConfig
from wellposed_studies.frontier import translation
from wellposed_studies.study import FinishedRun


def test_the_better_normalised_model_is_the_one_with_the_higher_mean():
    bleu = {"post_ln": [20.0, 30.0], "pre_ln": [24.0, 24.0], "t_fixup": [25.0, 25.0]}
    assert translation.gains_over_norms(bleu) == [5.0, -5.0]


"""The lowest loss of a model, and its last in units of that."""


def trained(folder, models):
    """Two seeds a model, 0.01 on either side of its loss; not a number if both failed."""
    return {
        name: [_run(folder / f"{name}{off}", lowest + off, last) for off in (-0.01, 0.01)]
        for name, (lowest, last) in models.items()
    }


def _run(folder, lowest, last):
    failed = math.isnan(lowest)
    folder.mkdir(parents=True)
    losses = [3.0, 6.0] if failed else [lowest, last * lowest]
    rows = [{"step": step, "split": "valid", "loss": loss} for step, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    results = {} if failed else {"loss,valid": lowest}
    return FinishedRun(RunConfig("translation"), folder, results, info={"reason": "diverged"})


FLAT = 1.0
RISEN = 1.05


@pytest.mark.parametrize(
    ("of_lengths", "most", "lengths", "plateau"),
    [
        pytest.param({2: ((1.995, FLAT), (2.995, FLAT))}, 2, 2, True, id="both gain nothing"),
        pytest.param(
            {2: ((1.5, FLAT), (2.995, FLAT)), 4: ((1.495, FLAT), (2.99, FLAT))},
            2,
            3,
            True,
            id="one goes on",
        ),
        pytest.param(
            {2: ((1.5, FLAT), (2.5, FLAT)), 4: ((1.0, FLAT), (2.495, FLAT))},
            2,
            3,
            False,
            id="no further",
        ),
        pytest.param({2: ((1.5, FLAT), (2.5, FLAT))}, 1, 2, False, id="both go on"),
        pytest.param({}, 0, 1, False, id="never doubled"),
        pytest.param({2: ((2.5, FLAT), (3.5, FLAT))}, 2, 2, True, id="worse"),
        pytest.param({2: ((1.5, RISEN), (2.995, FLAT))}, 2, 2, False, id="one overfits"),
        pytest.param({2: ((1.5, RISEN), (2.5, 1.005))}, 1, 2, False, id="the other does not"),
        pytest.param(
            {2: ((math.nan, FLAT), (2.995, FLAT))}, 1, 2, False, id="a failure is no plateau"
        ),
    ],
)
def test_every_model_has_to_stop_gaining(tmp_path, of_lengths, most, lengths, plateau):
    def train(times):
        return trained(
            tmp_path / str(times), dict(zip(("first", "second"), of_lengths[times], strict=True))
        )

    runs = translation.double_until_plateau(
        trained(tmp_path, {"first": (2.0, FLAT), "second": (3.0, FLAT)}), train, most
    )
    assert (len(runs), translation.at_plateau(runs)) == (lengths, plateau)
