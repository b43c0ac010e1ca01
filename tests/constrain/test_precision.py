"""Constrained weights in bfloat16, under autocast, and after being spoiled from outside."""

from __future__ import annotations

import math

import pytest
import torch
from tests.support.constrained import (
    NAMES,
    WIDTH,
    Mixed,
    errors,
    held,
    isometry_error,
    problem,
    train,
)
from torch import nn

from wellposed.errors import ConvergenceError


@pytest.mark.parametrize("kind", ["adamw", "muon", "adafactor"])
def test_bfloat16_weights_reach_their_own_tolerance_and_learn(kind: str) -> None:
    model, optimizer, handle = held(kind, model=Mixed().to(torch.bfloat16))
    losses = train(model, optimizer, 40)
    assert max(errors(model).values()) <= 4e-3
    assert losses[-1] < 0.9 * losses[0]
    for weight in handle.weights:
        assert weight.master is not None
        assert isometry_error(weight.master) <= 1e-5
        assert torch.equal(weight.master.to(torch.bfloat16), weight.parameter)


def test_bfloat16_steps_smaller_than_its_spacing_are_kept() -> None:
    model, optimizer, _ = held("adamw", "square", model=Mixed().to(torch.bfloat16), lr=1e-4)
    before = model.square.weight.detach().clone()
    gradient = torch.randn(WIDTH, WIDTH).bfloat16().float()
    for _ in range(200):
        model.square.weight.grad = (before.float() @ (gradient - gradient.T)).bfloat16()
        optimizer.step()
    assert float((model.square.weight.detach() - before).float().norm()) > 0.1


def test_weights_loaded_over_bfloat16_ones_are_taken_up() -> None:
    model, optimizer, _ = held("sgd", "square", model=Mixed().to(torch.bfloat16), lr=1e-3)
    other = torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0].to(torch.bfloat16)
    model.load_state_dict({**model.state_dict(), "square.weight": other})
    train(model, optimizer, 1)
    assert float((model.square.weight.detach() - other).float().abs().max()) < 0.02


def test_autocast_and_low_matmul_precision_do_not_reach_the_retraction() -> None:
    model, optimizer, _ = held("adamw", model=Mixed(64), lr=1e-3)
    before = torch.backends.mkldnn.matmul.fp32_precision
    try:
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
        x, y = problem(64)
        for _ in range(20):
            with torch.autocast("cpu", torch.bfloat16):
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x).float(), y).backward()
                optimizer.step()
        assert torch.backends.mkldnn.matmul.fp32_precision == "bf16"
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before
    assert max(isometry_error(getattr(model, name).weight) for name in ("square", "wide")) <= 1e-5


def test_a_step_that_is_not_finite_is_named_and_square_weights_stay() -> None:
    model, optimizer, _ = held()
    before = model.square.weight.detach().clone()
    for name in NAMES:
        getattr(model, name).weight.grad = torch.full_like(getattr(model, name).weight, math.nan)
    with pytest.raises(ConvergenceError, match=r"square\.weight(.|\n)*tall\.weight"):
        optimizer.step()
    assert torch.equal(model.square.weight, before)
