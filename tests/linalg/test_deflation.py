"""Deflation against singular values in float64: inside, near the exact cap, or not touched."""

import math

import pytest
import torch

from wellposed.errors import ConvergenceError
from wellposed.linalg import can_deflate, cap_spectral_norm_, deflate_, start_vectors


def shaped(values, rows, dtype):
    generator = torch.Generator().manual_seed(len(values))

    def frame(size):
        noise = torch.randn(size, len(values), generator=generator, dtype=torch.float64)
        return torch.linalg.qr(noise)[0]

    return ((frame(rows) * values) @ frame(len(values)).T).to(dtype)


def decaying(columns, top):
    return top * torch.arange(1, columns + 1, dtype=torch.float64) ** -0.3


def few_above(columns, top):
    values = torch.linspace(0.9, 0.1, columns, dtype=torch.float64)
    values[:10] = torch.linspace(top, 1.0, 10)
    return values


def crowded(columns, top):
    """Many values just below the bound, and some above it."""
    values = torch.full((columns,), 0.97, dtype=torch.float64)
    values[:8] = top
    return values


SPECTRA = {"decaying": decaying, "few above": few_above, "crowded": crowded}
SHAPES = [(128, 128), (300, 200), (160, 400)]


def settled(weight, bound=1.0, times=30):
    """Vectors as some steps leave them, of a weight that is not changed by them."""
    vectors = start_vectors(weight)
    for _ in range(times):
        vectors = deflate_(weight.clone(), vectors, bound=bound).vectors
    return vectors


@pytest.mark.parametrize("spectrum", SPECTRA)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("bound", "top"), [(1.0, 1.01), (0.3, 1.05), (7.0, 1.5)])
def test_the_result_is_inside_and_near_the_exact_cap(spectrum, shape, dtype, bound, top):
    tall = max(shape), min(shape)
    weight = bound * shaped(SPECTRA[spectrum](tall[1], top), tall[0], dtype)
    weight = weight if shape == tall else weight.T.contiguous()
    before = weight.double()
    done = deflate_(weight, settled(weight, bound), bound=bound)

    left, values, right = torch.linalg.svd(before, full_matrices=False)
    nearest = (left * values.clamp_max(bound)) @ right
    assert torch.linalg.matrix_norm(weight.double(), 2) <= bound
    assert values[0] <= done.before <= bound * (1.01 + 6 * (top - 1.0))

    # The projection onto a ball is the nearest point, so a proved result that moved little is near it.
    short = 0.005 * bound
    excess = (values - bound).clamp_min(0.0)
    reach = ((excess + short).square() - excess.square())[values > bound - short].sum().sqrt()
    assert torch.linalg.matrix_norm(weight.double() - nearest) <= 1.5 * reach + short
    assert torch.linalg.matrix_norm(weight.double() - nearest, 2) <= 2 * short


def test_it_is_nearer_to_the_exact_cap_than_the_polynomial():
    weight = shaped(few_above(256, 1.05), 256, torch.float32)
    left, values, right = torch.linalg.svd(weight.double())
    nearest = (left * values.clamp_max(1.0)) @ right
    bent = weight.clone()
    assert cap_spectral_norm_(bent).method == "polynomial"
    assert deflate_(weight, settled(weight)).before < math.inf
    far, near = (torch.linalg.matrix_norm(w.double() - nearest, 2) for w in (bent, weight))
    assert near < 0.2 * far


def test_a_weight_that_is_inside_is_not_touched():
    weight = shaped(few_above(160, 0.98).clamp_max(0.98), 160, torch.float32)
    before = weight.clone()
    assert deflate_(weight, start_vectors(weight)).before <= 1.0
    assert torch.equal(weight, before)


def test_many_above_the_bound_are_left_to_a_polynomial():
    values = torch.linspace(0.9, 0.1, 160, dtype=torch.float64)
    values[:30] = 1.02
    refused(shaped(values, 160, torch.float32))


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_what_is_not_finite_or_far_outside_is_not_touched(bad):
    weight = shaped(decaying(160, 1.1), 160, torch.float32)
    vectors = settled(weight)
    weight[3, 4] = bad
    refused(weight, vectors)


def test_vectors_of_another_matrix_end_without_a_proof():
    """Without a part in the largest singular vector, no number of products finds it."""
    weight = torch.diag(decaying(160, 0.8).float())
    weight[0, 0] = 1.02
    vectors = start_vectors(weight)
    vectors[0] = 0.0
    refused(weight, vectors)


def refused(weight, vectors=None):
    before = weight.clone()
    done = deflate_(weight, start_vectors(weight) if vectors is None else vectors)
    assert done.before == math.inf
    torch.testing.assert_close(weight, before, rtol=0, atol=0, equal_nan=True)


def test_which_matrices_are_taken():
    assert can_deflate(torch.empty(256, 128), 1.0)
    assert not can_deflate(torch.empty(256, 64), 1.0)
    assert not can_deflate(torch.empty(256, 256, dtype=torch.bfloat16), 1.0)
    assert not can_deflate(torch.empty(256, 256), 1e-9)


def test_after_a_refusal_the_cap_says_what_is_wrong():
    weight = torch.full((160, 160), math.nan)
    assert deflate_(weight, start_vectors(weight)).before == math.inf
    with pytest.raises(ConvergenceError, match="not finite"):
        cap_spectral_norm_(weight)
