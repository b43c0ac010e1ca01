"""Blocks that backward runs again: buffers advance once a step as in ordinary backpropagation,
gradients are the same, and a weight that changes in between is an error."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from wellposed.errors import ConfigError
from wellposed.nn import InvertibleResidual, ReversibleSequential

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Scaled(nn.Module):
    def __init__(self, inner, scale):
        super().__init__()
        self.inner = inner
        self.scale = scale

    def forward(self, x):
        return self.scale * self.inner(x)


class Counting(nn.Linear):
    """The map depends on how often it was called."""

    def __init__(self, grows=False):
        super().__init__(8, 8)
        self.grows = grows
        self.register_buffer("calls", torch.ones(1))

    def forward(self, x):
        if self.grows:
            self.calls = torch.cat([self.calls, torch.ones(1)])
        else:
            self.calls += 1
        return super().forward(x) / self.calls.sum()


def batch_normed():
    return Scaled(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), 0.05)


KINDS = {
    "batch norm": batch_normed,
    "spectral_norm, a hook": lambda: Scaled(nn.utils.spectral_norm(nn.Linear(8, 8)), 0.7),
    "spectral_norm": lambda: Scaled(parametrizations.spectral_norm(nn.Linear(8, 8)), 0.7),
    "counts": lambda: Scaled(Counting(), 9.0),
    "grows": lambda: Scaled(Counting(grows=True), 9.0),
}


def stack_of(kind, *, shared=False):
    torch.manual_seed(1)
    fs = [KINDS[kind]() for _ in range(1 if shared else 3)] * (3 if shared else 1)
    with torch.no_grad():
        for f in fs * 20:  # the hook's iteration begins with random vectors
            f(X.float())
    return ReversibleSequential([InvertibleResidual(f, lipschitz=0.9) for f in fs]).double()


def plainly(stack, x):
    for block in stack.blocks:
        x = block(x)
    return x


def gradients(loss, stack):
    return torch.autograd.grad(loss, [w for w in stack.parameters() if w.requires_grad])


def assert_equal_state(stack, other):
    buffers = dict(other.named_buffers())
    for name, buffer in stack.named_buffers():
        torch.testing.assert_close(buffer, buffers[name], rtol=1e-12, atol=1e-12)


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_steps_are_those_of_ordinary_backpropagation(kind, shared, training):
    stack = stack_of(kind, shared=shared).train(training)
    other = copy.deepcopy(stack)
    for step in range(3):
        x = X + step
        computed = gradients(stack(x).square().sum(), stack)
        expected = gradients(plainly(other, x).square().sum(), other)
        for one, two in zip(computed, expected, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-8)
        assert_equal_state(stack, other)


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_two_passes_before_two_backward_passes(kind):
    stack = stack_of(kind)
    other = copy.deepcopy(stack)
    losses = [stack(x).square().sum() for x in (X, X + 1)]
    expected = [plainly(other, x).square().sum() for x in (X, X + 1)]
    for loss, plain in zip(losses, expected, strict=True):
        for one, two in zip(gradients(loss, stack), gradients(plain, other), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-8)
    assert_equal_state(stack, other)


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_an_inverse_and_a_determinant_leave_buffers_alone(kind):
    stack = stack_of(kind)
    before = copy.deepcopy(stack)
    objects = dict(stack.named_buffers())
    stack.inverse(X)
    stack.blocks[0].inverse(X)
    for part in (stack, stack.blocks[0]):
        if kind == "batch norm":
            with pytest.raises(ConfigError, match="statistics of the batch"):
                part.log_abs_det(X)
        else:
            part.log_abs_det(X)
    assert_equal_state(stack, before)
    assert all(buffer is objects[name] for name, buffer in stack.named_buffers())


def test_the_second_derivative_repeats_the_pass_too():
    stack = stack_of("counts")
    other = copy.deepcopy(stack)
    results = []
    for model, run in ((stack, stack), (other, lambda x: plainly(other, x))):
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(run(x).pow(3).sum(), x, create_graph=True)
        results.append(gradients(slope.square().sum(), model))
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-8, atol=1e-8)
    assert_equal_state(stack, other)


def test_draws_that_no_rate_shows_are_refused():
    class Hidden(nn.Linear):
        def forward(self, x):
            return super().forward(F.dropout(x, 0.1))

    stack = ReversibleSequential([InvertibleResidual(Scaled(Hidden(8, 8), 0.3), lipschitz=0.9)])
    with pytest.raises(ConfigError, match="draws random numbers"):
        stack(X.float())
    with torch.no_grad():
        assert stack(X.float()).isfinite().all()  # nothing to repeat


def in_place(stack):
    with torch.no_grad():
        stack.blocks[1].f.inner.weight.mul_(1.0001)


def by_optimizer(stack):
    stack.blocks[1].f.inner.weight.grad = torch.ones(8, 8, dtype=torch.float64)
    torch.optim.AdamW(stack.parameters(), lr=1e-5).step()


def replaced(stack):
    layer = stack.blocks[1].f.inner
    layer.weight = nn.Parameter(layer.weight.detach().clone())


def loaded(stack):
    stack.load_state_dict({name: value * 1.0001 for name, value in stack.state_dict().items()})


CHANGES = {f.__name__: f for f in (in_place, by_optimizer, replaced, loaded)}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_weight_that_changes_before_backward_is_named(change, create_graph):
    fs = [Scaled(nn.Linear(8, 8), 0.3) for _ in range(2)]
    stack = ReversibleSequential([InvertibleResidual(f, lipschitz=0.9) for f in fs]).double()
    x = X.clone().requires_grad_()
    loss = stack(x).square().sum()
    CHANGES[change](stack)
    with pytest.raises(ConfigError, match=r"block [01][\s\S]*f\.inner\.weight"):
        torch.autograd.grad(loss, x, create_graph=create_graph)
    torch.autograd.grad(stack(x).square().sum(), x)


def test_weights_of_a_functional_call_are_not_mistaken_for_those_of_the_module():
    stack = ReversibleSequential([InvertibleResidual(Scaled(nn.Linear(8, 8), 0.3), lipschitz=0.9)])
    weights = {name: (w * 1.01).detach().requires_grad_() for name, w in stack.named_parameters()}
    result = torch.func.functional_call(stack, weights, (X.float(),))
    with pytest.raises(ConfigError, match="have changed"):
        result.sum().backward()
