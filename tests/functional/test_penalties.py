"""Weight penalties against the formulas spelled out in float64, and their hand-written gradients
against autograd."""

import math

import pytest
import torch

from wellposed.errors import ConfigError, ConvergenceError, ShapeError
from wellposed.functional import (
    gram_penalties,
    gram_penalty,
    orthogonality_error,
    orthogonality_errors,
    qr_penalty,
)

SHAPES = {"square": (6, 6), "tall": (9, 4), "wide": (4, 9)}


def slow_gram(weight, squared=True, side="columns"):
    """|W^T W - I|_F, entry by entry, on the side asked for and no other."""
    weight = weight if side == "columns" else weight.T
    products = [[(one * other).sum() for one in weight.T] for other in weight.T]
    gram = torch.stack([torch.stack(row) for row in products])
    total = (gram - torch.eye(len(gram))).square().sum()
    return total if squared else total.sqrt()


def gradient(function, weight):
    leaf = weight.clone().requires_grad_()
    (function(leaf) * 1.7).backward()
    assert leaf.grad is not None
    return leaf.grad


def close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def normal(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype).requires_grad_()


def stored(rows, columns):
    """A weight that is stored as (columns, rows), as GPT-2's are."""
    return normal(columns, rows).t().detach().requires_grad_()


def mixed():
    """Several stacks of each kind, in an order that scatters them."""
    experts = normal(3, 6, 4).unbind()
    single = [normal(8, 4), normal(1, 5), stored(8, 4), normal(4, 8), normal(8, 4)]
    single += [
        normal(1, 5),
        stored(8, 4),
        *experts,
        normal(5, 1),
        normal(8, 4, dtype=torch.float32),
    ]
    several = [[normal(4, 4), normal(2, 4)] for _ in range(3)]
    several += [
        [stored(3, 4), stored(9, 4)],
        [normal(1, 4), normal(2, 4)],
        [stored(3, 4), stored(9, 4)],
    ]
    several += [
        [stored(1, 6), stored(2, 6)],
        [stored(1, 6), normal(2, 6)],
        [stored(1, 6), stored(2, 6)],
    ]
    frozen = [[normal(8, 4).detach()], [normal(8, 4), normal(8, 4).detach()]]
    return [[weight] for weight in single] + several + frozen


@pytest.mark.parametrize("entries", [1, 130, 1 << 18])
@pytest.mark.parametrize("side", ["columns", "rows"])
@pytest.mark.parametrize("squared", [True, False])
def test_stacks_of_all_kinds_have_the_values_and_gradients_of_each(
    squared, side, entries, monkeypatch
):
    monkeypatch.setattr("wellposed.functional._penalties._ENTRIES_CPU", entries)
    stacks = mixed()
    options = {"squared": squared, "side": side, "gram_dtype": None}
    actual = list(gram_penalties(stacks, **options))
    stack_indices = [stack_index for some, _ in actual for stack_index in some]
    assert sorted(stack_indices) == list(range(len(stacks)))
    assert (max(len(some) for some, _ in actual) == 1) == (entries == 1)
    factors = torch.rand(len(stacks)).double() + 0.5
    loss = sum((values.double() * factors[some]).sum() for some, values in actual)
    expected = torch.stack(
        [slow_gram(torch.cat([w.double() for w in stack]), squared, side) for stack in stacks]
    )
    values = torch.cat([values.double() for _, values in actual])
    torch.testing.assert_close(values, expected[stack_indices], rtol=1e-6, atol=1e-5)
    leaves = [weight for stack in stacks for weight in stack if weight.requires_grad]
    slopes = torch.autograd.grad((expected * factors).sum(), leaves)
    for leaf, one, other in zip(leaves, torch.autograd.grad(loss, leaves), slopes, strict=True):
        rtol = 1e-5 if leaf.dtype == torch.float32 else 1e-10
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol)


def test_zero_exactly_at_orthogonal_weights_with_zero_gradient_of_the_norm():
    eye = torch.eye(5)
    assert gram_penalty(eye).item() == 0
    assert gram_penalty(math.nan * eye, squared=False).isnan()
    assert torch.equal(gradient(lambda w: gram_penalty(w, squared=False), eye), torch.zeros(5, 5))
    # A wide weight cannot have orthonormal columns.
    assert gram_penalty(torch.eye(3, 7)).item() == 4


# torch.compile raises the warning inside.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_to_the_same_value_and_gradient():
    weight = torch.randn(6, 4, dtype=torch.float64)
    compiled = torch.compile(gram_penalty, backend="aot_eager")
    close(gradient(compiled, weight), gradient(gram_penalty, weight))


def gram_schmidt(matrix):
    """Modified Gram-Schmidt, column by column, for autograd to differentiate."""
    columns = []
    for k in range(matrix.shape[1]):
        column = matrix[:, k]
        for done in columns:
            column = column - done * (done @ column)
        columns.append(column / column.norm())
    return torch.stack(columns, dim=1)


def slow_qr(weight, method):
    matrix = weight if weight.shape[0] >= weight.shape[1] else weight.T
    q = gram_schmidt(matrix)
    if method == "householder":  # the same columns up to the signs LAPACK's reflections give
        q = q * torch.sign(torch.linalg.qr(matrix.detach()).R.diagonal())
    return ((q - matrix) ** 2).sum().sqrt()


@pytest.mark.parametrize("method", ["householder", "gram_schmidt"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_qr_penalty_is_the_formula(shape, method):
    weight = torch.randn(shape, dtype=torch.float64)
    close(qr_penalty(weight, method), slow_qr(weight, method), 1e-10)
    slope, expected = (gradient(lambda w, f=f: f(w, method), weight) for f in (qr_penalty, slow_qr))
    torch.testing.assert_close(slope, expected, rtol=1e-8, atol=1e-9)


def test_orthogonality_error_is_the_largest_off_diagonal_product():
    weight = torch.randn(5, 7, dtype=torch.float64)
    expected = max(abs(float(weight[i] @ weight[j])) for i in range(5) for j in range(5) if i != j)
    assert orthogonality_error(weight).item() == pytest.approx(expected, rel=1e-12)
    assert orthogonality_error(3 * torch.eye(4)).item() == 0
    assert orthogonality_error(torch.ones(1, 3)).item() == 0


def test_orthogonality_error_in_blocks(monkeypatch):
    weight = torch.randn(11, 3)
    raw = orthogonality_error(weight)
    scale_free = orthogonality_errors(weight).scale_free.item()
    monkeypatch.setattr("wellposed.functional._orthogonality._BLOCK", 4)
    assert torch.equal(orthogonality_error(weight), raw)
    assert orthogonality_errors(weight).scale_free.item() == pytest.approx(scale_free, rel=1e-6)


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1.0, 1e3, 1e12])
def test_scale_free_error_is_the_least_over_all_scales(scale):
    """Against a search over scales in float64; the same for every multiple of a weight."""
    weight = torch.randn(5, 7)
    gram = weight.double() @ weight.double().T
    best = min(
        torch.linalg.matrix_norm(gram / s - torch.eye(5)).item()
        for s in torch.linspace(0.05, 30, 20_000).double()
    )
    actual = orthogonality_errors(scale * weight).scale_free.item()
    assert actual == pytest.approx(best / math.sqrt(5), rel=1e-5)


def test_scale_free_error_of_extremes():
    orthogonal = torch.linalg.qr(torch.randn(64, 64))[0]
    assert orthogonality_errors(7 * orthogonal).scale_free.item() < 1e-6
    parallel = orthogonality_errors(torch.ones(4, 6)).scale_free.item()
    assert parallel == pytest.approx(math.sqrt(3 / 4), rel=1e-6)
    assert orthogonality_errors(torch.randn(1, 6)).scale_free.item() < 1e-7
    assert orthogonality_errors(torch.zeros(2, 3)).scale_free.isnan()
    # sqrt(m / (m + n)), from the moments of normal numbers
    random = orthogonality_errors(torch.randn(400, 800))
    assert random.scale_free.item() == pytest.approx(math.sqrt(1 / 3), rel=0.01)


@pytest.mark.parametrize("function", [gram_penalty, qr_penalty, orthogonality_error])
def test_errors(function):
    with pytest.raises(ShapeError, match="matrices"):
        function(torch.randn(3))
    for dtype, message in ((torch.int8, "quantised"), (torch.float16, "float16")):
        with pytest.raises(ConfigError, match=message):
            function(torch.zeros(3, 3, dtype=dtype))


def test_errors_of_arguments():
    uneven = [torch.zeros(2, 3), torch.zeros(2, 4)]
    shapes = {r"\(2, 3\).*\(2, 4\)": lambda: gram_penalty(uneven), "none": lambda: gram_penalty([])}
    for message, call in shapes.items():
        with pytest.raises(ShapeError, match=message):
            call()
    words = {
        "side": lambda: gram_penalty(torch.eye(2), side="left"),
        "method": lambda: qr_penalty(torch.eye(2), "givens"),
    }
    for message, call in words.items():
        with pytest.raises(ConfigError, match=message):
            call()
    for method in ("gram_schmidt", "householder"):
        with pytest.raises(ConvergenceError, match="rank deficient"):
            qr_penalty(torch.zeros(3, 2), method)


@pytest.mark.parametrize("shapes", [[(6, 4)], [(2, 4)], [(1, 4), (2, 4)]], ids=str)
def test_dtypes_of_products_weights_and_gradients(shapes):
    """Products in bfloat16 are within its rounding; gradients of bfloat16 weights are rounded to it
    once; autocast lowers nothing."""
    exact = [torch.randn(shape).bfloat16().double().requires_grad_() for shape in shapes]
    value = slow_gram(torch.cat(exact))
    slopes = torch.autograd.grad(value, exact)
    size = float(torch.cat(list(slopes)).abs().max())
    cases = (
        (torch.float32, None, 1e-6),
        (torch.bfloat16, None, 2.0**-8),
        (torch.float32, torch.bfloat16, 2.0**-4),
    )
    for dtype, products, tolerance in cases:
        weights = [weight.detach().to(dtype).requires_grad_() for weight in exact]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            total = gram_penalty(weights, gram_dtype=products)
            gradients = torch.autograd.grad(total, weights)
        assert total.dtype == torch.float32
        allowed = max(tolerance, 1e-5) if products else 1e-5
        assert float(total.detach()) == pytest.approx(value.item(), rel=allowed)
        for gradient, slope in zip(gradients, slopes, strict=True):
            assert gradient.dtype == dtype
            assert float((gradient.double() - slope).abs().max()) <= tolerance * size
