"""Steps are doubled until no model gains 1 % of its loss, and no more often than allowed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from wellposed.recipes.frontier.doubling import Trained, at_plateau, double_until_plateau
from wellposed.recipes.runs import FinishedRun
from wellposed.training.config import RunConfig


def trained(**losses: float) -> Trained:
    """Two seeds a model, .01 on either side of its loss; not a number where both failed."""
    return {
        name: [
            FinishedRun(RunConfig("translation"), Path(name), {} if math.isnan(loss) else {"loss,valid": loss + off})
            for off in (-0.01, 0.01)
        ]
        for name, loss in losses.items()
    }


@pytest.mark.parametrize(
    ("of_lengths", "most", "lengths", "plateau"),
    [
        ({2: (1.995, 2.995)}, 2, 2, True),
        ({2: (1.5, 2.995), 4: (1.495, 2.99)}, 2, 3, True),
        ({2: (1.5, 2.5), 4: (1.0, 2.495)}, 2, 3, False),
        ({2: (1.5, 2.5)}, 1, 2, False),
        ({}, 0, 1, False),
        ({2: (2.5, 3.5)}, 2, 2, True),
        ({2: (math.nan, 2.995), 4: (1.995, 2.99)}, 2, 3, False),
    ],
)
def test_every_model_has_to_stop_gaining(
    of_lengths: dict[int, tuple[float, float]], most: int, lengths: int, plateau: bool
) -> None:
    found = double_until_plateau(
        trained(first=2.0, second=3.0),
        lambda times: trained(**dict(zip(("first", "second"), of_lengths[times], strict=True))),
        most,
    )
    assert (len(found), at_plateau(found)) == (lengths, plateau)
