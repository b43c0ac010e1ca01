"""Optimizers that keep several copies of a weight, that read it, or whose state is made early."""

import pytest
import torch
from tests.support.constrained import distance
from torch import nn

from wellposed.constrain import constrain_
from wellposed.errors import ConfigError


class Slow:
    """A wrapper that pulls weights to slow ones every ``k`` steps."""

    def __init__(self, optimizer, k=5, alpha=0.5):
        self.optimizer = optimizer
        self.k = k
        self.alpha = alpha
        self.count = 0
        self.slow = [p.detach().clone() for g in optimizer.param_groups for p in g["params"]]

    def weights(self):
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self):
        self.optimizer.step()
        self.count += 1
        if self.count % self.k == 0:
            for slow, weight in zip(self.slow, self.weights(), strict=True):
                weight.copy_(slow.lerp_(weight, self.alpha))


class Averaged(Slow):
    """A wrapper that puts an average into the model after each step."""

    def __init__(self, optimizer, decay=0.9):
        super().__init__(optimizer, 1, 1 - decay)


class Unlike(Slow):
    """A wrapper of which no copy can be made from its attributes."""

    def __init__(self, optimizer, model):
        super().__init__(optimizer, k=10**6)
        self.names = [name for name, _ in model.named_parameters()]


class Passing(Slow):
    """A wrapper that writes no weights."""

    def step(self):
        self.optimizer.step()


class Proper(Slow, torch.optim.Optimizer):
    """The same as an optimizer by its class, as packages have it."""

    def __init__(self, optimizer, k=5, alpha=0.5):
        Slow.__init__(self, optimizer, k, alpha)
        self.param_groups = optimizer.param_groups


class TwoModes(torch.optim.SGD):
    """Trains at one point, and is evaluated at the mean of all."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, lr=lr)
        self.count = 0

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.count += 1
        for p in self.param_groups[0]["params"]:
            mean = self.state[p].setdefault("mean", p.detach().clone())
            mean.lerp_(p, 1 / self.count)

    @torch.no_grad()
    def eval(self):
        for p in self.param_groups[0]["params"]:
            p.copy_(self.state[p]["mean"])


class Scaled(torch.optim.Optimizer):
    """Steps that are proportional to the weight's length, under a name that says nothing."""

    def __init__(self, parameters, lr=1e-2, weight_decay=0.0):
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(p.grad.sign() * p.norm().clamp(min=1e-3), alpha=group["lr"])


class Early(torch.optim.Optimizer):
    """Makes its state at construction, and expects it."""

    def __init__(self, parameters, lr=1e-2):
        super().__init__(parameters, {"lr": lr})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["moment"] = torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(self.state[p]["moment"].mul_(0.9).add_(p.grad), alpha=1e-2)


def pair():
    torch.manual_seed(0)
    return nn.ModuleList([nn.Linear(6, 6, bias=False), nn.Linear(6, 9, bias=False)])


def push(model, optimizer, steps=1):
    for _ in range(steps):
        for layer in model:
            layer.weight.grad = torch.randn_like(layer.weight)
        optimizer.step()


SETS = ["orthogonal", "spectral", "columns"]
COPIES = {
    "slow weights": (lambda p: Slow(torch.optim.AdamW(p)), "Slow writes other weights after"),
    "rarely": (lambda p: Slow(torch.optim.AdamW(p), k=20), "Slow writes other weights after"),
    "average": (lambda p: Averaged(torch.optim.SGD(p)), "Averaged writes other weights after"),
    "nested": (lambda p: Passing(Proper(torch.optim.SGD(p))), "Proper writes other weights"),
    "modes": (TwoModes, r"TwoModes\.eval\(\) puts another copy"),
}


@pytest.mark.parametrize("to", SETS)
@pytest.mark.parametrize("kind", COPIES)
def test_an_optimizer_that_evaluates_another_copy_is_refused_and_nothing_moves(kind, to):
    make, expected = COPIES[kind]
    model = pair()
    before = [layer.weight.detach().clone() for layer in model]
    optimizer = make(list(model.parameters()))
    seed = torch.random.get_rng_state()
    with pytest.raises(ConfigError, match=expected):
        constrain_(model, optimizer, nn.Linear, to=to)
    assert all(torch.equal(a, layer.weight) for a, layer in zip(before, model, strict=True))
    assert torch.equal(seed, torch.random.get_rng_state())


@pytest.mark.parametrize("to", SETS)
def test_a_wrapper_that_writes_nothing_is_taken(to, caplog):
    model = pair()
    optimizer = Passing(torch.optim.AdamW(model.parameters(), weight_decay=0.0))
    handle = constrain_(model, optimizer, nn.Linear, to=to)
    push(model, optimizer, 8)
    assert max(distance(layer.weight, to) for layer in model) <= 1e-5
    assert handle.active
    assert "tried out" not in caplog.text


def test_a_wrapper_that_cannot_be_tried_is_named(caplog):
    model = pair()
    optimizer = Unlike(torch.optim.SGD(model.parameters(), lr=0.1), model)
    constrain_(model, optimizer, nn.Linear)
    assert "Unlike could not be tried out" in caplog.text


@pytest.mark.parametrize("to", ["orthogonal", "columns"])
def test_decay_of_a_step_that_reads_the_weight_is_refused_whatever_its_name(to):
    model = pair()
    with pytest.raises(ConfigError, match=r"weight_decay=0\.1 of Scaled"):
        constrain_(model, Scaled(model.parameters(), weight_decay=0.1), nn.Linear, to=to)


@pytest.mark.parametrize("to", SETS)
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.filterwarnings("ignore:moments of these weights")
def test_a_state_made_at_construction_is_kept(to, steps):
    model = pair()
    optimizer = Early(list(model.parameters()))
    push(model, optimizer, steps)
    handle = constrain_(model, optimizer, nn.Linear, to=to)
    for _ in range(3):
        push(model, optimizer)
        assert max(distance(layer.weight, to) for layer in model) <= 1e-5
    handle.remove()
    push(model, optimizer)
    assert all("moment" in optimizer.state[layer.weight] for layer in model)
