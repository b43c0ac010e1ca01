"""Weight penalties against the formulas spelled out in float64, and their hand-written gradients
against autograd."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from wellposed.errors import ConfigError, ConvergenceError, ShapeError
from wellposed.functional import gram_penalty, orthogonality_error, qr_penalty
from wellposed.functional.orthogonality import orthogonality_errors
from wellposed.functional.penalties import accumulate_gram_penalty_

SHAPES = {"square": (6, 6), "tall": (9, 4), "wide": (4, 9)}


def slow_gram(weight: Tensor, squared: bool = True, side: str = "columns") -> Tensor:
    """|W^T W - I|_F, entry by entry, on the side asked for and no other."""
    weight = weight if side == "columns" else weight.T
    total = weight.new_zeros(())
    for i in range(weight.shape[1]):
        for j in range(weight.shape[1]):
            total = total + ((weight[:, i] * weight[:, j]).sum() - float(i == j)) ** 2
    return total if squared else total.sqrt()


def gradient(function: Callable[[Tensor], Tensor], weight: Tensor) -> Tensor:
    leaf = weight.clone().requires_grad_()
    (function(leaf) * 1.7).backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("side", ["columns", "rows"])
@pytest.mark.parametrize("squared", [True, False])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_gram_penalty_is_the_formula(shape: tuple[int, int], squared: bool, side: str) -> None:
    weight = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(
        gram_penalty(weight, squared=squared, side=side),
        slow_gram(weight, squared, side),
        rtol=1e-12,
        atol=1e-12,
    )
    torch.testing.assert_close(
        gradient(lambda w: gram_penalty(w, squared=squared, side=side), weight),
        gradient(lambda w: slow_gram(w, squared, side), weight),
        rtol=1e-12,
        atol=1e-12,
    )


@pytest.mark.parametrize("rows", [(3, 5), (1, 2), (2, 2)], ids=["tall", "wide", "square"])
def test_a_stack_is_penalised_as_if_concatenated(rows: tuple[int, int]) -> None:
    parts = [torch.randn(count, 4, dtype=torch.float64, requires_grad=True) for count in rows]
    stacked = torch.cat([part.detach() for part in parts]).requires_grad_()
    value = gram_penalty(parts, squared=False)
    value.backward()
    slow_gram(stacked, squared=False).backward()
    torch.testing.assert_close(value, slow_gram(stacked, squared=False), rtol=1e-12, atol=0)
    torch.testing.assert_close(
        torch.cat([part.grad for part in parts]), stacked.grad, rtol=1e-12, atol=1e-12
    )


def test_zero_exactly_at_orthogonal_weights_with_zero_gradient_of_the_norm() -> None:
    eye = torch.eye(5)
    assert gram_penalty(eye).item() == 0
    assert torch.equal(gradient(lambda w: gram_penalty(w, squared=False), eye), torch.zeros(5, 5))
    assert (
        gram_penalty(torch.eye(3, 7)).item() == 4
    )  # a wide weight cannot have orthonormal columns


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_bf16_products_stay_within_bf16_rounding(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    exact, rough = slow_gram(weight.double()), gram_penalty(weight, gram_dtype=torch.bfloat16)
    assert rough.dtype == torch.float32
    gram = weight.double().T @ weight.double()
    rounding = 8 * 2.0**-8 * (gram.norm() ** 2 + 1)  # a few bf16 roundings of every product
    assert abs(rough.item() - exact.item()) <= rounding.item()
    assert rough.item() != pytest.approx(exact.item(), rel=1e-7)  # the option does something


def test_autocast_does_not_lower_the_precision() -> None:
    weight = torch.randn(16, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = gram_penalty(weight)
        by_autocast = gradient(gram_penalty, weight)
    torch.testing.assert_close(inside, gram_penalty(weight), rtol=0, atol=0)
    torch.testing.assert_close(by_autocast, gradient(gram_penalty, weight), rtol=0, atol=0)


def test_bf16_weights_are_computed_in_float32() -> None:
    weight = torch.randn(8, 8).bfloat16()
    assert gram_penalty(weight).dtype == torch.float32
    torch.testing.assert_close(
        gram_penalty(weight), slow_gram(weight.double()).float(), rtol=1e-5, atol=0
    )
    assert gradient(gram_penalty, weight).dtype == torch.bfloat16


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # raised inside torch.compile
def test_compiles_to_the_same_value_and_gradient() -> None:
    weight = torch.randn(6, 4, dtype=torch.float64)
    compiled = torch.compile(gram_penalty, backend="aot_eager")
    torch.testing.assert_close(
        gradient(compiled, weight), gradient(gram_penalty, weight), rtol=1e-12, atol=1e-12
    )


def gram_schmidt(matrix: Tensor) -> Tensor:
    """Modified Gram-Schmidt, column by column, for autograd to differentiate."""
    columns: list[Tensor] = []
    for k in range(matrix.shape[1]):
        column = matrix[:, k]
        for done in columns:
            column = column - done * (done @ column)
        columns.append(column / column.norm())
    return torch.stack(columns, dim=1)


def slow_qr(weight: Tensor, method: str) -> Tensor:
    matrix = weight if weight.shape[0] >= weight.shape[1] else weight.T
    q = gram_schmidt(matrix)
    if method == "householder":  # the same columns up to the signs LAPACK's reflections give
        q = q * torch.sign(torch.linalg.qr(matrix.detach()).R.diagonal())
    return ((q - matrix) ** 2).sum().sqrt()


@pytest.mark.parametrize("method", ["householder", "gram_schmidt"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_qr_penalty_is_the_formula(shape: tuple[int, int], method: str) -> None:
    weight = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(
        qr_penalty(weight, method), slow_qr(weight, method), rtol=1e-10, atol=1e-10
    )
    torch.testing.assert_close(
        gradient(lambda w: qr_penalty(w, method), weight),
        gradient(lambda w: slow_qr(w, method), weight),
        rtol=1e-8,
        atol=1e-9,
    )


def test_orthogonality_error_is_the_largest_off_diagonal_product() -> None:
    weight = torch.randn(5, 7, dtype=torch.float64)
    expected = max(abs(float(weight[i] @ weight[j])) for i in range(5) for j in range(5) if i != j)
    assert orthogonality_error(weight).item() == pytest.approx(expected, rel=1e-12)
    assert orthogonality_error(3 * torch.eye(4)).item() == 0
    assert orthogonality_error(torch.ones(1, 3)).item() == 0


def test_orthogonality_error_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(11, 3)
    whole, scale_free = orthogonality_error(weight), orthogonality_errors(weight).scale_free.item()
    monkeypatch.setattr("wellposed.functional.orthogonality._BLOCK", 4)
    assert torch.equal(orthogonality_error(weight), whole)
    assert orthogonality_errors(weight).scale_free.item() == pytest.approx(scale_free, rel=1e-6)


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 1e3, 1e12])
def test_scale_free_error_is_the_least_over_all_scales(scale: float) -> None:
    """Against a search over scales in float64; the same for every multiple of a weight."""
    weight = torch.randn(5, 7)
    gram = weight.double() @ weight.double().T
    best = min(
        torch.linalg.matrix_norm(gram / s - torch.eye(5)).item()
        for s in torch.linspace(0.05, 30, 20_000).double()
    )
    found = orthogonality_errors(scale * weight).scale_free.item()
    assert found == pytest.approx(best / math.sqrt(5), rel=1e-5)


def test_scale_free_error_of_extremes() -> None:
    orthogonal = torch.linalg.qr(torch.randn(64, 64))[0]
    assert orthogonality_errors(7 * orthogonal).scale_free.item() < 1e-6
    assert orthogonality_errors(torch.ones(4, 6)).scale_free.item() == pytest.approx(
        math.sqrt(3 / 4), rel=1e-6
    )
    assert orthogonality_errors(torch.randn(1, 6)).scale_free.item() < 1e-7
    assert orthogonality_errors(torch.zeros(2, 3)).scale_free.isnan()
    random = orthogonality_errors(
        torch.randn(400, 800)
    )  # sqrt(m / (m + n)), from the moments of normal numbers
    assert random.scale_free.item() == pytest.approx(math.sqrt(1 / 3), rel=0.01)


@pytest.mark.parametrize("function", [gram_penalty, qr_penalty, orthogonality_error])
def test_errors(function: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(ShapeError, match="matrices"):
        function(torch.randn(3))
    with pytest.raises(ConfigError, match="quantised"):
        function(torch.zeros(3, 3, dtype=torch.int8))
    with pytest.raises(ConfigError, match="float16"):
        function(torch.zeros(3, 3, dtype=torch.float16))


def test_errors_of_arguments() -> None:
    with pytest.raises(ShapeError, match=r"\(2, 3\).*\(2, 4\)"):
        gram_penalty([torch.zeros(2, 3), torch.zeros(2, 4)])
    with pytest.raises(ShapeError, match="none"):
        gram_penalty([])
    with pytest.raises(ConfigError, match="side"):
        gram_penalty(torch.eye(2), side="left")
    with pytest.raises(ConfigError, match="method"):
        qr_penalty(torch.eye(2), "givens")
    with pytest.raises(ConvergenceError, match="rank deficient"):
        qr_penalty(torch.zeros(3, 2), "gram_schmidt")
    with pytest.raises(ConvergenceError, match="rank deficient"):
        qr_penalty(torch.zeros(3, 2))


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
