"""Every optimizer of torch: within tolerance after fifty steps, on a square, a tall and a wide
weight, or refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.constrained import isometry_error
from torch import nn
from torch.optim import Optimizer

from wellposed.constrain import ConstraintWarning, constrain_
from wellposed.errors import ConfigError

TAKEN: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-1),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "muon": lambda p: torch.optim.Muon(p, lr=2e-2, weight_decay=0.0),
}
SHAPES = [(8, 8), (12, 5), (5, 12)]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-11)], ids=str
)
@pytest.mark.parametrize("kind", TAKEN)
def test_fifty_steps_stay_within_the_tolerance(
    kind: str, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(
        nn.Linear(columns, rows, bias=False, dtype=dtype) for rows, columns in SHAPES
    )
    optimizer = TAKEN[kind](layers.parameters())
    handle = constrain_(layers, optimizer, where=nn.Linear)
    start = [weight.detach().clone() for weight in layers.parameters()]
    goals = [torch.randn(shape, dtype=dtype) for shape in SHAPES]
    with warnings.catch_warnings():
        # Rprop may grow its steps to a turn of a radian, which is said and allowed.
        warnings.simplefilter("ignore", ConstraintWarning)
        for _ in range(50):
            optimizer.zero_grad()
            for weight, goal in zip(layers.parameters(), goals, strict=True):
                (weight - goal).square().sum().backward()
            optimizer.step()
            assert max(isometry_error(weight) for weight in layers.parameters()) <= tolerance
    assert handle.error().worst <= tolerance
    for weight, before in zip(layers.parameters(), start, strict=True):
        assert float((weight.detach() - before).norm()) > 1e-3


@pytest.mark.parametrize("kind", ["LBFGS", "SparseAdam"])
def test_an_optimizer_without_one_step_for_one_gradient_is_refused(kind: str) -> None:
    layer = nn.Linear(4, 4)
    before = layer.weight.detach().clone()
    optimizer = getattr(torch.optim, kind)(list(layer.parameters()))
    with pytest.raises(ConfigError, match=f"{kind} does not take one step from one gradient"):
        constrain_(nn.Sequential(layer), optimizer, where="0")
    assert torch.equal(layer.weight, before)
