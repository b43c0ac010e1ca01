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
        (64, 81.8, 23.0, 20.7, 19.8, 8.90),
        (512, 373.8, 70.8, 52.8, 45.6, 14.97),
        (4096, 1497, 216, 112.5, 96.4, 21.71),
    ],
)
def test_printed_values_of_the_theory_note(tokens, kim, any_mask, causal, full, tok):
    assert linalg.kim_bracket(tokens, norm=2, head_dim=1) == pytest.approx(kim, rel=1e-3)
    assert linalg.l2_constants(tokens).bracket(2) == pytest.approx(any_mask, rel=2e-3)
    assert linalg.l2_constants(tokens, mask="causal").bracket(2) == pytest.approx(causal, rel=2e-3)
    assert linalg.l2_constants(tokens, mask="full").bracket(2) == pytest.approx(full, rel=2e-3)
    assert linalg.l2_constants(tokens).bracket("tok") == pytest.approx(tok, rel=5e-3)


@pytest.mark.parametrize("tokens", [2, 3, 8, 200])
def test_the_mean_of_distances_beyond_one_is_attained_and_not_exceeded(tokens):
    """All other keys at t = 2 + e attain e; no distances drawn or ascended exceed it."""
    excess = linalg.l2_constants(tokens).row_excess
    assert excess * math.exp(excess) == pytest.approx((tokens - 1) / math.e**2, rel=1e-12)

    def mean(distances):
        weights = torch.softmax(torch.cat((torch.zeros(1).double(), -distances)), 0)
        return weights[1:] @ (distances - 1).clamp_min(0)

    best = torch.full((tokens - 1,), 2 + excess, dtype=torch.float64)
    assert float(mean(best)) == pytest.approx(excess, rel=1e-12)
    generator = torch.Generator().manual_seed(tokens)
    for _ in range(200):
        drawn = torch.rand(tokens - 1, generator=generator, dtype=torch.float64)
        assert float(mean(6 * drawn)) <= excess
        assert float(mean(best + 0.1 * (drawn - 0.5))) <= excess * (1 + 1e-12)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_averages_and_keys_of_one_row_together(width):
    """B24's lemma by ascent over points, weights of keys and the direction: equality is reached."""
    generator = torch.Generator().manual_seed(width)
    drawn = torch.randn(400, 7, width, generator=generator, dtype=torch.float64)
    points = (1.5 * drawn).requires_grad_()
    logits = torch.randn(400, 7, generator=generator, dtype=torch.float64).requires_grad_()
    direction = torch.randn(
        400, 1, width, generator=generator, dtype=torch.float64
    ).requires_grad_()
    optimizer = torch.optim.Adam([points, logits, direction], lr=0.05)
    largest = -math.inf
    for _ in range(150):
        every = torch.cat((torch.zeros_like(points[:, :1]), points), 1)
        distances = every.square().sum(-1)
        others = torch.cat((torch.zeros_like(logits[:, :1]), logits), 1)
        row = torch.softmax(others - distances, -1)
        mean = (row[..., None] * every).sum(1, keepdim=True)
        unit = direction / direction.norm(dim=-1, keepdim=True)
        along = ((every - mean) * unit).sum(-1, keepdim=True)
        moved = (row * (unit - 2 * along * every).norm(dim=-1)).sum(-1)
        beyond = 1 + 2 * (row * (distances - 1).clamp_min(0)).sum(-1) - moved
        largest = max(largest, -float(beyond.detach().min()))
        optimizer.zero_grad()
        beyond.sum().backward()
        optimizer.step()
    assert -1e-3 < largest < 1e-12


def test_contractive_layers_divide_by_the_bound_that_they_divided_by():
    constants = linalg.l2_constants(9)
    assert constants.without_joint_keys().bracket("tok") == 1 + 4 * constants.c
    assert constants.bracket("tok") < 0.85 * (1 + 4 * constants.c)
    for norm in ("inf", 2):
        assert constants.without_joint_keys().bracket(norm, head_dim=4) == constants.bracket(
            norm, head_dim=4
        )


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
