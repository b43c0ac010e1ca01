"""Weights edited behind the optimizer's back are orthogonal again after one step; halves keep to
their rounding."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from tests.support.constrained import held, isometry_error
from torch import Tensor, nn

from wellposed.constrain import ConstraintWarning, constrain_
from wellposed.errors import ConfigError
from wellposed.linalg import isometry_error as fast_error

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-11, torch.bfloat16: 8e-3}
EDITS: dict[str, Callable[[nn.Linear], object]] = {
    "data.mul_": lambda layer: layer.weight.data.mul_(1.5),
    "one entry of data": lambda layer: layer.weight.data[0, 0].add_(0.01),
    "data =": lambda layer: setattr(layer.weight, "data", layer.weight.data + 1),
    "three entries of data": lambda layer: layer.weight.data.view(-1)[:3].mul_(1.001),
    "load_state_dict": lambda layer: layer.load_state_dict({"weight": 0.5 * layer.weight.detach()}),
}


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(8, 8), (12, 8), (8, 12)], ids=str)
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_noticed_at_the_next_step(
    edit: str, shape: tuple[int, int], dtype: torch.dtype, *, batched: bool
) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(shape[1], shape[0], bias=False, dtype=dtype) for _ in range(2))
    _, optimizer, handle = held("adamw", nn.Linear, model=model, lr=1e-4, batched=batched)

    def step() -> None:
        for weight in model.parameters():
            weight.grad = torch.randn_like(weight)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConstraintWarning)
            optimizer.step()

    for _ in range(3):
        step()
    first = model[0]
    assert isinstance(first, nn.Linear)
    with torch.no_grad():
        EDITS[edit](first)
    step()
    assert max(isometry_error(weight) for weight in model.parameters()) <= TOLERANCE[dtype]
    assert handle.error().worst <= TOLERANCE[dtype]


def test_an_edited_weight_without_a_gradient_is_left_until_it_has_one() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    _, optimizer, handle = held("adamw", nn.Linear, model=model, lr=1e-4)
    model[0].weight.data.mul_(1.5)
    for has_gradient in (False, True):
        model[0].weight.grad = torch.randn(8, 8) if has_gradient else None
        model[1].weight.grad = torch.randn(8, 8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConstraintWarning)
            optimizer.step()
        assert (handle.error().worst <= 1e-5) == has_gradient
    assert "next step in which it has a gradient" in " ".join(str(constrain_.__doc__).split())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(8, 8), (12, 8)], ids=str)
@pytest.mark.parametrize("steps", [0, 1])
def test_a_weight_turned_to_another_dtype_is_named(
    steps: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    layer = nn.Linear(shape[1], shape[0])
    model, optimizer, handle = held("sgd", "0", model=nn.Sequential(layer), lr=1e-2)
    for turn in [torch.float32] * steps + [dtype]:
        model.to(turn).zero_grad()
        model(torch.randn(2, shape[1], dtype=turn)).sum().backward()
        if turn == dtype:
            said = r"(?s)remove\(\).*0\.weight: held as torch.float32, now"
            with pytest.raises(ConfigError, match=said):
                optimizer.step()
        else:
            optimizer.step()
    handle.remove()
    handle = constrain_(model, optimizer, where="0")
    optimizer.step()
    assert handle.error().worst <= TOLERANCE[dtype]


def test_a_weight_left_alone_is_not_measured_anew() -> None:
    model, optimizer, handle = held("adamw", "0", model=nn.Sequential(nn.Linear(8, 8)), lr=1e-4)
    drifts: list[float] = []
    for _ in range(4):
        model[0].weight.grad = torch.randn(8, 8)
        optimizer.step()
        drifts.append(handle.weights[0].drift)
    # The bound of steps that were not measured only grows.
    assert 0 < drifts[0] < drifts[1] < drifts[2] < drifts[3]


def worst_for_bfloat16() -> Tensor:
    """Orthonormal columns of `+-1/sqrt(254)`, which bfloat16 rounds up by nearly half its spacing,
    all of them."""
    columns = torch.ones(254, 2, dtype=torch.float64)
    columns[127:, 1] = -1
    return columns / 254**0.5


def test_half_weights_reach_their_bound_and_no_less() -> None:
    """Each entry moves by a part of at most u = 2^-8, so an entry of W^T W by 2 u + u^2; once 4e-3
    was promised."""
    exact = worst_for_bfloat16()
    assert isometry_error(exact) < 1e-14
    stored = isometry_error(exact.to(torch.bfloat16))
    assert 0.99 * (2 * 2**-8) < stored <= 2 * 2**-8 + 2**-16
    for dtype, bound, unit in ((torch.bfloat16, 8e-3, 2**-8), (torch.float16, 1e-3, 2**-11)):
        assert 2 * unit + unit**2 + 1e-5 <= bound
        torch.manual_seed(0)
        for rows, columns in ((1, 1), (2, 2), (16, 16), (254, 2), (64, 48)):
            weight = torch.linalg.qr(torch.randn(rows, columns, dtype=torch.float64))[0]
            assert float(fast_error(weight.to(dtype))) <= 2 * unit + unit**2


def test_a_bfloat16_weight_at_its_bound_is_within_tolerance_and_stays() -> None:
    layer = nn.Linear(2, 254, bias=False, dtype=torch.bfloat16)
    layer.weight.data.copy_(worst_for_bfloat16())
    before = layer.weight.detach().clone()
    handle = held("sgd", "0", model=nn.Sequential(layer), lr=0.0)[2]
    assert handle.report.rows[0].moved_frobenius == 0.0
    assert torch.equal(layer.weight, before)
    assert 4e-3 < handle.error().worst <= 8e-3
