"""`cosine_attention` against explicit float64 sums, and against its Lipschitz bound."""

import math

import pytest
import torch

from wellposed.errors import ConfigError, ShapeError
from wellposed.functional import cosine_attention


def normalized(tokens, eps):
    return tokens / (tokens.norm(dim=-1, keepdim=True) ** 2 + eps) ** 0.5


def reference(query, key, value, *, eps, tau, nu, allowed):
    q, k, v = (normalized(t.double(), eps) for t in (query, key, value))
    return nu * (tau * q @ k.transpose(-1, -2)).masked_fill(~allowed, -math.inf).softmax(-1) @ v


def draw(*shape, seed=0, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64) * size


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("is_causal", [False, True])
def test_matches_reference(dtype, size, is_causal):
    q, k = (draw(2, 2, 6, 4, seed=s, size=size).to(dtype) for s in range(2))
    v = draw(2, 2, 6, 5, seed=2, size=size).to(dtype)
    allowed = torch.ones(6, 6).tril().bool() if is_causal else torch.ones(6, 6).bool()
    options = {"eps": 0.05, "tau": 3.0, "nu": 1.5}
    unit = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9}[dtype]
    actual = cosine_attention(q, k, v, is_causal=is_causal, **options).double()
    expected = reference(q, k, v, allowed=allowed, **options)
    torch.testing.assert_close(actual, expected, atol=1.5 * 30 * unit, rtol=0)


def test_zero_tokens_are_fine():
    zero = torch.zeros(1, 1, 3, 4, requires_grad=True)
    out = cosine_attention(zero, zero, zero)
    out.sum().backward()
    assert torch.equal(out, torch.zeros_like(out))
    assert zero.grad.isfinite().all()


def test_bad_arguments():
    x = draw(1, 1, 3, 4)
    for bad in ({"eps": 0.0}, {"tau": -1.0}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            cosine_attention(x, x, x, **bad)
    with pytest.raises(ShapeError, match="expected"):
        cosine_attention(x, x[..., :2], x)
