"""`cap_spectral_norm_`: never above the bound by a float64 SVD, never far from the nearest,
untouched when inside."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.refusal import each_refused
from torch import Tensor

from wellposed.errors import ConfigError, ConvergenceError, ShapeError
from wellposed.linalg import cap_spectral_norm_, cap_spectral_norms_, certified_spectral_norm

SPECTRA = ("gaussian", "flat", "one above", "decaying", "rank one")


def spectrum(kind: str, size: int) -> Tensor:
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


def largest(weight: Tensor) -> float:
    return float(torch.linalg.svdvals(weight.double())[0])


def matrix(kind: str, shape: tuple[int, int], norm: float) -> tuple[Tensor, Tensor, Tensor]:
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
def test_the_result_is_inside_whatever_came(
    kind: str, shape: tuple[int, int], excess: float, bound: float, dtype: torch.dtype, seed: int
) -> None:
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
@pytest.mark.parametrize("excess", [1.01, 1.1, 2.0])
def test_every_singular_value_goes_where_the_polynomial_or_the_cap_takes_it(
    kind: str, size: int, excess: float
) -> None:
    torch.manual_seed(0)
    left, values, right = matrix(kind, (size, size + 30), excess)
    weight = (left * values) @ right
    cap = cap_spectral_norm_(weight)
    found = torch.linalg.svdvals(weight)
    assert cap.method == ("polynomial" if size > 128 and excess < 1.12 else "exact")
    if cap.method == "exact":
        # float64 hides next to nothing from a proof
        capped = values.clamp(max=1.0)
        assert float((found - capped).abs().max()) <= 1e-5
        assert float(torch.linalg.matrix_norm(weight - (left * capped) @ right, 2)) <= 1e-5
    else:
        # s - a s^9 with the a that takes the proved bound, at most 1.2e-2 (Lanczos' slack) above
        # the truth, to 1.
        strength = (cap.before - 1.0) / cap.before**9
        assert cap.before <= excess * 1.012
        assert float((found - (values - strength * values**9)).abs().max()) <= 1e-4
    # all directions are kept
    turned = left.T @ weight @ right.T
    assert float((turned - torch.diag(turned.diagonal())).abs().max()) <= 1e-9


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(7, 7), (30, 130), (140, 133)])
def test_a_batch_is_what_each_matrix_becomes_by_itself(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    alone = []
    for kind in SPECTRA:
        for excess in (0.2, 0.99, 1.04, 1.3, 1.7, 40.0):
            left, values, right = matrix(kind, shape, excess * 0.7)
            alone.append(((left * values) @ right).to(dtype))
    together = [weight.clone() for weight in alone]
    caps = cap_spectral_norms_(together, bound=0.7)
    methods = ["inside", "exact", "polynomial"][: 3 if min(shape) > 128 else 2]
    assert {cap.method for cap in caps} == set(methods)
    for own, batched, cap in zip(alone, together, caps, strict=True):
        single = cap_spectral_norm_(own, bound=0.7)
        assert single.method == cap.method
        assert single.before == pytest.approx(cap.before, rel=1e-5)
        # A product of n terms of size at most 1 is rounded by n u; half precision rounds once more,
        # to the next number. Lanczos vectors are in float32 for all; their quotient, and so the
        # polynomial, is off by the square of that.
        single_eps = torch.finfo(torch.float32).eps
        u = min(torch.finfo(dtype).eps, single_eps)
        step = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 0.0
        rounding = 8 * min(shape) * u + (min(shape) * single_eps) ** 2
        assert float((own.double() - batched.double()).abs().max()) <= rounding + step
        assert largest(batched) <= 0.7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("excess", [1.01, 1.1, 4.0, 1e4])
@pytest.mark.parametrize("shape", [(20, 20), (7, 90), (140, 133)])
def test_the_nearest_matrix_of_the_set_when_asked_for(
    shape: tuple[int, int], excess: float, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    weights, nearest = [], []
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


def test_a_batch_is_of_one_shape_and_finite_or_untouched() -> None:
    pair = [torch.eye(2), torch.ones(3, 2)]
    shapes = {
        r"torch.float32 \(2, 2\), torch.float32 \(3, 2\)": lambda: cap_spectral_norms_(pair),
        "received none": lambda: cap_spectral_norms_([]),
        "floating matrix": lambda: cap_spectral_norm_(torch.zeros(2, 2, 2)),
        "int64": lambda: cap_spectral_norm_(torch.zeros(2, 2, dtype=torch.int64)),
    }
    each_refused(ShapeError, shapes)
    weights = [2.0 * torch.eye(2), torch.full((2, 2), math.inf)]
    with pytest.raises(ConvergenceError, match="not finite"):
        cap_spectral_norms_(weights)
    assert torch.equal(weights[0], 2.0 * torch.eye(2))


def test_what_is_inside_is_not_touched_and_a_view_is_enough() -> None:
    torch.manual_seed(0)
    whole = torch.randn(30, 12)
    before = whole.clone()
    part = whole[10:20].T
    part /= 1.1 * torch.linalg.matrix_norm(part.double(), 2)
    inside = whole.clone()
    assert cap_spectral_norm_(part).method == "inside"
    assert torch.equal(whole, inside)
    whole[10:20] *= 1.3
    assert cap_spectral_norm_(part).method != "inside"
    assert largest(whole[10:20]) <= 1.0
    assert torch.equal(whole[:10], before[:10])
    assert torch.equal(whole[20:], before[20:])


@pytest.mark.parametrize(
    ("dtype", "large"), [(torch.float64, 1e200), (torch.float32, 1e30), (torch.bfloat16, 1e30)]
)
def test_entries_at_the_ends_of_their_range(dtype: torch.dtype, large: float) -> None:
    torch.manual_seed(0)
    for scale in (large, 1.0 / large):
        weight = (torch.randn(9, 5, dtype=torch.float64) * scale).to(dtype)
        cap_spectral_norm_(weight, bound=1.0)
        assert largest(weight) <= 1.0
        assert bool(torch.isfinite(weight).all())


def test_bad_input() -> None:
    for bound in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match="bound must be above 0"):
            cap_spectral_norm_(torch.eye(2), bound=bound)
    with pytest.raises(ConvergenceError, match="not finite"):
        cap_spectral_norm_(torch.tensor([[1.0, math.nan], [0.0, 1.0]]))
    assert cap_spectral_norm_(torch.zeros(0, 3)).method == "inside"


UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
# The largest singular value that is left, as a share of the bound.
TOP = 1.0 - 3e-6
# Products are summed in pieces of this many terms.
PIECE = 128
# The allowances are this much larger than the worst case, at most.
ROOM = 1.25


def with_values(values: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(len(values) + rows)
    left = torch.linalg.qr(torch.randn(rows, len(values), dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64))[0]
    return ((left * values) @ right).to(dtype)


def longest_sum(terms: int) -> float:
    """Roundings that the sum of so many products may carry when it is made in pieces, one after the
    other."""
    return min(terms, PIECE) + terms / PIECE


@pytest.mark.parametrize("bound", [1.0, 0.5])
@pytest.mark.parametrize(("rows", "columns"), [(140, 140), (260, 200), (500, 300)])
@pytest.mark.parametrize("kind", ["flat", "one above"])
def test_what_is_proved_before_is_a_hundredth_and_the_rounding_of_the_proof_above(
    kind: str, rows: int, columns: int, bound: float
) -> None:
    """Rump (2006): a factor of L I - G hides n u times its trace at most; G hides the rounding of
    its sums."""
    weight = with_values(bound * 1.06 * spectrum(kind, columns), rows, torch.float32)
    values = torch.linalg.svdvals(weight.double()) / bound
    cap = cap_spectral_norm_(weight, bound=bound)
    assert cap.method == "polynomial"
    shift = 1.01 * float(values[0]) ** 2
    trace = float(values.square().sum())
    needed = longest_sum(rows) * trace + columns * max(columns * shift - trace, shift)
    allowed = (cap.before / bound) ** 2 - shift
    # Lanczos in float32 is within 1e-5 of the top; the allowances are some 1e-3.
    unit = UNIT[torch.float32]
    assert needed * unit - 2e-5 <= allowed <= ROOM * needed * unit + 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(140, 140), (260, 200), (500, 300)])
@pytest.mark.parametrize("top", [1.01, 1.06])
def test_the_polynomial_is_as_strong_as_the_rounding_of_its_products_asks_for(
    top: float, rows: int, columns: int, dtype: torch.dtype
) -> None:
    """Every product A B adds at most g |A|_F |B|_F to the errors of its factors, followed by the
    norms as they are."""
    weight = with_values(top * spectrum("flat", columns), rows, dtype)
    before = torch.linalg.svdvals(weight.double())
    length = cap_spectral_norm_(weight).before
    after = torch.linalg.svdvals(weight.double())
    strength = float(((before - after) / before**9).mean())

    unit, g = UNIT[dtype], longest_sum(columns) * UNIT[dtype]
    point = with_values(length * spectrum("flat", columns), rows, torch.float64)
    gram = point.T @ point
    error = longest_sum(rows) * unit * float(point.norm()) ** 2
    for _ in range(2):
        error = 2 * largest(gram) * error + error**2 + g * (float(gram.norm()) + error) ** 2
        gram = gram @ gram
    error = length * error + g * float(point.norm()) * (float(gram.norm()) + error)
    stored = columns / PIECE * unit * float(point.norm())
    least = (length - TOP + stored) / (length**9 - error)
    most = (length - TOP + 15 * stored) / (length**9 - ROOM * error)
    measured = 2e-6 if dtype == torch.float32 else 1e-12
    assert least - measured <= strength <= most + measured


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(12, 5), (90, 90), (300, 40)])
def test_a_matrix_is_left_alone_up_to_the_rounding_of_its_proof(
    rows: int, columns: int, dtype: torch.dtype
) -> None:
    """Flat spectra just below the bound: the proof needs a part of n u below it, and finds it with
    some of that."""
    unit = UNIT[torch.float64 if dtype == torch.float64 else torch.float32]
    hidden = (longest_sum(rows) * columns + columns) * unit
    for share, is_inside in ((6.0, True), (-1.0, False)):
        # In squares: what the proof hides, thrice, so that it is found; or nothing, and 1e-9 over
        # the top.
        square = TOP**2 - share * hidden if is_inside else TOP**2 * (1.0 + 1e-5)
        weight = with_values(math.sqrt(square) * spectrum("flat", columns), rows, torch.float64)
        scale = largest(weight.to(dtype)) / math.sqrt(square)
        weight = (weight / scale).to(dtype) if dtype != torch.bfloat16 else weight.to(dtype)
        bound = largest(weight) / math.sqrt(square)
        cap = cap_spectral_norm_(weight, bound=bound)
        assert (cap.method == "inside") == is_inside
        if is_inside:
            assert cap.before == pytest.approx(TOP * bound, rel=1e-9)


def test_batches_on_an_accelerator_take_the_same_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """There Lanczos runs for a batch at once; here one matrix after the other, unless it is told
    otherwise."""
    kinds = [("flat", 1.05), ("one above", 1.08), ("flat", 1.02), ("one above", 1.4), ("flat", 0.9)]
    weights = [with_values(top * spectrum(kind, 140), 150, torch.float64) for kind, top in kinds]
    own = [weight.clone() for weight in weights]
    expected = cap_spectral_norms_(own)
    monkeypatch.setattr("wellposed.linalg._norms._ONE_BY_ONE", 1000)
    caps = cap_spectral_norms_(weights)
    assert [cap.method for cap in caps] == [*["polynomial"] * 3, "exact", "inside"]
    for cap, other, weight, alone in zip(caps, expected, weights, own, strict=True):
        assert cap.method == other.method
        assert cap.before == pytest.approx(other.before, rel=1e-6)
        assert float((weight - alone).abs().max()) <= 1e-6
