"""What becomes of an optimizer's state when square weights change their coordinates."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.support.constrained import held
from torch import Tensor, nn

from wellposed.constrain import ConstraintWarning, constrain_


class Momentum(torch.optim.SGD):
    """A class that torch did not make, whose state may hold what only it can make."""


def layers() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"square": nn.Linear(5, 5, bias=False), "tall": nn.Linear(4, 7, bias=False)}
    )


def push(
    model: nn.ModuleDict, optimizer: torch.optim.Optimizer, gradients: dict[str, Tensor]
) -> None:
    for name, gradient in gradients.items():
        model[name].weight.grad = gradient.clone()
    optimizer.step()


def noise(model: nn.ModuleDict) -> dict[str, Tensor]:
    return {name: torch.randn_like(layer.weight) for name, layer in model.items()}


def nothing(model: nn.ModuleDict) -> dict[str, Tensor]:
    return {name: torch.zeros_like(layer.weight) for name, layer in model.items()}


def test_moments_of_square_weights_restart_from_zero_and_no_others() -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    push(model, optimizer, noise(model))
    square, tall = model["square"].weight, model["tall"].weight
    # Numbers beside the tensors restart as numbers of their kind; flags say how to compute, and
    # stay.
    optimizer.state[square].update(count=5, ratio=0.5, flag=True, name="n")
    constrain_(model, optimizer, where=nn.Linear)
    before, moment = square.detach().clone(), optimizer.state[tall]["momentum_buffer"].clone()
    with pytest.warns(ConstraintWarning, match=r"restart from zero:\s+square\.weight$"):
        push(model, optimizer, nothing(model))
    assert float((square - before).detach().abs().max()) <= 1e-6
    state = optimizer.state[square]
    assert (state["count"], state["ratio"], state["flag"], state["name"]) == (0, 0.0, True, "n")
    assert type(state["count"]) is int
    assert type(state["ratio"]) is float
    torch.testing.assert_close(optimizer.state[tall]["momentum_buffer"], 0.5 * moment)
    # From now on they are kept: a second step without a gradient goes on along the first.
    push(model, optimizer, noise(model))
    buffer = optimizer.state[square]["momentum_buffer"].clone()
    assert float(buffer.norm()) > 0.1
    push(model, optimizer, nothing(model))
    torch.testing.assert_close(optimizer.state[square]["momentum_buffer"], 0.5 * buffer)


def test_the_state_of_a_class_of_somebody_else_is_made_anew() -> None:
    model = layers()
    optimizer = Momentum(model.parameters(), lr=0.1, momentum=0.5)
    push(model, optimizer, noise(model))
    optimizer.state[model["square"].weight]["table"] = torch.ones(3)
    constrain_(model, optimizer, where="square")
    before = model["square"].weight.detach().clone()
    with pytest.warns(ConstraintWarning, match="restart from zero"):
        push(model, optimizer, nothing(model))
    assert "table" not in optimizer.state[model["square"].weight]
    assert float((model["square"].weight - before).detach().abs().max()) <= 1e-6


@pytest.mark.parametrize("step", [torch.tensor(0.0), 0, 0.0, torch.tensor(1.0), 1, 0.5], ids=repr)
def test_a_state_that_was_only_made_is_no_offence_and_one_that_stepped_once_is(step: Any) -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    square = model["square"].weight
    optimizer.state[square].update(step=step, momentum_buffer=torch.ones(5, 5))
    constrain_(model, optimizer, where="square")
    stepped = bool(step)
    # A warning is an error in these tests.
    with pytest.warns(ConstraintWarning, match="restart") if stepped else nullcontext():
        push(model, optimizer, nothing(model))
    expected = 0.0 if stepped else 0.5
    assert bool((optimizer.state[square]["momentum_buffer"] == expected).all())


def test_removing_restarts_the_moments_of_square_weights_and_no_others() -> None:
    model, optimizer, handle = held("adamw", nn.Linear, model=layers(), lr=0.1)
    push(model, optimizer, noise(model))
    square, tall = model["square"].weight, model["tall"].weight
    kept = {name: value.clone() for name, value in optimizer.state[tall].items()}
    handle.remove()
    assert sorted(optimizer.state[square]) == sorted(kept)
    assert all(float(value.abs().sum()) == 0.0 for value in optimizer.state[square].values())
    assert all(torch.equal(value, kept[name]) for name, value in optimizer.state[tall].items())
    # Attached anew, the restarted moments are no offence.
    constrain_(model, optimizer, where="square")
    push(model, optimizer, noise(model))


def test_plain_sgd_notes_the_drift_of_square_weights_alone_and_ends_without_a_state() -> None:
    model, optimizer, handle = held("sgd", nn.Linear, model=layers())
    push(model, optimizer, noise(model))
    noted = {id(weight): list(state) for weight, state in optimizer.state.items() if state}
    assert noted == {id(model["square"].weight): ["wellposed_lie_coordinates"]}
    handle.remove()
    assert not optimizer.state


def test_a_half_weights_copy_lies_beside_the_moments_until_the_end() -> None:
    model, optimizer, handle = held("adamw", nn.Linear, model=layers().to(torch.bfloat16))
    push(model, optimizer, noise(model))
    for weight in handle.weights:
        saved = optimizer.state[weight.parameter]["wellposed_float32"]
        assert saved.dtype == torch.uint8
        assert weight.master is not None
        assert torch.equal(saved.view(torch.float32), weight.master)
    handle.remove()
    for weight in handle.weights:
        assert weight.master is None
        assert "wellposed_float32" not in optimizer.state[weight.parameter]
