"""Weights of all experts in one parameter: each expert's matrices are held by themselves, rows that
alternate too."""

from functools import partial

import pytest
import torch
from tests.support.constrained import descend, distance, goes_on_bit_for_bit
from tests.support.many_families import FAMILIES, batch_of
from torch import nn

from wellposed.constrain import constrain_, parameter_groups
from wellposed.errors import ConfigError, ShapeError
from wellposed.linalg import cap_spectral_norm_

ROLES = ("feedforward_in", "feedforward_gate", "feedforward_out")
CUTS = {
    "gpt-oss": lambda both, down: (both.mT[:, 1::2], both.mT[:, ::2], down.mT),
    "llama4": lambda both, down: (both.mT[:, 48:], both.mT[:, :48], down.mT),
    "mixtral": lambda both, down: (both[:, 48:], both[:, :48], down),
    "qwen3-moe": lambda both, down: (both[:, 24:], both[:, :24], down),
}
"""Value, gate and output of all experts, (experts, out, in), as the code of each family reads them."""


def experts(name, model):
    """Every matrix of every expert."""
    matrices = []
    for path, both in model.named_parameters():
        if path.endswith("gate_up_proj"):
            down = model.get_parameter(path.replace("gate_up_proj", "down_proj"))
            matrices += [w for stack in CUTS[name](both.detach(), down.detach()) for w in stack]
    return matrices


def train(name, model, optimizer, steps):
    batch = batch_of(name, model)
    return descend(lambda: (model(**batch)[0] - 1.0).square().mean(), optimizer, steps)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("to", ["orthogonal", "spectral", "columns"])
@pytest.mark.parametrize("name", CUTS)
def test_every_matrix_of_every_expert_is_in_the_set_after_every_step(name, to, dtype):
    model = FAMILIES[name]().to(dtype)
    for parameter in model.parameters():
        if parameter.ndim == 3:
            parameter.data *= 40.0
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    handle = constrain_(model, optimizer, where=ROLES, to=to)
    routed = [path for path in handle.paths if ".experts." in path]
    assert len(routed) == len(experts(name, model))
    tolerance = {"spectral": 0.0, "columns": 1e-6}.get(to, 1e-5) if dtype.itemsize == 4 else 8e-3
    start = [weight.clone() for weight in experts(name, model)]
    for _ in range(3):
        train(name, model, optimizer, 1)
        assert max(distance(weight, to) for weight in experts(name, model)) <= tolerance
    assert any(not torch.equal(*pair) for pair in zip(start, experts(name, model), strict=True))
    assert handle.error().worst <= tolerance


@pytest.mark.parametrize("name", CUTS)
@pytest.mark.parametrize("to", ["orthogonal", "spectral"])
def test_a_step_is_that_of_each_matrix_alone(name, to):
    """By the projected gradient and the polar factor of an SVD in float64; capped ones by a call for
    each."""
    model = FAMILIES[name]()
    path = next(path for path, weight in model.named_parameters() if weight.ndim == 3)
    both = model.get_parameter(path)
    optimizer = torch.optim.SGD([both], lr=0.02)
    with torch.no_grad():
        both.copy_(torch.randn_like(both))
    constrain_(model, optimizer, f"{path}[[]*", to=to)
    dtype = torch.float64 if to == "orthogonal" else torch.float32
    expected = both.detach().to(dtype)
    goals = torch.randn_like(both)
    for _ in range(2):
        both.grad = both.detach() - goals
        optimizer.step()
        parts = [CUTS[name](weights, weights)[:2] for weights in (expected, goals.to(dtype))]
        for points, wanted in zip(*parts, strict=True):
            for point, goal in zip(points, wanted, strict=True):
                gradient = point - goal
                if to == "spectral":
                    point.sub_(gradient, alpha=0.02)
                    point.copy_(capped(point))
                    continue
                tall = point.shape[0] >= point.shape[1]
                at, slope = (point, gradient) if tall else (point.T, gradient.T)
                inner = at.T @ slope
                moved = at - 0.02 * (slope - at @ (inner + inner.T) / 2)
                left, _, right = torch.linalg.svd(moved, full_matrices=False)
                point.copy_(left @ right if tall else (left @ right).T)
    assert float((both.detach() - expected).abs().max()) <= 1e-5


def capped(weight):
    alone = weight.clone(memory_format=torch.contiguous_format)
    cap_spectral_norm_(alone)
    return alone


@pytest.mark.slow
def test_a_resumed_run_goes_on_bit_for_bit_in_half_precision():
    def build():
        model = FAMILIES["gpt-oss"]().bfloat16()
        return model, torch.optim.AdamW(parameter_groups(model, 0.1, where=ROLES), lr=1e-2)

    attach = partial(constrain_, where=ROLES)
    goes_on_bit_for_bit(build, attach, partial(train, "gpt-oss"))


def test_a_matrix_is_held_once_and_a_stack_that_nothing_reads_is_refused():
    model = FAMILIES["mixtral"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    constrain_(model, optimizer, where="feedforward_in")
    constrain_(model, optimizer, where="feedforward_gate", to="spectral")
    with pytest.raises(ConfigError, match=r"gate_up_proj\[0\]\[48:96\]: constrained already"):
        constrain_(model, optimizer, where="feedforward_in", to="spectral")

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.Parameter(torch.randn(3, 4, 4))

    stack = Stack()
    with pytest.raises(ShapeError, match=r"shape \(3, 4, 4\).*a pass over batch="):
        constrain_(stack, torch.optim.SGD(stack.parameters(), lr=0.1), "weights")
