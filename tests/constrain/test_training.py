"""Constrained weights in a training loop: resuming, accumulation, clipping, closures, weight decay,
compilation."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from tests.support.constrained import NAMES, WIDTH, Mixed, errors, problem, train
from torch import Tensor, nn
from torch.optim import Optimizer

from wellposed.constrain import ConstraintWarning, constrain_
from wellposed.errors import ConvergenceError


def test_moments_from_before_attaching_restart_and_that_is_said() -> None:
    model = Mixed()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    train(model, optimizer, 3)
    fresh = copy.deepcopy(model)
    handle = constrain_(model, optimizer, where="square")
    new = torch.optim.AdamW(fresh.parameters(), lr=1e-2, weight_decay=0.0)
    constrain_(fresh, new, where="square")
    with pytest.warns(ConstraintWarning, match="other coordinates"):
        train(model, optimizer, 1)
    train(fresh, new, 1)
    assert torch.equal(model.square.weight, fresh.square.weight)
    assert handle.error().worst <= 1e-5


def test_accumulated_gradients_are_the_gradients_of_the_sum() -> None:
    weights = []
    x, y = problem()
    for parts in (1, 4):
        torch.manual_seed(0)
        model = Mixed().double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        constrain_(model, optimizer, where=NAMES)
        for _ in range(3):
            optimizer.zero_grad()
            for a, b in zip(x.double().chunk(parts), y.double().chunk(parts), strict=True):
                (nn.functional.mse_loss(model(a), b) / parts).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
        assert max(errors(model).values()) <= 1e-11
        weights.append(model.state_dict())
    assert all(
        torch.allclose(weights[0][name], weights[1][name], atol=1e-10) for name in weights[0]
    )


def test_clipping_limits_the_step_that_is_taken() -> None:
    model = Mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    constrain_(model, optimizer, where="square")
    before = model.square.weight.detach().clone()
    model.square.weight.grad = 1e3 * torch.randn(WIDTH, WIDTH)
    nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
    optimizer.step()
    moved = float((model.square.weight.detach() - before).norm())
    assert 1e-3 < moved <= 1e-2 * (1 + 1e-3)


def test_a_closure_is_projected_after_it_ran() -> None:
    x, y = problem()
    results = []
    for positional in (None, True, False):
        torch.manual_seed(0)
        model = Mixed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        constrain_(model, optimizer, where=NAMES)

        def closure(model: Mixed = model, optimizer: Optimizer = optimizer) -> float:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            return float(loss.detach())

        for _ in range(3):
            if positional is None:
                closure()
                optimizer.step()
            elif positional:
                optimizer.step(closure)
            else:
                optimizer.step(closure=closure)
        results.append(model.state_dict())
    assert all(
        torch.equal(results[0][name], other[name]) for other in results[1:] for name in other
    )


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_ignored_weight_decay_is_exactly_no_weight_decay(kind: str) -> None:
    results = []
    for decay in (0.0, 0.3):
        torch.manual_seed(0)
        model = Mixed().double()
        chosen = [getattr(model, name).weight for name in NAMES]
        if kind == "adamw":
            optimizer: Optimizer = torch.optim.AdamW(chosen, lr=1e-2, weight_decay=decay)
        else:
            optimizer = torch.optim.SGD(chosen, lr=0.1, momentum=0.9, weight_decay=decay)
        constrain_(model, optimizer, where=NAMES, weight_decay="ignore")
        train(model, optimizer, 10)
        results.append(model.state_dict())
    assert all(
        torch.allclose(results[0][name], results[1][name], atol=1e-12) for name in results[0]
    )


def test_two_optimizers_share_the_weights() -> None:
    model = Mixed()
    matrices = [model.square.weight, model.tall.weight]
    rest = [p for p in model.parameters() if not any(p is q for q in matrices)]
    muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.0)
    adamw = torch.optim.AdamW(rest, lr=1e-2, weight_decay=0.0)
    handle = constrain_(model, [muon, adamw], where=NAMES)
    x, y = problem()
    for _ in range(10):
        nn.functional.mse_loss(model(x), y).backward()
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
    assert max(errors(model).values()) <= 1e-5
    handle.remove()
    assert not muon._optimizer_step_pre_hooks
    assert not adamw._optimizer_step_post_hooks


def test_compiled_model_trains_to_the_same_losses() -> None:
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = Mixed()
        runs = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        handle = constrain_(runs, optimizer, where=NAMES)
        assert handle.paths == ("square.weight", "tall.weight", "wide.weight")
        losses.append(train(runs, optimizer, 5))
        assert max(errors(model).values()) <= 1e-5
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("gain", [1.0, 0.5])
def test_batched_products_give_the_same_training(gain: float) -> None:
    """The batch is what accelerators use; two weights of each shape, and one that its twin cannot
    be batched with."""

    def run(*, batched: bool) -> tuple[list[float], Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(
            *[nn.Linear(*s) for s in [(8, 8), (8, 8), (8, 12), (12, 8), (8, 12), (12, 3)]]
        ).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        handle = constrain_(
            model, optimizer, where=[str(index) for index in range(5)], gain=gain, batched=batched
        )
        losses = train(model, optimizer, 20, width=8)
        assert handle.error().worst <= 1e-11
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, math.nan)
        with pytest.raises(ConvergenceError, match=r"0\.weight(.|\n)*1\.weight(.|\n)*4\.weight"):
            optimizer.step()
        return losses, model.get_parameter("0.weight").detach()

    looped, batched = run(batched=False), run(batched=True)
    assert batched[0] == pytest.approx(looped[0], rel=1e-9)
    assert torch.allclose(batched[1], looped[1])


class Breaks(torch.optim.AdamW):
    """Raises in its step while it is told to."""

    broken = False

    def step(self, closure: Any = None) -> Any:
        if self.broken:
            raise RuntimeError("out of memory")
        return super().step(closure)


CASES = [(torch.float32, 0.0), (torch.float32, 0.1), (torch.bfloat16, 0.0), (torch.bfloat16, 0.1)]


@pytest.mark.parametrize("how", ["remove", "next step"])
@pytest.mark.parametrize(("dtype", "decay"), CASES, ids=str)
@pytest.mark.parametrize("shape", [(5, 5), (7, 4)])
def test_weights_come_back_from_a_step_that_broke(
    shape: tuple[int, int], dtype: torch.dtype, decay: float, how: str
) -> None:
    layer = nn.Linear(shape[1], shape[0], bias=False, dtype=dtype)
    optimizer = Breaks(layer.parameters(), lr=1e-3, weight_decay=decay)
    handle = constrain_(nn.Sequential(layer), optimizer, where="0", weight_decay="ignore")
    for _ in range(2):
        layer.weight.grad = torch.randn_like(layer.weight)
        optimizer.step()
    before = layer.weight.detach().clone()
    optimizer.broken = True
    layer.weight.grad = torch.randn_like(layer.weight)
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    optimizer.broken = False
    # Decay, and half precision, are kept out of a step by a weight of zero while the optimizer
    # steps.
    assert bool((layer.weight == 0).all()) == (decay > 0 or dtype == torch.bfloat16)
    if how == "remove":
        handle.remove()
        assert torch.equal(layer.weight, before)
        return
    layer.weight.grad = torch.zeros_like(layer.weight)
    optimizer.step()
    assert float((layer.weight - before).detach().float().abs().max()) <= 0.02
    assert handle.error().worst <= (8e-3 if dtype == torch.bfloat16 else 1e-5)
