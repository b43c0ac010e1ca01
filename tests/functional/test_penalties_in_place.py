"""The penalty whose gradient is added in place: value and gradient as autograd takes them from the
formula."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from wellposed.functional.penalties import accumulate_gram_penalty_

STACKS = {
    "square": [(4, 4)],
    "tall": [(6, 4)],
    "wide": [(2, 4)],
    "tall stack": [(3, 4), (2, 4)],
    "wide stack": [(1, 4), (2, 4)],
}


def formula(weights: list[Tensor], squared: bool, side: str) -> Tensor:
    stack = torch.cat(weights)
    stack = stack if side == "columns" else stack.T
    norm = (stack.T @ stack - torch.eye(stack.shape[1], dtype=stack.dtype)).square().sum()
    return norm if squared else norm.sqrt()


@pytest.mark.parametrize("name", list(STACKS))
@pytest.mark.parametrize(
    ("squared", "side"), list(itertools.product((True, False), ("columns", "rows")))
)
def test_value_and_gradient_are_those_of_the_formula(name: str, squared: bool, side: str) -> None:
    weights = [
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in STACKS[name]
    ]
    expected = 0.3 * formula(weights, squared, side)
    slopes = torch.autograd.grad(expected, weights)
    before = [torch.randn(shape, dtype=torch.float64) for shape in STACKS[name]]
    added = [start.clone() for start in before]
    value = accumulate_gram_penalty_(
        weights, added, strength=0.3, squared=squared, side=side, gram_dtype=None
    )
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    for start, found, slope in zip(before, added, slopes, strict=True):
        torch.testing.assert_close(found - start, slope, rtol=1e-11, atol=1e-11)
    # The last weight frozen: its gradient is None, and the others get theirs.
    again: list[Tensor | None] = [torch.zeros_like(weight) for weight in weights[:-1]]
    accumulate_gram_penalty_(
        weights, [*again, None], strength=0.3, squared=squared, side=side, gram_dtype=None
    )
    for found, slope in zip(again, slopes, strict=False):
        torch.testing.assert_close(found, slope, rtol=1e-11, atol=1e-11)


def test_the_norm_has_no_gradient_at_an_orthogonal_weight_and_the_wide_one_its_constant() -> None:
    gradient = torch.zeros(3, 3)
    value = accumulate_gram_penalty_(
        [torch.eye(3)], [gradient], strength=2.0, squared=False, side="columns", gram_dtype=None
    )
    assert value == 0
    assert torch.equal(gradient, torch.zeros(3, 3))
    for squared, expected in ((True, 2.0 * 4), (False, 2.0 * 2)):
        wide = accumulate_gram_penalty_(
            [torch.eye(3, 7)],
            [None],
            strength=2.0,
            squared=squared,
            side="columns",
            gram_dtype=None,
        )
        assert wide == expected


@pytest.mark.parametrize("shapes", [[(6, 4)], [(2, 4)], [(1, 4), (2, 4)]], ids=str)
def test_dtypes_of_products_weights_and_gradients(shapes: list[tuple[int, int]]) -> None:
    """Products in bfloat16 are within its rounding; gradients of bfloat16 weights are rounded to it
    once."""
    exact = [torch.randn(shape).bfloat16().double().requires_grad_() for shape in shapes]
    value = formula(exact, True, "columns")
    slopes = torch.autograd.grad(value, exact)
    size = float(torch.cat(list(slopes)).abs().max())
    cases = (
        (torch.float32, None, 1e-6),
        (torch.bfloat16, None, 2.0**-8),
        (torch.float32, torch.bfloat16, 2.0**-4),
    )
    for dtype, products, tolerance in cases:
        weights = [weight.detach().to(dtype) for weight in exact]
        gradients = [torch.zeros_like(weight) for weight in weights]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = accumulate_gram_penalty_(
                weights, gradients, strength=1.0, squared=True, side="columns", gram_dtype=products
            )
        assert found.dtype == torch.float32
        assert float(found) == pytest.approx(
            value.item(), rel=max(tolerance, 1e-5) if products else 1e-5
        )
        for gradient, slope in zip(gradients, slopes, strict=True):
            assert gradient.dtype == dtype
            assert float((gradient.double() - slope).abs().max()) <= tolerance * size
