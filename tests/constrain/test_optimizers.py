"""Optimizers: which are taken, their moments, and which weights it steps together."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from wellposed.constrain import ConstraintWarning, constrain_
from wellposed.errors import ConfigError


@pytest.mark.parametrize("kind", ["LBFGS", "SparseAdam"])
def test_an_optimizer_without_one_step_for_one_gradient_is_refused(kind):
    layer = nn.Linear(4, 4)
    before = layer.weight.detach().clone()
    optimizer = getattr(torch.optim, kind)(list(layer.parameters()))
    with pytest.raises(ConfigError, match=f"{kind} does not take one step from one gradient"):
        constrain_(nn.Sequential(layer), optimizer, where="0")
    assert torch.equal(layer.weight, before)


class Momentum(torch.optim.SGD):
    """A class that torch did not make, whose state may hold what only it can make."""


def layers():
    torch.manual_seed(0)
    square = nn.Linear(5, 5, bias=False)
    tall = nn.Linear(4, 7, bias=False)
    return nn.ModuleDict({"square": square, "tall": tall})


def push(model, optimizer, gradients):
    for name, gradient in gradients.items():
        model[name].weight.grad = gradient.clone()
    optimizer.step()


def noise(model):
    return {name: torch.randn_like(layer.weight) for name, layer in model.items()}


def nothing(model):
    return {name: torch.zeros_like(layer.weight) for name, layer in model.items()}


def test_moments_of_square_weights_restart_from_zero_and_no_others():
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    push(model, optimizer, noise(model))
    square = model["square"].weight
    tall = model["tall"].weight
    # Numbers beside the tensors restart as numbers of their kind; flags say how to compute, and
    # stay.
    optimizer.state[square].update(count=5, ratio=0.5, flag=True, name="n")
    constrain_(model, optimizer, where=nn.Linear)
    before = square.detach().clone()
    moment = optimizer.state[tall]["momentum_buffer"].clone()
    with pytest.warns(ConstraintWarning, match=r"restart from zero:\s+square\.weight$"):
        push(model, optimizer, nothing(model))
    assert float((square - before).detach().abs().max()) <= 1e-6
    state = optimizer.state[square]
    assert (state["count"], state["ratio"], state["flag"], state["name"]) == (0, 0.0, True, "n")
    assert type(state["count"]) is int
    assert type(state["ratio"]) is float
    torch.testing.assert_close(optimizer.state[tall]["momentum_buffer"], 0.5 * moment)
    # From now on they are kept: a second step without a gradient continues the first.
    push(model, optimizer, noise(model))
    buffer = optimizer.state[square]["momentum_buffer"].clone()
    assert float(buffer.norm()) > 0.1
    push(model, optimizer, nothing(model))
    torch.testing.assert_close(optimizer.state[square]["momentum_buffer"], 0.5 * buffer)


def test_the_state_of_a_class_of_somebody_else_is_made_anew():
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
def test_a_state_that_was_only_made_is_no_offence_and_one_that_stepped_once_is(step):
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


SMALL = [(8, 8)] * 3
COLUMNS = {"to": "columns"}
MIXED = [(8, 8)] * 5 + [(8, 6)] * 3 + [(6, 8)] * 2 + [(5, 5)]
TOGETHER = [
    (MIXED, COLUMNS, [5, 3, 2]),
    # of the other sets a matrix is a member if its transpose is
    *((MIXED, {"to": to}, [5, 5]) for to in ("orthogonal", "spectral")),
    (SMALL, {"gain": "fit"}, []),
    # a CPU stacks up to 16,384 entries by itself, and 2^18 at once; a larger matrix is alone
    ([(128, 128)] * 17, COLUMNS, [16]),
    ([(128, 129)] * 2, COLUMNS, []),
    ([(256, 256)] * 7, {"to": "spectral"}, [4, 3]),
]


@pytest.mark.parametrize(("shapes", "options", "together"), TOGETHER)
def test_weights_of_one_shape_and_size_step_together(shapes, options, together, monkeypatch):
    layers = nn.ModuleList(nn.Linear(n, m, bias=False) for m, n in shapes)
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3)
    handle = constrain_(layers, optimizer, where=nn.Linear, **options)
    sizes = []
    kind = type(handle.weights[0].set)
    original = kind.retract

    def counted(self, weights, work):
        sizes.append(len(weights))
        return original(self, weights, work)

    monkeypatch.setattr(kind, "retract", counted)
    for weight in layers.parameters():
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    assert handle.error().worst <= 1e-5
    assert sorted((size for size in sizes if size > 1), reverse=True) == together
