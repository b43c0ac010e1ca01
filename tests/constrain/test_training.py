"""Constrained weights in a training loop: any precision, resuming, closures, decay, edits by hand."""

import math
import warnings

import pytest
import torch
from tests.support.constrained import (
    NAMES,
    WIDTH,
    Mixed,
    constrained,
    errors,
    isometry_error,
    problem,
    same_state,
    train,
)
from torch import nn

from wellposed.constrain import ConstraintWarning, constrain_
from wellposed.errors import ConfigError, ConvergenceError


def test_a_closure_is_projected_after_it_ran():
    x, y = problem()
    results = []
    for way in ("before", "positional", "keyword"):
        torch.manual_seed(0)
        model, optimizer, _ = constrained("momentum")

        def closure(model=model, optimizer=optimizer):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            return float(loss.detach())

        for _ in range(3):
            if way == "before":
                closure()
            calls = {"positional": ((closure,), {}), "keyword": ((), {"closure": closure})}
            args, keywords = calls.get(way, ((), {}))
            optimizer.step(*args, **keywords)
        results.append(model.state_dict())
    assert all(same_state(results[0], other) for other in results[1:])


def test_two_optimizers_share_the_weights():
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


def test_compiled_model_trains_to_the_same_losses():
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
def test_batched_products_give_the_same_training(gain):
    """The batch is what accelerators use; two weights of each shape, and one that its twin cannot be batched with."""

    def run(*, batched):
        torch.manual_seed(0)
        sizes = [(8, 8), (8, 8), (8, 12), (12, 8), (8, 12), (12, 3)]
        model = nn.Sequential(*[nn.Linear(*size) for size in sizes]).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
        where = [str(index) for index in range(5)]
        handle = constrain_(model, optimizer, where=where, gain=gain, batched=batched)
        losses = train(model, optimizer, 20, width=8)
        assert handle.error().worst <= 1e-11
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, math.nan)
        with pytest.raises(ConvergenceError, match=r"0\.weight(.|\n)*1\.weight(.|\n)*4\.weight"):
            optimizer.step()
        return losses, model.get_parameter("0.weight").detach()

    looped = run(batched=False)
    batched = run(batched=True)
    assert batched[0] == pytest.approx(looped[0], rel=1e-9)
    assert torch.allclose(batched[1], looped[1])


class Breaks(torch.optim.AdamW):
    """Raises in its step while it is told to."""

    broken = False

    def step(self, closure=None):
        if self.broken:
            raise RuntimeError("out of memory")
        return super().step(closure)


CASES = [(torch.float32, 0.0), (torch.float32, 0.1), (torch.bfloat16, 0.0), (torch.bfloat16, 0.1)]


@pytest.mark.parametrize("ending", ["remove", "next step"])
@pytest.mark.parametrize(("dtype", "decay"), CASES, ids=str)
@pytest.mark.parametrize("shape", [(5, 5), (7, 4)])
def test_weights_come_back_from_a_step_that_broke(shape, dtype, decay, ending):
    layer = nn.Linear(shape[1], shape[0], bias=False, dtype=dtype)
    optimizer = Breaks(layer.parameters(), lr=1e-3, weight_decay=decay)
    handle = constrain_(nn.Sequential(layer), optimizer, where="0")
    for _ in range(2):
        layer.weight.grad = torch.randn_like(layer.weight)
        optimizer.step()
    before = layer.weight.detach().clone()
    optimizer.broken = True
    layer.weight.grad = torch.randn_like(layer.weight)
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    optimizer.broken = False
    assert torch.equal(layer.weight, before)
    if ending == "remove":
        handle.remove()
        assert torch.equal(layer.weight, before)
        return
    layer.weight.grad = torch.zeros_like(layer.weight)
    optimizer.step()
    assert float((layer.weight - before).detach().float().abs().max()) <= 0.02
    assert handle.error().worst <= (8e-3 if dtype == torch.bfloat16 else 1e-5)


def test_bfloat16_steps_smaller_than_its_spacing_are_kept():
    model, optimizer, _ = constrained("adamw", "square", model=Mixed().to(torch.bfloat16), lr=1e-4)
    before = model.square.weight.detach().clone()
    gradient = torch.randn(WIDTH, WIDTH).bfloat16().float()
    for _ in range(200):
        model.square.weight.grad = (before.float() @ (gradient - gradient.T)).bfloat16()
        optimizer.step()
    assert float((model.square.weight.detach() - before).float().norm()) > 0.1


def test_autocast_and_low_matmul_precision_do_not_reach_the_retraction():
    model, optimizer, _ = constrained("adamw", model=Mixed(64), lr=1e-3)
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


@pytest.mark.parametrize("to", ["orthogonal", "spectral", "columns"])
def test_a_step_that_is_not_finite_is_named_and_weights_stay(to):
    model, optimizer, _ = constrained(to=to)
    before = {name: getattr(model, name).weight.detach().clone() for name in NAMES}
    for name in NAMES:
        getattr(model, name).weight.grad = torch.full_like(getattr(model, name).weight, math.nan)
    with pytest.raises(ConvergenceError, match=r"square\.weight(.|\n)*tall\.weight"):
        optimizer.step()
    for name, weight in before.items():
        assert torch.equal(getattr(model, name).weight, weight)


TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-11, torch.bfloat16: 8e-3}
EDITS = {
    "data.mul_": lambda layer: layer.weight.data.mul_(1.5),
    "one entry of data": lambda layer: layer.weight.data[0, 0].add_(0.01),
    "data =": lambda layer: setattr(layer.weight, "data", layer.weight.data + 1),
    "three entries of data": lambda layer: layer.weight.data.view(-1)[:3].mul_(1.001),
    "load_state_dict": lambda layer: layer.load_state_dict({"weight": 0.5 * layer.weight.detach()}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(8, 8), (12, 8), (8, 12)], ids=str)
@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_is_noticed_at_the_next_step(edit, shape, dtype):
    model = nn.ModuleList(nn.Linear(shape[1], shape[0], bias=False, dtype=dtype) for _ in range(2))
    _, optimizer, handle = constrained("adamw", nn.Linear, model=model, lr=1e-4)

    def step():
        for weight in model.parameters():
            weight.grad = torch.randn_like(weight)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConstraintWarning)
            optimizer.step()

    for _ in range(3):
        step()
    first = model[0]
    with torch.no_grad():
        EDITS[edit](first)
    step()
    assert max(isometry_error(weight) for weight in model.parameters()) <= TOLERANCE[dtype]
    assert handle.error().worst <= TOLERANCE[dtype]


def test_an_edited_weight_without_a_gradient_is_left_until_it_has_one():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    _, optimizer, handle = constrained("adamw", nn.Linear, model=model, lr=1e-4)
    model[0].weight.data.mul_(1.5)
    for has_gradient in (False, True):
        model[0].weight.grad = torch.randn(8, 8) if has_gradient else None
        model[1].weight.grad = torch.randn(8, 8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConstraintWarning)
            optimizer.step()
        assert (handle.error().worst <= 1e-5) == has_gradient


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(8, 8), (12, 8)], ids=str)
@pytest.mark.parametrize("steps", [0, 1])
def test_a_weight_turned_to_another_dtype_is_named(steps, shape, dtype):
    layer = nn.Linear(shape[1], shape[0])
    model, optimizer, handle = constrained("sgd", "0", model=nn.Sequential(layer), lr=1e-2)
    for turn in [torch.float32] * steps + [dtype]:
        model.to(turn).zero_grad()
        model(torch.randn(2, shape[1], dtype=turn)).sum().backward()
        if turn == dtype:
            message = r"(?s)remove\(\).*0\.weight: was torch.float32, now"
            with pytest.raises(ConfigError, match=message):
                optimizer.step()
        else:
            optimizer.step()
    handle.remove()
    handle = constrain_(model, optimizer, where="0")
    optimizer.step()
    assert handle.error().worst <= TOLERANCE[dtype]


def test_half_weights_reach_their_bound_and_no_less():
    """Each entry moves by a part of at most u = 2^-8, so an entry of W^T W by 2 u + u^2: bfloat16 rounds
    every `+-1/sqrt(254)` up by nearly half its spacing."""
    exact = torch.ones(254, 2, dtype=torch.float64) / 254**0.5
    exact[127:, 1] *= -1
    assert isometry_error(exact) < 1e-14
    stored = isometry_error(exact.to(torch.bfloat16))
    assert 0.99 * (2 * 2**-8) < stored <= 2 * 2**-8 + 2**-16
    for bound, unit in ((8e-3, 2**-8), (1e-3, 2**-11)):
        assert 2 * unit + unit**2 + 1e-5 <= bound
