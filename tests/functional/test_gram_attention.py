"""gram_attention: against the formula in float64, both ways of computing it, and its Lipschitz
constant."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from wellposed.errors import ShapeError
from wellposed.functional import gram_attention

D = 6
Shape = tuple[int, ...]


def orthogonal(*shape: int) -> Tensor:
    return torch.linalg.qr(torch.randn(*shape, D, D, dtype=torch.float64))[0]


def reference(x: Tensor, u: Tensor, v: Tensor, sigma: Tensor) -> Tensor:
    out = torch.empty_like(x)
    for b in range(x.shape[0]):
        for t in range(x.shape[1]):
            s = sigma if sigma.dim() == 1 else sigma[b] if sigma.dim() == 2 else sigma[b, t]
            z = x[b, t] @ u @ torch.diag(s) @ v
            out[b, t] = torch.where(z > 0, z, z.exp() - 1)
    return out


@pytest.mark.parametrize("folded", [None, True, False])
@pytest.mark.parametrize("kind", ["shared", "sample"])
@pytest.mark.parametrize("tokens", [3, 9])
def test_formula(kind: str, folded: bool | None, tokens: int) -> None:
    torch.manual_seed(0)
    x, u, v = torch.randn(2, tokens, D, dtype=torch.float64), orthogonal(), orthogonal()
    sigma = torch.rand((D,) if kind == "shared" else (2, D), dtype=torch.float64)
    torch.testing.assert_close(
        gram_attention(x, u, v, sigma, folded=folded), reference(x, u, v, sigma), rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("shape", [(D,), (2, D), (2, 4, D)])
@pytest.mark.parametrize("folded", [True, False])
def test_experts_are_single_attentions(shape: tuple[int, ...], folded: bool) -> None:
    torch.manual_seed(1)
    x, u, v = torch.randn(2, 4, D, dtype=torch.float64), orthogonal(3), orthogonal(3)
    sigma = torch.rand(shape, dtype=torch.float64)
    if folded and len(shape) == 3:
        with pytest.raises(ShapeError, match="cannot be folded"):
            gram_attention(x, u, v, sigma, folded=True)
        return
    together = gram_attention(x, u, v, sigma, folded=folded)
    for e in range(3):
        torch.testing.assert_close(together[e], reference(x, u[e], v[e], sigma), rtol=0, atol=1e-13)


def test_both_ways_agree_to_rounding_in_float32_with_gradients() -> None:
    torch.manual_seed(2)
    x, sigma = torch.randn(2, 50, 32), torch.rand(2, 32)
    u, v = (torch.linalg.qr(torch.randn(32, 32))[0].requires_grad_() for _ in range(2))
    found = []
    for folded in (True, False):
        out = gram_attention(x, u, v, sigma, folded=folded)
        found.append((out, *torch.autograd.grad(out.square().sum(), (u, v))))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(
            one, other, rtol=1e-4, atol=1e-4 * float(other.detach().abs().max())
        )


def test_never_stretches() -> None:
    torch.manual_seed(3)
    x, u, v = torch.randn(2, 40, D, dtype=torch.float64) * 5, orthogonal(), orthogonal()
    y = gram_attention(x, u, v, torch.rand(2, D, dtype=torch.float64) * 2 - 1)
    before, after = (torch.cdist(z, z, compute_mode="donot_use_mm_for_euclid_dist") for z in (x, y))
    assert (after <= before * (1 + 1e-12) + 1e-12).all()


@pytest.mark.parametrize(
    ("x", "left", "right", "sigma"),
    [
        ((4, D), (D, D), (D, D), (D,)),
        ((2, 4, D), (D, 5), (D, D), (D,)),
        ((2, 4, D), (3, D, D), (D, D), (D,)),
        ((2, 4, D), (D, D), (D, D), (3, D)),
        ((2, 4, D), (D, D), (D, D), (2, 3, D)),
    ],
)
def test_wrong_shapes(
    x: tuple[int, ...], left: tuple[int, ...], right: tuple[int, ...], sigma: tuple[int, ...]
) -> None:
    with pytest.raises(ShapeError, match="expected x"):
        gram_attention(torch.zeros(x), torch.zeros(left), torch.zeros(right), torch.zeros(sigma))
