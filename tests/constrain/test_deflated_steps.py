"""Training steps that lead outside the bound: few singular values by their vectors, many by a polynomial."""

import math

import pytest
import torch
from tests.support.constrained import distance
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from wellposed.constrain import constrain_
from wellposed.errors import ConvergenceError

SIDE = 264


def pushed(dtype=torch.float32, *, bound=1.0):
    torch.manual_seed(0)
    layer = nn.Linear(SIDE, SIDE, bias=False, dtype=dtype)
    with torch.no_grad():
        weight = torch.randn(SIDE, SIDE, dtype=torch.float64)
        layer.weight.copy_(weight * (bound / torch.linalg.matrix_norm(weight, 2)))
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    return layer, optimizer, constrain_(layer, optimizer, where="*", to="spectral", bound=bound)


def outwards(layer, count, size, *, seed=None):
    """A step that lifts the first singular values, and a little noise."""
    left, values, right = torch.linalg.svd(layer.weight.detach().double())
    step = (left[:, :count] * values[:count]) @ right[:count] * size
    if seed is not None:
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(SIDE, SIDE, generator=generator, dtype=torch.float64)
        step = step + noise * (size / 10 / SIDE**0.5)
    return step


def move(layer, optimizer, step):
    layer.weight.grad = -step.to(layer.weight.dtype)
    optimizer.step()


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float32, 1.0), (torch.float64, 0.4), (torch.bfloat16, 0.4)]
)
def test_the_norm_stays_within_the_bound_at_every_step(dtype, bound):
    layer, optimizer, handle = pushed(dtype, bound=bound)
    for seed in range(10):
        move(layer, optimizer, outwards(layer, 3, 0.02, seed=seed))
        norm = torch.linalg.matrix_norm(layer.weight.detach().double(), 2)
        assert norm <= bound
    assert (handle.weights[0].memory.top_vectors is None) is (dtype == torch.bfloat16)
    assert norm > 0.98 * bound


def test_the_steps_are_near_the_exact_caps():
    layer, optimizer, handle = pushed()
    shares = []
    for seed in range(12):
        step = outwards(layer, 3, 0.02, seed=seed)
        free = layer.weight.detach().double() + step.float().double()
        move(layer, optimizer, step)
        left, values, right = torch.linalg.svd(free)
        exact = (left * values.clamp_max(1.0)) @ right
        shares.append(float(torch.linalg.matrix_norm(layer.weight.detach() - exact, 2)))
    assert handle.weights[0].memory.top_vectors.pause == 0
    assert max(shares[2:]) <= 5e-3


def test_many_values_above_the_bound_go_back_to_the_polynomial_and_are_tried_now_and_then():
    layer, optimizer, handle = pushed()
    pauses = []
    for seed in range(12):
        move(layer, optimizer, outwards(layer, 60, 0.05, seed=seed))
        assert distance(layer.weight, "spectral") == 0.0
        pauses.append(handle.weights[0].memory.top_vectors.pause)
    assert max(pauses) >= 2
    assert 0 in pauses


@pytest.mark.parametrize("norm", [0.5, 1.2, 40.0])
def test_the_vectors_are_a_guess_whoever_wrote_to_the_weight(norm):
    layer, optimizer, _ = pushed()
    for seed in range(4):
        move(layer, optimizer, outwards(layer, 3, 0.02, seed=seed))
    value = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(5))
    layer.weight.data.copy_(value * (norm / torch.linalg.matrix_norm(value, 2)))
    for _ in range(3):
        move(layer, optimizer, torch.zeros(SIDE, SIDE))
        assert distance(layer.weight, "spectral") == 0.0


def test_a_step_that_is_not_finite_is_refused():
    layer, optimizer, _ = pushed()
    for seed in range(4):
        move(layer, optimizer, outwards(layer, 3, 0.02, seed=seed))
    before = layer.weight.detach().clone()
    with pytest.raises(ConvergenceError, match="not finite"):
        move(layer, optimizer, torch.full((SIDE, SIDE), math.nan))
    assert torch.equal(layer.weight, before)


def test_a_weight_that_leaves_the_bound_forgets_its_vectors():
    layer, optimizer, handle = pushed()
    for seed in range(4):
        move(layer, optimizer, outwards(layer, 3, 0.02, seed=seed))
    assert handle.weights[0].memory.top_vectors is not None
    for _ in range(3):
        move(layer, optimizer, -0.1 * layer.weight.detach())
    assert handle.weights[0].memory.top_vectors is None
    handle.remove()


class Breaks(TorchDispatchMode):
    """Raises at one operation, or counts them."""

    def __init__(self, at=math.inf):
        super().__init__()
        self.at = at
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if self.count == self.at:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


@pytest.mark.slow  # a training for every fifth operation
def test_a_step_that_breaks_off_leaves_the_weight_of_before_or_after():
    def trained():
        layer, optimizer, handle = pushed()
        for seed in range(3):
            move(layer, optimizer, outwards(layer, 3, 0.02, seed=seed))
        layer.weight.grad = -outwards(layer, 3, 0.02, seed=9).float()
        return layer, optimizer, handle

    layer, optimizer, handle = trained()
    before = layer.weight.detach().clone()
    with Breaks() as counted:
        optimizer.step()
    after = layer.weight.detach().clone()
    assert handle.weights[0].memory.top_vectors.pause == 0

    for at in range(1, counted.count + 1, 5):
        layer, optimizer, _ = trained()
        with pytest.raises(KeyboardInterrupt), Breaks(at):
            optimizer.step()
        assert any(torch.equal(layer.weight, value) for value in (before, after))
        optimizer.step()
        assert distance(layer.weight, "spectral") == 0.0
