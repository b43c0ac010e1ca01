"""What `cap_spectral_norm_` allows for rounding: at least what the worst case needs, and hardly
more than that."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from wellposed.linalg import cap_spectral_norm_, cap_spectral_norms_

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


def spectrum(kind: str, columns: int, top: float) -> Tensor:
    values = torch.full((columns,), top, dtype=torch.float64)
    if kind == "one above":
        values[1:] = 0.3
    return values


@pytest.mark.parametrize("bound", [1.0, 0.5])
@pytest.mark.parametrize(("rows", "columns"), [(140, 140), (260, 200), (500, 300)])
@pytest.mark.parametrize("kind", ["flat", "one above"])
def test_what_is_proved_before_is_a_hundredth_and_the_rounding_of_the_proof_above(
    kind: str, rows: int, columns: int, bound: float
) -> None:
    """Rump (2006): a factor of L I - G hides n u times its trace at most; G hides the rounding of
    its sums."""
    weight = with_values(bound * spectrum(kind, columns, 1.06), rows, torch.float32)
    values = torch.linalg.svdvals(weight.double()) / bound
    cap = cap_spectral_norm_(weight, bound=bound)
    assert cap.method == "polynomial"
    shift = 1.01 * float(values[0]) ** 2
    trace = float(values.square().sum())
    needed = longest_sum(rows) * trace + columns * max(columns * shift - trace, shift)
    allowed = (cap.before / bound) ** 2 - shift
    # Lanczos in float32 is within 1e-5 of the top; the allowances are some 1e-3.
    assert (
        needed * UNIT[torch.float32] - 2e-5 <= allowed <= ROOM * needed * UNIT[torch.float32] + 2e-5
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(140, 140), (260, 200), (500, 300)])
@pytest.mark.parametrize("top", [1.01, 1.06])
def test_the_polynomial_is_as_strong_as_the_rounding_of_its_products_asks_for(
    top: float, rows: int, columns: int, dtype: torch.dtype
) -> None:
    """Every product A B adds at most g |A|_F |B|_F to the errors of its factors, followed by the
    norms as they are."""
    weight = with_values(spectrum("flat", columns, top), rows, dtype)
    before = torch.linalg.svdvals(weight.double())
    length = cap_spectral_norm_(weight).before
    after = torch.linalg.svdvals(weight.double())
    strength = float(((before - after) / before**9).mean())

    unit, g = UNIT[dtype], longest_sum(columns) * UNIT[dtype]
    point = with_values(spectrum("flat", columns, length), rows, torch.float64)
    gram = point.T @ point
    error = longest_sum(rows) * unit * float(point.norm()) ** 2
    for _ in range(2):
        error = 2 * length_of(gram) * error + error**2 + g * (float(gram.norm()) + error) ** 2
        gram = gram @ gram
    error = length * error + g * float(point.norm()) * (float(gram.norm()) + error)
    stored = columns / PIECE * unit * float(point.norm())
    least = (length - TOP + stored) / (length**9 - error)
    most = (length - TOP + 15 * stored) / (length**9 - ROOM * error)
    measured = 2e-6 if dtype == torch.float32 else 1e-12
    assert least - measured <= strength <= most + measured


def length_of(symmetric: Tensor) -> float:
    return float(torch.linalg.eigvalsh(symmetric)[-1])


def test_half_precision_leaves_room_for_the_rounding_when_it_is_stored() -> None:
    weight = with_values(spectrum("flat", 200, 1.06), 260, torch.bfloat16)
    before = torch.linalg.svdvals(weight.double())
    cap = cap_spectral_norm_(weight)
    after = torch.linalg.svdvals(weight.double())
    strength = float((before - after).mean() / (before**9).mean())
    eps = torch.finfo(torch.bfloat16).eps
    assert strength == pytest.approx((cap.before - (TOP - eps)) / cap.before**9, rel=0.05)
    assert strength > 1.08 * (cap.before - TOP) / cap.before**9


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
        weight = with_values(spectrum("flat", columns, math.sqrt(square)), rows, torch.float64)
        scale = float(torch.linalg.svdvals(weight.to(dtype).double())[0]) / math.sqrt(square)
        weight = (weight / scale).to(dtype) if dtype != torch.bfloat16 else weight.to(dtype)
        largest = float(torch.linalg.svdvals(weight.double())[0])
        bound = largest / math.sqrt(square)
        cap = cap_spectral_norm_(weight, bound=bound)
        assert (cap.method == "inside") == is_inside
        if is_inside:
            assert cap.before == pytest.approx(TOP * bound, rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(40, 40), (120, 90), (100, 20)])
def test_capped_values_end_as_far_below_as_rounding_hides(
    rows: int, columns: int, dtype: torch.dtype
) -> None:
    """Flat at twice the bound: all values end alike, below TOP by one and a half to thrice what a
    proof hides."""
    weight = with_values(spectrum("flat", columns, 2.0), rows, dtype)
    assert cap_spectral_norm_(weight).method == "exact"
    after = torch.linalg.svdvals(weight.double())
    unit = UNIT[dtype]
    # In squares: |X|_F^2 = n, and L n - tr G = 0 where all values are equal, so one eigenvalue's
    # share.
    hidden = (longest_sum(rows) * columns + columns) * unit
    room = TOP**2 - after.square()
    rounding = 20 * columns * unit
    assert float(room.min()) >= hidden - rounding
    assert float(room.max()) <= 3 * hidden + 20 * columns * unit + rounding


def test_batches_on_an_accelerator_take_the_same_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """There Lanczos runs for a batch at once; here one matrix after the other, unless it is told
    otherwise."""
    kinds = [("flat", 1.05), ("one above", 1.08), ("flat", 1.02), ("one above", 1.4), ("flat", 0.9)]
    weights = [with_values(spectrum(kind, 140, top), 150, torch.float64) for kind, top in kinds]
    own = [weight.clone() for weight in weights]
    expected = cap_spectral_norms_(own)
    monkeypatch.setattr("wellposed.linalg._norms._ONE_BY_ONE", 1000)
    caps = cap_spectral_norms_(weights)
    assert [cap.method for cap in caps] == [
        "polynomial",
        "polynomial",
        "polynomial",
        "exact",
        "inside",
    ]
    for cap, other, weight, alone in zip(caps, expected, weights, own, strict=True):
        assert cap.method == other.method
        assert cap.before == pytest.approx(other.before, rel=1e-6)
        assert float((weight - alone).abs().max()) <= 1e-6


def test_the_largest_of_many_and_the_last_are_put_where_they_came_from() -> None:
    """Inside, bent, clipped, and too large for float32 in one batch: each ends as it does alone."""
    kinds = [
        ("flat", 0.5),
        ("flat", 1.05),
        ("one above", 3.0),
        ("flat", 1e4),
        ("one above", 1.03),
        ("flat", 0.999),
    ]
    for dtype in (torch.float32, torch.bfloat16):
        weights = [with_values(spectrum(kind, 140, top), 140, dtype) for kind, top in kinds]
        alone = [weight.clone() for weight in weights]
        caps = cap_spectral_norms_(weights)
        assert [cap.method for cap in caps] == [
            cap_spectral_norm_(weight).method for weight in alone
        ]
        for cap, weight, own, (kind, top) in zip(caps, weights, alone, kinds, strict=True):
            assert float((weight.double() - own.double()).abs().max()) <= 4e-3, (kind, top)
            assert float(torch.linalg.svdvals(weight.double())[0]) <= 1.0
            # `before` is a bound of what came: of Frobenius where nothing better was tried.
            largest = float(
                torch.linalg.svdvals(with_values(spectrum(kind, 140, top), 140, dtype).double())[0]
            )
            frobenius = float(spectrum(kind, 140, top).norm()) * (1.0 + 1e-2)
            assert largest <= cap.before <= frobenius
