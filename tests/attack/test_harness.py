"""The harness runs, repeats a case, and reports rules whose bound is too small."""

import pytest
import torch
from torch import nn

from wellposed.certification import LayerBound, register_rule

from .compositions import ACCEPTED, Case, draw
from .measure import attacked


class Doubled(nn.Module):
    """``2 x``, for which the test registers a rule of bound 1."""

    def forward(self, x):
        return 2 * x


def violation():
    register_rule(Doubled)(lambda module, site: LayerBound(1.0, "wrong", "exact"))
    module = nn.Sequential(nn.Linear(8, 8), Doubled()).eval()
    return attacked(Case(5, 3, ("Sequential", "Linear", "Doubled"), module, 2, 4, 8))


@pytest.mark.parametrize("number", [1, 2, 3, 5, 8, 13])
def test_cases_are_attacked_and_hold(number):
    outcome = attacked(draw(0, number))
    assert not outcome.violates
    assert outcome.bounded
    assert 0 <= outcome.ratio <= 1 + 1e-4
    again = attacked(draw(0, number))
    for name in ("total", "jacobian", "slope"):
        assert getattr(again, name) == getattr(outcome, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "index", range(len(ACCEPTED)), ids=lambda n: f"{ACCEPTED[n][0].__name__}-{n}"
)
def test_every_sample_is_attacked_and_holds(index):
    """Attack each class with a rule alone, in one of its norms, on a ball if it needs one."""
    kind, sample = ACCEPTED[index]
    torch.manual_seed(index)
    norm = sample.norms[index % len(sample.norms)]
    tokens = sample.tokens or 4
    radius = 2.0 if sample.needs_ball else None
    case = Case(index, 0, (kind.__name__,), sample.build(8), norm, tokens, 8, radius)
    outcome = attacked(case)
    assert outcome.bounded
    assert not outcome.violates
    assert outcome.ratio > 0


def test_a_rule_that_promises_half_is_reported_with_what_repeats_it():
    outcome = violation()
    assert outcome.violates
    assert outcome.ratio == pytest.approx(2.0, rel=1e-4)
    assert outcome.jacobian == pytest.approx(outcome.slope, rel=1e-3)
    assert "case 5, Sequential + Linear + Doubled: norm 2, float32, N = 4" in str(outcome)
