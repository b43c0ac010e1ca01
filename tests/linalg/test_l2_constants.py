"""Brackets of L2 attention: the printed values, phi^-1 against an independent Lambert W, limits and
bad input."""

import itertools
import math

import pytest
import torch
from scipy.special import lambertw
from tests.support.refusal import each_refused

from wellposed.errors import ConfigError, NotLipschitzError, ShapeError
from wellposed.linalg import (
    check_norm,
    kim_bracket,
    l2_bracket,
    l2_constants,
    l2_constants_alibi,
    l2_constants_from_weights,
    phi_inverse,
)


@pytest.mark.parametrize(
    ("tokens", "kim", "any_mask", "causal", "full", "tok"),
    [
        (64, 81.8, 23.0, 20.7, 19.8, 10.2),
        (512, 373.8, 70.8, 52.8, 45.6, 16.5),
        (4096, 1497, 216, 112.5, 96.4, 23.4),
    ],
)
def test_printed_values_of_the_theory_note(tokens, kim, any_mask, causal, full, tok):
    assert kim_bracket(tokens, norm=2, head_dim=1) == pytest.approx(kim, rel=1e-3)
    assert l2_bracket(tokens, norm=2) == pytest.approx(any_mask, rel=2e-3)
    assert l2_bracket(tokens, norm=2, mask="causal") == pytest.approx(causal, rel=2e-3)
    assert l2_bracket(tokens, norm=2, mask="full") == pytest.approx(full, rel=2e-3)
    assert l2_bracket(tokens, norm="tok") == pytest.approx(tok, rel=5e-3)


def test_phi_inverse_is_lambert_w():
    x = torch.cat([torch.zeros(1), torch.logspace(-300, 300, 4001, dtype=torch.float64)])
    expected = torch.from_numpy(lambertw(x.numpy() / math.e).real)
    found = phi_inverse(x)
    assert torch.allclose(found, expected, rtol=4e-16, atol=0)
    assert bool((found.diff() > 0).all())


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_phi_inverse_refuses(bad):
    with pytest.raises(NotLipschitzError, match=">= 0"):
        phi_inverse(bad)


def test_one_token_is_the_linear_map():
    for mask in ("full", "causal", "any"):
        constants = l2_constants(1, mask=mask)
        brackets = {constants.bracket(norm, head_dim=3) for norm in ("tok", "inf", 2)}
        assert brackets == {1.0}


@pytest.mark.parametrize("norm", ["tok", 2])
def test_l2_constants_grow_with_tokens_and_shrink_with_knowledge_of_the_mask(norm):
    values = [l2_bracket(n, norm=norm, mask="full") for n in range(1, 200)]
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(values))
    for n in (2, 5, 8, 64, 513):
        full, causal, other = (l2_bracket(n, norm=norm, mask=m) for m in ("full", "causal", "any"))
        assert full <= causal <= other


def test_the_minimum_over_e_is_the_minimum():
    """colT <= sqrt(sN) N^(e/2) / (2.718 e) for every e in (0, 1]: the closed form equals a
    search."""
    for n in (2, 5, 8, 50, 4096):
        for s, mask in ((1, "full"), (2, "causal")):
            e = torch.linspace(1e-3, 1, 100_000, dtype=torch.float64)
            searched = float((math.sqrt(s * n) * n ** (e / 2) / (math.e * e)).min())
            assert l2_constants(n, mask=mask).column_moment == pytest.approx(
                min(searched, phi_inverse(1.0) * (n - 1)), rel=1e-6
            )


def test_weights_of_ones_are_the_any_mask():
    found, expected = l2_constants_from_weights(torch.ones(9, 9)), l2_constants(9)
    assert found.c == pytest.approx(expected.c)
    assert found.column_mass == pytest.approx(expected.column_mass)
    assert found.column_moment == pytest.approx(expected.column_moment)


def test_null_keys_only_enlarge_c():
    assert l2_constants(5, extra_keys=3).c == l2_constants(8).c
    assert l2_constants(5, extra_keys=3).column_mass == l2_constants(5).column_mass


def test_bad_input():
    for bad in (0, -1, 2.5, True):
        with pytest.raises(ShapeError, match="seq_len"):
            l2_constants(bad)
    with pytest.raises(ShapeError, match="extra_keys must be >= 0, received -1"):
        l2_constants(3, extra_keys=-1)
    words = {
        "nearest: causal": lambda: l2_constants(4, mask="casual"),
        "head_dim": lambda: l2_bracket(4, norm="inf"),
        "known: 'tok'": lambda: check_norm("l2"),
        "known": lambda: check_norm(True),
        "slope": lambda: l2_constants_alibi(0.0),
    }
    each_refused(ConfigError, words)
    with pytest.raises(ShapeError, match="diagonal"):
        l2_constants_from_weights(torch.ones(3, 3) - torch.eye(3))


@pytest.mark.parametrize(("tokens", "head_dim"), [(2, 1), (7, 16), (512, 64)])
def test_the_printed_brackets_of_kim2021_are_their_formulas(tokens, head_dim):
    """Theorem 3.2 with c e^(c + 1) = N - 1, so c = W((N - 1) / e), W from scipy."""
    c = lambertw((tokens - 1) / math.e).real
    assert kim_bracket(tokens, norm="inf", head_dim=head_dim) == pytest.approx(
        4 * c + head_dim**-0.5, rel=1e-9
    )
    expected = math.sqrt(tokens / head_dim) * (4 * c + 1)
    assert kim_bracket(tokens, norm=2, head_dim=head_dim) == pytest.approx(expected, rel=1e-9)


def test_alibi_sums_term_by_term():
    """c, colP and colT of every slope, against the sums carried far beyond where they are cut."""
    for slope, sides in ((0.05, 1), (0.3, 2), (2.0, 1), (8.0, 2)):
        found = l2_constants_alibi(slope, is_causal=sides == 1)
        weights = [math.exp(-slope * k) for k in range(1, 4000) if slope * k < 700]
        moments = [float(lambertw(weight / math.e).real) for weight in weights]
        assert found.c == pytest.approx(
            float(lambertw(sides * math.fsum(weights) / math.e).real), rel=1e-10
        )
        assert found.column_mass == pytest.approx(
            1 + sides * math.fsum(w / (1 + w) for w in weights), rel=1e-10
        )
        assert found.column_moment == pytest.approx(sides * math.fsum(moments), rel=1e-10)


def test_weights_of_a_mask_that_is_not_symmetric():
    """c is of the fullest row, colP and colT of the heaviest column, each the worst of its head."""
    weights = torch.rand(2, 4, 4, dtype=torch.float64).tril(-1) * 3 + torch.eye(4)
    found = l2_constants_from_weights(weights)
    others = weights.tril(-1)
    assert found.c == pytest.approx(
        max(float(lambertw(float(row.sum()) / math.e).real) for row in others.flatten(0, 1))
    )
    columns = others.mT.flatten(0, 1)
    assert found.column_mass == pytest.approx(
        1 + max(math.fsum(float(w / (1 + w)) for w in column) for column in columns)
    )
    moments = [
        math.fsum(float(lambertw(float(w) / math.e).real) for w in column) for column in columns
    ]
    assert found.column_moment == pytest.approx(max(moments))
    for bad in (torch.ones(3), torch.ones(2, 3), torch.ones(4, 2, 3)):
        with pytest.raises(ShapeError, match=r"expected \(\.\.\., N, N\)"):
            l2_constants_from_weights(bad)
