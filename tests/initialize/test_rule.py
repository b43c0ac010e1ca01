"""Every factor of the papers, against numbers worked by hand and against the equations they
solve."""

import math

import pytest

from wellposed.errors import ConfigError
from wellposed.initialize import (
    dt_fixup_factor,
    t_fixup_decoder_factor,
    t_fixup_encoder_factor,
    t_fixup_factor,
)

# N -> 0.67 N^-1/4, (9N)^-1/4, to five digits, as the public code gives them
TABLE = {
    1: (0.67, 0.57735),
    6: (0.42809, 0.36889),
    12: (0.35998, 0.31020),
    20: (0.31682, 0.27301),
    24: (0.30271, 0.26085),
}


@pytest.mark.parametrize("layers", TABLE)
def test_factors_of_the_table(layers):
    encoder, decoder = TABLE[layers]
    # the table has five digits; roots of roots are the exact values by another route
    assert t_fixup_encoder_factor(layers) == pytest.approx(encoder, abs=5.1e-6)
    assert t_fixup_decoder_factor(layers) == pytest.approx(decoder, abs=5.1e-6)
    assert t_fixup_encoder_factor(layers) == pytest.approx(
        0.67 / math.sqrt(math.sqrt(layers)), abs=1e-15
    )
    assert t_fixup_decoder_factor(layers) == pytest.approx(
        1 / math.sqrt(3 * math.sqrt(layers)), abs=1e-15
    )


@pytest.mark.parametrize("blocks", [1, 2, 12, 40, 3000])
@pytest.mark.parametrize("scale", [None, 0.0, 0.1, 1.0, 30.0, 1e4])
def test_factor_solves_its_equation(blocks, scale):
    v = t_fixup_factor(blocks, scale)
    x = v if scale is None else scale
    assert blocks * (2 * v**2 * x**2 + v**4) == pytest.approx(1.0, rel=1e-12)


@pytest.mark.parametrize("layers", [1, 6, 100])
def test_one_stack_is_six_n_and_a_decoder_alone_nine_n(layers):
    assert t_fixup_factor(2 * layers) == pytest.approx((6 * layers) ** -0.25, rel=1e-14)
    assert t_fixup_factor(3 * layers) == pytest.approx(t_fixup_decoder_factor(layers), rel=1e-14)


def test_the_papers_constant_comes_out_of_the_equation():
    constant = math.sqrt((math.sqrt(22) - 2) / 6)
    assert t_fixup_factor(2 * 6, (9 * 6) ** -0.25) * 6**0.25 == pytest.approx(constant, rel=1e-13)
    assert round(constant, 2) == 0.67


def test_values_without_meaning_are_refused():
    for factor, *given in (
        (t_fixup_encoder_factor, 0),
        (t_fixup_factor, 2, math.nan),
        (dt_fixup_factor, 1, math.inf),
    ):
        with pytest.raises(ConfigError, match="expected"):
            factor(*given)
