"""L2 attention far from one: kept from an attack that it withstood."""

from __future__ import annotations

import pytest
import torch

from wellposed.functional import l2_attention


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-19, 1e-5, 1e5, 1e12, 1e17])
def test_float32_follows_float64_at_every_size_of_tokens(size: float, is_causal: bool) -> None:
    tokens = torch.randn(2, 3, 9, 8, generator=torch.Generator().manual_seed(0)) * size
    exact = tokens.double()
    logits = -(exact[..., :, None, :] - exact[..., None, :, :]).square().sum(-1) / 8**0.5
    if is_causal:
        logits = logits.masked_fill(~torch.ones(9, 9).tril().bool(), -torch.inf)
    expected = logits.softmax(-1) @ exact
    found = l2_attention(tokens, tokens, tokens, is_causal=is_causal).double()
    # Logits of order one or far from it: then their rounding moves no weight, and values are
    # averaged in float32.
    assert (found - expected).abs().max() <= 64 * 2.0**-24 * size * 4
