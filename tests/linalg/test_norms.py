"""Certified norms are at least the true norm, whatever the scale, shape, dtype or rank, and hardly
above it."""

from __future__ import annotations

import math

import pytest
import torch

from wellposed.errors import ConfigError, NotLipschitzError, ShapeError
from wellposed.linalg import (
    certified_spectral_norm,
    gram_iteration_norm,
    infinity_norm,
    interpolation_norm,
    l2_attention_bound,
    l2_constants,
)

METHODS = ("svd", "cholesky", "gram", "interpolation")
TIGHT = {"svd": 2.1e-6, "cholesky": 2.5e-4, "gram": 0.02}


def _matrices():
    generator = torch.Generator().manual_seed(0)
    for rows, columns in ((1, 1), (3, 7), (7, 3), (40, 40), (230, 260)):
        dense = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        yield dense
        yield dense[:, :1] @ dense[:1]
        yield torch.linalg.qr(dense)[0]
        yield dense * torch.logspace(-8, 8, columns, dtype=torch.float64)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e3, 1e30])
def test_never_below_the_true_norm_and_hardly_above(method, scale):
    for matrix in _matrices():
        true = float(torch.linalg.matrix_norm(matrix * scale, 2))
        bound = float(certified_spectral_norm(matrix * scale, method=method))
        assert bound >= true * (1 - 1e-15)
        assert bound <= true * (1 + TIGHT.get(method, math.inf))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", METHODS)
def test_lower_precision_weights_are_covered(dtype, method):
    for matrix in _matrices():
        stored = (matrix / matrix.abs().max()).to(dtype)
        true = float(torch.linalg.matrix_norm(stored.double(), 2))
        bound = float(certified_spectral_norm(stored, method=method))
        assert bound >= true
        assert method == "interpolation" or bound <= true * 1.06


@pytest.mark.parametrize("method", METHODS)
def test_batches_and_zeros(method):
    batch = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    batch[1, 2] = 0
    bound = certified_spectral_norm(batch, method=method)
    assert bound.shape == (2, 3)
    assert float(bound[1, 2]) <= 1e-150
    each = torch.stack(
        [certified_spectral_norm(m, method=method) for m in batch.flatten(0, 1)]
    ).view(2, 3)
    assert torch.allclose(bound, each, rtol=1e-12)
    assert certified_spectral_norm(torch.zeros(0, 4), method=method) == 0


def test_gram_iteration_shrinks_to_the_norm_and_carries_the_right_gradient():
    matrix = torch.randn(6, 9, dtype=torch.float64, requires_grad=True)
    true = torch.linalg.matrix_norm(matrix, 2)
    values = [float(gram_iteration_norm(matrix.detach(), iterations=k)) for k in (1, 2, 4, 8, 12)]
    assert values == sorted(values, reverse=True)
    assert values[-1] == pytest.approx(true.item(), rel=1e-9)
    (expected,) = torch.autograd.grad(true, matrix)
    (found,) = torch.autograd.grad(gram_iteration_norm(matrix, iterations=12), matrix)
    assert torch.allclose(found, expected, atol=1e-6)


def test_gram_iteration_of_zero_has_a_finite_gradient():
    zero = torch.zeros(4, 3, requires_grad=True)
    gram_iteration_norm(zero).backward()
    assert zero.grad is not None
    assert zero.grad.isfinite().all()


def test_infinity_norm_is_the_row_sum_and_interpolation_bounds():
    matrix = torch.tensor([[1.0, -2.0, 0.5], [0.0, 3.0, 0.0]], dtype=torch.float64)
    assert float(infinity_norm(matrix)) == pytest.approx(3.5, rel=1e-14)
    assert float(infinity_norm(matrix.mT)) == pytest.approx(5.0, rel=1e-14)
    assert float(interpolation_norm(matrix)) == pytest.approx(math.sqrt(3.5 * 5.0), rel=1e-13)


@pytest.mark.parametrize("method", METHODS)
def test_bad_input(method):
    with pytest.raises(NotLipschitzError, match="1 of 6 entries"):
        certified_spectral_norm(
            torch.tensor([[1.0, math.nan, 0.0], [0.0, 0.0, 0.0]]), method=method
        )
    with pytest.raises(ShapeError, match=r"\(5,\)"):
        certified_spectral_norm(torch.zeros(5), method=method)


def test_unknown_method_lists_the_nearest():
    with pytest.raises(ConfigError, match="nearest: svd"):
        certified_spectral_norm(torch.eye(2), method="sdv")


def test_l2_bound_checks_shapes_carries_gradient_and_covers_silent_heads():
    w, r, o = torch.randn(2, 4, 2), torch.randn(2, 2, 2), torch.randn(2, 2, 4)
    with pytest.raises(ShapeError, match=r"\(H, d, d\)"):
        l2_attention_bound(w, r[:1], o, l2_constants(3))
    parameters = [part.clone().requires_grad_() for part in (w, r, o)]
    for norm in ("tok", 2, "inf"):
        value = l2_attention_bound(*parameters, l2_constants(3), norm=norm, method="gram").value
        assert all(g.abs().sum() > 0 for g in torch.autograd.grad(value, parameters))
        exact = l2_attention_bound(w, r, o, l2_constants(3), norm=norm).value
        assert float(value.detach()) >= float(exact) * (1 - 1e-6)
        w_silent = w.clone()
        w_silent[1] = 0
        alone = l2_attention_bound(w[:1], r[:1], o[:1], l2_constants(3), norm=norm).value
        silent = l2_attention_bound(w_silent, r, o, l2_constants(3), norm=norm).value
        assert float(silent) == pytest.approx(float(alone), rel=3e-6)
        assert l2_attention_bound(w * 0, r, o, l2_constants(3), norm=norm).value == 0


def test_wide_l2_bound_chooses_a_scaling_without_trying_all():
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(4, 200, 50, generator=generator) / 14
    r = torch.randn(4, 50, 50, generator=generator) / 7
    o = torch.randn(4, 50, 200, generator=generator) / 14
    for norm in ("tok", 2):
        wide = l2_attention_bound(w, r, o, l2_constants(16), norm=norm, method="cholesky")
        cheap = l2_attention_bound(w, r, o, l2_constants(16), norm=norm, per_head_only=True)
        assert wide.value <= cheap.value


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0), (3, 0, 4), (3, 2, 4, 0), (0, 3, 3)])
def test_empty_matrices_have_norm_zero_in_the_shape_of_their_batch(shape):
    empty = torch.zeros(shape)
    norms = [certified_spectral_norm(empty, method=method) for method in METHODS]
    for norm in (
        *norms,
        infinity_norm(empty),
        interpolation_norm(empty),
        gram_iteration_norm(empty),
    ):
        assert norm.shape == shape[:-2]
        assert not norm.any()
