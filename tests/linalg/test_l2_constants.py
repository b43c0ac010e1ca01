"""Brackets of L2 attention: the printed values, phi^-1 against an independent Lambert W, limits and
bad input."""

import itertools
import math

import pytest
import torch
from scipy.special import lambertw

from wellposed import linalg
from wellposed.errors import ConfigError, NotLipschitzError, ShapeError


@pytest.mark.parametrize(
    ("tokens", "kim", "any_mask", "causal", "full", "tok"),
    [
        (64, 81.8, 23.0, 20.7, 19.8, 10.2),
        (512, 373.8, 70.8, 52.8, 45.6, 16.5),
        (4096, 1497, 216, 112.5, 96.4, 23.4),
    ],
)
def test_printed_values_of_the_theory_note(tokens, kim, any_mask, causal, full, tok):
    assert linalg.kim_bracket(tokens, norm=2, head_dim=1) == pytest.approx(kim, rel=1e-3)
    assert linalg.l2_constants(tokens).bracket(2) == pytest.approx(any_mask, rel=2e-3)
    assert linalg.l2_constants(tokens, mask="causal").bracket(2) == pytest.approx(causal, rel=2e-3)
    assert linalg.l2_constants(tokens, mask="full").bracket(2) == pytest.approx(full, rel=2e-3)
    assert linalg.l2_constants(tokens).bracket("tok") == pytest.approx(tok, rel=5e-3)


def test_phi_inverse_is_lambert_w():
    x = torch.cat([torch.zeros(1), torch.logspace(-300, 300, 4001, dtype=torch.float64)])
    expected = torch.from_numpy(lambertw(x.numpy() / math.e).real)
    values = torch.tensor([linalg.phi_inverse(mass) for mass in x.tolist()], dtype=torch.float64)
    assert torch.allclose(values, expected, rtol=4e-16, atol=0)
    assert bool((values.diff() > 0).all())


def test_one_token_is_the_linear_map():
    for mask in ("full", "causal", "any"):
        constants = linalg.l2_constants(1, mask=mask)
        brackets = {constants.bracket(norm, head_dim=3) for norm in ("tok", "inf", 2)}
        assert brackets == {1.0}


@pytest.mark.parametrize("norm", ["tok", 2])
def test_l2_constants_grow_with_tokens_and_shrink_with_knowledge_of_the_mask(norm):
    values = [linalg.l2_constants(n, mask="full").bracket(norm) for n in range(1, 200)]
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(values))
    for n in (2, 5, 8, 64, 513):
        masks = [linalg.l2_constants(n, mask=mask) for mask in ("full", "causal", "any")]
        full, causal, other = (constants.bracket(norm) for constants in masks)
        assert full <= causal <= other


def test_the_minimum_over_e_is_the_minimum():
    """colT <= sqrt(sN) N^(e/2) / (2.718 e) for every e in (0, 1]: the closed form equals a
    search."""
    for n in (2, 5, 8, 50, 4096):
        for s, mask in ((1, "full"), (2, "causal")):
            e = torch.linspace(1e-3, 1, 100_000, dtype=torch.float64)
            searched = float((math.sqrt(s * n) * n ** (e / 2) / (math.e * e)).min())
            expected = min(searched, linalg.phi_inverse(1.0) * (n - 1))
            moment = linalg.l2_constants(n, mask=mask).column_moment
            assert moment == pytest.approx(expected, rel=1e-6)


def test_bad_input():
    for bad in (0, -1, 2.5, True):
        with pytest.raises(ShapeError, match="seq_len"):
            linalg.l2_constants(bad)
    for bad in (-1.0, math.nan, math.inf):
        with pytest.raises(NotLipschitzError, match=">= 0"):
            linalg.phi_inverse(bad)
    words = {
        "nearest: causal": lambda: linalg.l2_constants(4, mask="casual"),
        "head_dim": lambda: linalg.l2_constants(4).bracket("inf"),
        "known: 'tok'": lambda: linalg.check_norm("l2"),
        "known": lambda: linalg.check_norm(True),
    }
    for message, call in words.items():
        with pytest.raises(ConfigError, match=message):
            call()
