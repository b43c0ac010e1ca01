"""Which pairs of inputs an attack in the module's own dtype measures, and what it subtracts from
slopes."""

import math

import pytest
import torch

from wellposed.attack import (
    LowerBound,
    lipschitz_lower_bound,
    perturbation_size,
    steepest_direction,
)
from wellposed.certification import Certificate
from wellposed.errors import ConfigError, ConvergenceError


class Recorded:
    """``x -> 3 x``, recording every input by dtype."""

    def __init__(self):
        self.inputs = []

    def __call__(self, x):
        self.inputs.append(x.detach().clone())
        return 3 * x


def measured_pairs(start, norm, **options):
    """Attack without steps, and return the pairs measured after the ascent, in order."""
    function = Recorded()
    settings = {"norm": norm, "restarts": len(start), "start": start, "steps": 0, "dtype": None}
    attack = lipschitz_lower_bound(function, tuple(start.shape[1:]), **settings, **options)
    inputs = [x for x in function.inputs if x.dtype == start.dtype]
    return list(zip(inputs[::2], inputs[1::2], strict=True)), attack


def test_pairs_too_close_do_not_count():
    """A jump of 0.01 at zero: steep for close pairs, flat at the distance that rounding requires."""
    start = torch.full((1, 2, 1), 1.0)

    def jump(x):
        return torch.where(x > 1.0, 0.01, 0.0) + 0 * x

    options = {"restarts": 1, "start": start, "steps": 0, "dtype": None, "norm": "inf"}
    attack = lipschitz_lower_bound(jump, (2, 1), **options)
    # The shortest step, 1/64, sees the jump: 0.01 x 64.
    assert attack.value == pytest.approx(0.64, rel=1e-3)


def test_pairs_stay_in_the_ball():
    start = 5 * torch.randn(3, 2, 4)
    pairs, attack = measured_pairs(start, 2, radius=0.25)
    for pair in pairs:
        for x in pair:
            assert float(x.double().norm(dim=-1).max()) <= 0.25 * (1 + 1e-7)
    assert max(float(x.norm(dim=-1).max()) for x, _ in pairs) == pytest.approx(0.25, rel=1e-5)
    assert attack.value == pytest.approx(3.0, rel=1e-4)


def test_an_output_that_is_not_finite_loses_to_every_other_and_all_of_them_are_said():
    start = torch.ones(2, 1, 2)
    start[1] = 100.0

    def overflows(x):
        return torch.where(x.abs() > 50.0, math.inf, 1.0) * x

    options = {"restarts": 2, "start": start, "steps": 0, "dtype": None}
    attack = lipschitz_lower_bound(overflows, (1, 2), **options)
    assert attack.value == pytest.approx(1.0, rel=1e-4)
    assert attack.values[1] == -math.inf
    message = r"outputs in torch\.float32 were NaN or infinite at every input"
    with pytest.raises(ConvergenceError, match=message):
        lipschitz_lower_bound(lambda x: x * math.nan, (1, 2), **options)


def test_both_inputs_climb_where_a_gradient_leads():
    """x^2 on a ball of radius 1: the slope |x + y| is 2 at the end, reached by moving both inputs."""
    start = torch.full((1, 1, 1), 0.05)
    options = {"restarts": 1, "start": start, "dtype": None, "radius": 1.0, "norm": 2}
    attacks = [lipschitz_lower_bound(torch.square, (1, 1), steps=n, **options) for n in (0, 60)]
    slopes = [attack.value for attack in attacks]
    assert slopes[0] < 0.2
    assert 1.2 < slopes[1] <= 2.0


def test_directions_of_size_one():
    gradient = torch.tensor([[[3.0, -4.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 2.0]]])
    unit = torch.tensor([[[0.6, -0.8], [0.0, 0.0]], [[0.0, 0.0], [0.0, 1.0]]])
    torch.testing.assert_close(steepest_direction(gradient, 2), unit)
    assert steepest_direction(5 * gradient, "inf").tolist() == [[[1, -1], [0, 0]], [[0, 0], [0, 1]]]
    by_token = torch.tensor([[[3.0, -4.0], [0.0, 2.0]]])
    expected = torch.tensor([[[0.6, -0.8], [0.0, 1.0]]])
    torch.testing.assert_close(steepest_direction(by_token, "tok"), expected)
    torch.testing.assert_close(steepest_direction(by_token, 2), by_token / math.sqrt(29))
    for norm in ("tok", 2):
        assert steepest_direction(torch.zeros(1, 2, 2), norm).abs().max() == 0
    sizes = {norm: perturbation_size(by_token, norm).tolist() for norm in ("tok", 2, "inf")}
    assert sizes == {"tok": [5.0], 2: [pytest.approx(math.sqrt(29))], "inf": [4.0]}


@pytest.mark.parametrize(
    ("value", "total", "ratio"),
    [(0.25, 0.5, 0.5), (3.0, 2.0, 1.5), (0.5, 0.0, math.inf), (0.0, 0.0, 0.0), (0.0, 2.0, 0.0)],
)
def test_the_ratio_of_what_was_found_to_what_was_certified(value, total, ratio):
    attack = LowerBound(value, "tok", torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1), 0)
    in_tok, in_two = (
        Certificate(total, (), "certified", norm, 2, 1, "full", "all inputs", "float64")
        for norm in ("tok", 2)
    )
    assert attack.ratio(in_tok) == ratio
    with pytest.raises(ConfigError, match="the attack is in norm 'tok', the certificate in norm 2"):
        attack.ratio(in_two)
