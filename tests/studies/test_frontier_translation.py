"""``reproduce frontier/translation``: its verdict on both sides, its settings, and a run of
seconds, made once."""

from __future__ import annotations

import pytest

from wellposed_studies.frontier.translation import (
    MARGIN,
    gains_over_norms,
    judge,
)


@pytest.mark.parametrize(
    ("gains", "verdict"),
    [
        ([0.1, -0.1, 0.0], True),
        ([-MARGIN - 1, -MARGIN - 1.1, -MARGIN - 0.9], False),
        ([2.0, -3.0, 0.5], None),
        ([1.0], None),
    ],
)
def test_half_a_bleu_decides(gains: list[float], verdict: bool | None) -> None:
    assert judge(gains) is verdict


def test_the_better_normalised_model_is_the_one_with_the_higher_mean() -> None:
    bleu = {"post_ln": [20.0, 30.0], "pre_ln": [24.0, 24.0], "t_fixup": [25.0, 25.0]}
    assert gains_over_norms(bleu) == [5.0, -5.0]
