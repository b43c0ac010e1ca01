"""`cap_spectral_norm_`: never above the bound by a float64 SVD, never far from the nearest,
untouched when inside."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wellposed.errors import ConfigError, ConvergenceError, ShapeError
from wellposed.linalg import cap_spectral_norm_, cap_spectral_norms_, certified_spectral_norm

SPECTRA = ("gaussian", "flat", "one above", "decaying", "rank one")


def spectrum(kind, size):
    if kind == "gaussian":
        values = torch.linalg.svdvals(torch.randn(size, size, dtype=torch.float64))
        return values / values[0]
    values = torch.ones(size, dtype=torch.float64)
    if kind == "one above":
        values[1:] = 0.3
    if kind == "decaying":
        values = 1.0 / torch.arange(1, size + 1, dtype=torch.float64)
    if kind == "rank one":
        values[1:] = 0.0
    return values


def largest(weight):
    return float(torch.linalg.svdvals(weight.double())[0])


def matrix(kind, shape, norm):
    left, _, right = torch.linalg.svd(torch.randn(shape, dtype=torch.float64), full_matrices=False)
    return left, spectrum(kind, min(shape)) * norm, right


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(SPECTRA),
    shape=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    excess=st.one_of(st.floats(0.9, 1.3), st.floats(-3.0, 3.0).map(lambda power: 10.0**power)),
    bound=st.floats(-3.0, 3.0).map(lambda power: 10.0**power),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 99),
)
def test_the_result_is_inside_whatever_came(kind, shape, excess, bound, dtype, seed):
    torch.manual_seed(seed)
    left, values, right = matrix(kind, shape, min(excess * bound, 3e4))
    weight = ((left * values) @ right).to(dtype)
    before = weight.clone()
    cap = cap_spectral_norm_(weight, bound=bound)
    assert largest(weight) <= bound
    assert float(certified_spectral_norm(weight)) <= bound
    assert largest(before) <= cap.before
    is_half = dtype in (torch.bfloat16, torch.float16)
    assert (cap.method == "inside") == torch.equal(weight, before) or is_half


@pytest.mark.parametrize("size", [64, 200])
@pytest.mark.parametrize("kind", SPECTRA)
@pytest.mark.parametrize("excess", [1.01, 1.1, 1.2, 1.34, 1.65, 3.0])
def test_every_singular_value_goes_where_the_polynomial_or_the_cap_takes_it(kind, size, excess):
    left, values, right = matrix(kind, (size, size + 30), excess)
    weight = (left * values) @ right
    cap = cap_spectral_norm_(weight)
    after = torch.linalg.svdvals(weight)
    assert cap.method == ("polynomial" if excess < 2.0 else "exact")
    if cap.method == "exact":
        # float64 hides next to nothing from a proof
        capped = values.clamp(max=1.0)
        assert float((after - capped).abs().max()) <= 1e-5
        assert float(torch.linalg.matrix_norm(weight - (left * capped) @ right, 2)) <= 1e-5
    assert bool((after[:-1] >= after[1:] - 1e-9).all())
    # all directions are kept
    turned = left.T @ weight @ right.T
    assert float((turned - torch.diag(turned.diagonal())).abs().max()) <= 1e-9
    assert float((turned.diagonal() - after).abs().max()) <= 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(7, 7), (30, 130), (140, 133)])
def test_a_batch_is_what_each_matrix_becomes_by_itself(shape, dtype):
    alone = []
    for kind in SPECTRA:
        for excess in (0.2, 0.99, 1.04, 1.3, 1.7, 40.0):
            left, values, right = matrix(kind, shape, excess * 0.7)
            alone.append(((left * values) @ right).to(dtype))
    together = [weight.clone() for weight in alone]
    caps = cap_spectral_norms_(together, bound=0.7)
    assert {cap.method for cap in caps} == {"inside", "exact", "polynomial"}
    for weight, batched, cap in zip(alone, together, caps, strict=True):
        single = cap_spectral_norm_(weight, bound=0.7)
        assert single.method == cap.method
        assert single.before == pytest.approx(cap.before, rel=1e-9)
        # A product of n terms of size at most 1 is rounded by n u; half precision rounds once more,
        # to the next number.
        u = min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
        step = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 0.0
        rounding = 8 * min(shape) * u
        assert float((weight.double() - batched.double()).abs().max()) <= rounding + step
        assert largest(batched) <= 0.7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("excess", [1.01, 1.1, 4.0, 1e4])
@pytest.mark.parametrize("shape", [(20, 20), (7, 90), (140, 133)])
def test_the_nearest_matrix_of_the_set_when_asked_for(shape, excess, dtype):
    weights = []
    nearest = []
    for kind in SPECTRA:
        left, values, right = matrix(kind, shape, excess)
        weights.append(((left * values) @ right).to(dtype))
        nearest.append((left * values.clamp(max=1.0)) @ right)
    came = max(float(weight.abs().max()) for weight in weights)
    caps = cap_spectral_norms_(weights, nearest=True)
    assert {cap.method for cap in caps} == {"exact"}
    for weight, expected in zip(weights, nearest, strict=True):
        assert largest(weight) <= 1.0
        assert largest(weight) >= 1.0 - 5e-6
        rounding = (1.0 + came) * max(shape) * torch.finfo(dtype).eps
        assert float(torch.linalg.matrix_norm(weight.double() - expected, 2)) <= 5e-6 + rounding


def test_a_batch_is_of_one_shape_and_finite_or_untouched():
    pair = [torch.eye(2), torch.ones(3, 2)]
    shapes = {
        r"torch.float32 \(2, 2\), torch.float32 \(3, 2\)": lambda: cap_spectral_norms_(pair),
        "received none": lambda: cap_spectral_norms_([]),
        "floating matrix": lambda: cap_spectral_norm_(torch.zeros(2, 2, 2)),
        "int64": lambda: cap_spectral_norm_(torch.zeros(2, 2, dtype=torch.int64)),
    }
    for message, call in shapes.items():
        with pytest.raises(ShapeError, match=message):
            call()
    weights = [2.0 * torch.eye(2), torch.full((2, 2), math.inf)]
    with pytest.raises(ConvergenceError, match="not finite"):
        cap_spectral_norms_(weights)
    assert torch.equal(weights[0], 2.0 * torch.eye(2))


def test_what_is_inside_is_not_touched_and_a_view_is_enough():
    matrix = torch.randn(30, 12)
    before = matrix.clone()
    part = matrix[10:20].T
    part /= 1.1 * torch.linalg.matrix_norm(part.double(), 2)
    inside = matrix.clone()
    assert cap_spectral_norm_(part).method == "inside"
    assert torch.equal(matrix, inside)
    matrix[10:20] *= 1.3
    assert cap_spectral_norm_(part).method != "inside"
    assert largest(matrix[10:20]) <= 1.0
    assert torch.equal(matrix[:10], before[:10])
    assert torch.equal(matrix[20:], before[20:])


@pytest.mark.parametrize(
    ("dtype", "large"), [(torch.float64, 1e200), (torch.float32, 1e30), (torch.bfloat16, 1e30)]
)
def test_entries_at_the_ends_of_their_range(dtype, large):
    for scale in (large, 1.0 / large):
        weight = (torch.randn(9, 5, dtype=torch.float64) * scale).to(dtype)
        cap_spectral_norm_(weight, bound=1.0)
        assert largest(weight) <= 1.0
        assert bool(torch.isfinite(weight).all())


def test_bad_input():
    for bound in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="bound must be above 0"):
            cap_spectral_norm_(torch.eye(2), bound=bound)
    with pytest.raises(ConvergenceError, match="not finite"):
        cap_spectral_norm_(torch.tensor([[1.0, math.nan], [0.0, 1.0]]))
    assert cap_spectral_norm_(torch.zeros(0, 3)).method == "inside"


def with_values(values, rows, dtype):
    torch.manual_seed(len(values) + rows)
    left = torch.linalg.qr(torch.randn(rows, len(values), dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64))[0]
    return ((left * values) @ right).to(dtype)


@pytest.mark.parametrize("norm", [0.7, 1.003, 1.06, 1.3, 2.5])
def test_where_the_search_begins_changes_nothing(norm):
    weight = with_values(norm * spectrum("flat", 70), 90, torch.float32)
    plain = weight.clone()
    cap = cap_spectral_norm_(plain, bound=0.9)
    for hint in (0.0, 0.5, 0.9, 1.0, 1.3, 2.0, math.inf):
        again = weight.clone()
        assert cap_spectral_norms_([again], bound=0.9, before=[hint]) == [cap]
        assert torch.equal(again, plain)
