"""``reproduce frontier/order``: its verdict on both sides, and a run of seconds that is not
repeated."""

import pytest

from wellposed_lab.training.certified.record import CertifiedRun
from wellposed_studies.frontier.certified import Curves
from wellposed_studies.frontier.order import SHARES, gains_over_control
from wellposed_studies.tuning import Tuned


def curve(label, *accuracies):
    runs = [
        CertifiedRun("", "test", 1, "tok", "", 1.0, 1.0, 0.0, list(SHARES), values, values)
        for values in accuracies
    ]
    return Curves("order", label, Tuned([], []), runs)


def test_the_gain_is_taken_where_the_control_has_half_and_from_the_control_that_leaves_least():
    falling = [0.5, 0.4, 0.25, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0]
    stays = [0.4, 0.4, 0.4, 0.3, 0.2, 0.1, 0.0, 0.0, 0.0]
    mine = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.0, 0.0]
    near, far = (
        curve(f"no blocks, T = {t}", column, column) for t, column in ((30, falling), (100, stays))
    )
    assert [control.half_radius() for control in (near, far)] == [0.01, 0.03]
    ours = [curve(label, mine, mine) for label in ("lipschitz, T = 30", "pre_ln")]
    gains = gains_over_control([*ours, near, far])
    assert gains == {"lipschitz, T = 30": [pytest.approx(0.4)] * 2}


def test_a_control_that_keeps_all_its_accuracy_gives_no_radius():
    flat = [0.5] * len(SHARES)
    control = curve("no blocks, T = 30", flat)
    assert control.half_radius() is None
    assert gains_over_control([curve("lipschitz, T = 30", flat), control]) == {}
