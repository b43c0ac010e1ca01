"""Gram attention token by token, folded or not, when folding saves work, and its Lipschitz constant."""

import itertools

import pytest
import torch

from wellposed.errors import ShapeError
from wellposed.functional import folding_pays, gram_attention

B = 2
N = 3
D = 4
E = 5


def sigma_of(kind, tokens=N):
    shape = {"one": (D,), "each": (B, D), "shared": (1, D), "token": (B, tokens, D)}[kind]
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("experts", [None, 1, E])
@pytest.mark.parametrize("kind", ["one", "each", "shared", "token"])
@pytest.mark.parametrize("folded", [None, True, False])
@pytest.mark.parametrize("tokens", [1, N, 9])
def test_every_token_of_every_expert(experts, kind, folded, tokens):
    x = torch.randn(B, tokens, D, dtype=torch.float64)
    lead = () if experts is None else (experts,)
    left, right = torch.randn(2, *lead, D, D, dtype=torch.float64)
    sigma = sigma_of(kind, tokens)
    if folded and kind == "token":
        with pytest.raises(ShapeError, match="one for each token; it cannot be folded"):
            gram_attention(x, left, right, sigma, folded=folded)
        return
    actual = gram_attention(x, left, right, sigma, folded=folded)
    assert actual.shape == (*lead, B, tokens, D)
    for expert, b, i in itertools.product(range(experts or 1), range(B), range(tokens)):
        u, v = (left, right) if experts is None else (left[expert], right[expert])
        spectrum = sigma if kind == "one" else sigma[b % len(sigma)]
        spectrum = spectrum[i] if kind == "token" else spectrum
        value = (x[b, i] @ u * spectrum) @ v
        expected = torch.where(value > 0, value, value.exp() - 1)
        token = actual[b, i] if experts is None else actual[expert, b, i]
        torch.testing.assert_close(token, expected)


def test_folding_pays_where_more_than_d_tokens_share_a_sigma():
    def pays(batch, tokens, kind):
        shape = {"one": (D,), "each": (batch, D), "token": (batch, tokens, D)}[kind]
        return folding_pays(torch.zeros(batch, tokens, D), torch.zeros(shape))

    assert [pays(1, tokens, "one") for tokens in (D, D + 1)] == [False, True]
    assert [pays(2, tokens, "one") for tokens in (2, 3)] == [False, True]
    assert [pays(2, tokens, "each") for tokens in (3, D, D + 1)] == [False, False, True]
    assert not pays(2, 100, "token")


WIDTH = 6


@pytest.mark.parametrize(
    ("x", "left", "right", "sigma"),
    [
        ((4, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH,)),
        ((2, 4, WIDTH), (WIDTH, 5), (WIDTH, WIDTH), (WIDTH,)),
        ((2, 4, WIDTH), (3, WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH,)),
        ((2, 4, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH), (3, WIDTH)),
        ((2, 4, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH), (2, 3, WIDTH)),
    ],
)
def test_wrong_shapes(x, left, right, sigma):
    with pytest.raises(ShapeError, match="gram_attention: received"):
        gram_attention(torch.zeros(x), torch.zeros(left), torch.zeros(right), torch.zeros(sigma))
