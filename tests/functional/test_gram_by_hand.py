"""Gram attention token by token, folded or not, and when folding saves work."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from wellposed.errors import ShapeError
from wellposed.functional.gram import folding_pays, gram_attention, per_token, spectrum_fits

B, N, D, E = 2, 3, 4, 5


def sigma_of(kind: str, tokens: int = N) -> Tensor:
    shape = {"one": (D,), "each": (B, D), "shared": (1, D), "token": (B, tokens, D)}[kind]
    return torch.randn(shape, dtype=torch.float64)


@pytest.mark.parametrize("experts", [None, 1, E])
@pytest.mark.parametrize("kind", ["one", "each", "shared", "token"])
@pytest.mark.parametrize("folded", [None, True, False])
@pytest.mark.parametrize("tokens", [1, N, 9])
def test_every_token_of_every_expert(
    experts: int | None, kind: str, folded: bool | None, tokens: int
) -> None:
    x = torch.randn(B, tokens, D, dtype=torch.float64)
    lead = () if experts is None else (experts,)
    left, right = torch.randn(2, *lead, D, D, dtype=torch.float64)
    sigma = sigma_of(kind, tokens)
    if folded and kind == "token":
        with pytest.raises(ShapeError, match="one for each token; it cannot be folded"):
            gram_attention(x, left, right, sigma, folded=folded)
        return
    found = gram_attention(x, left, right, sigma, folded=folded)
    assert found.shape == (*lead, B, tokens, D)
    for expert, b, i in itertools.product(range(experts or 1), range(B), range(tokens)):
        u, v = (left, right) if experts is None else (left[expert], right[expert])
        own = {
            "one": sigma,
            "each": sigma[b % len(sigma)],
            "shared": sigma[0],
            "token": sigma[b % len(sigma)],
        }[kind]
        own = own[i] if kind == "token" else own
        value = (x[b, i] @ u * own) @ v
        expected = torch.where(value > 0, value, value.exp() - 1)
        torch.testing.assert_close(
            found[b, i] if experts is None else found[expert, b, i], expected
        )


def test_folding_pays_where_more_than_d_tokens_share_a_sigma() -> None:
    def pays(batch: int, tokens: int, kind: str) -> bool:
        shape = {"one": (D,), "each": (batch, D), "token": (batch, tokens, D)}[kind]
        return folding_pays(torch.zeros(batch, tokens, D), torch.zeros(shape))

    assert [pays(1, tokens, "one") for tokens in (D, D + 1)] == [False, True]
    assert [pays(2, tokens, "one") for tokens in (2, 3)] == [False, True]
    assert [pays(2, tokens, "each") for tokens in (3, D, D + 1)] == [False, False, True]
    assert not pays(2, 100, "token")


def test_which_spectra_fit() -> None:
    x = torch.zeros(B, N, D)
    assert all(spectrum_fits(x, sigma_of(kind)) for kind in ("one", "each", "shared", "token"))
    for shape in ((N,), (B + 1, D), (B, N), (N, D), (1, N, D), (B, 1, D), (B, N, D, 1), ()):
        assert not spectrum_fits(x, torch.zeros(shape)), shape
    assert not spectrum_fits(x[0], torch.zeros(D))
    assert per_token(torch.zeros(B, D)).shape == (B, 1, D)
    assert per_token(torch.zeros(B, N, D)).shape == (B, N, D)
    assert per_token(torch.zeros(D)).shape == (D,)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((D, D), (D, D + 1)),
        ((D, 3), (D, 3)),
        ((E, D, D), (D, D)),
        ((1, E, D, D),) * 2,
        ((D,), (D,)),
    ],
)
def test_weights_that_do_not_fit(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="gram_attention: received x"):
        gram_attention(torch.zeros(B, N, D), torch.zeros(left), torch.zeros(right), torch.zeros(D))
