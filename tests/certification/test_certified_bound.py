"""`certified_bound`: its value is the certificate's, its gradient the slope of that value."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from wellposed.certification import certified_bound, certify
from wellposed.certification.bounds import Matrix, Slopes, network_of
from wellposed.errors import ConfigError, NotLipschitzError
from wellposed.models import WellposedConfig, WellposedModel
from wellposed.nn import MLP, InvertibleResidual, MaxMinFeedForward


def _body(**options):
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "norm": "none"}
    return WellposedModel(WellposedConfig(**{**sizes, "attention": "l2_tied", **options}))


NETS = {
    "one linear map": lambda: nn.Linear(6, 4),
    "feed-forward": lambda: MLP(6, 12),
    "with its skip": lambda: InvertibleResidual(MLP(6, 12)),
    "maxmin with its skip": lambda: InvertibleResidual(MaxMinFeedForward(6, 12)),
    "chain": lambda: nn.Sequential(
        nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
    ),
    "two linear maps": lambda: nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)),
    "linear maps with their skip": lambda: InvertibleResidual(
        nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 6))
    ),
    "block": _body,
}


@pytest.mark.parametrize("norm", ["tok", "inf"])
@pytest.mark.parametrize("name", NETS)
def test_the_gradient_predicts_the_change_of_the_certificate(name, norm):
    torch.manual_seed(0)
    module = NETS[name]().double().eval()
    asked = {"seq_len": 3, "norm": norm}
    bound = certified_bound(module, **asked)
    assert float(bound.detach()) == pytest.approx(
        certify(module, **asked, cross_check=False).total, rel=1e-9
    )
    bound.log().backward()
    if name == "block":
        # The attention counts as a constant, so its weights have no gradient.
        assert module.layers[0].attention.v_proj.weight.grad is None
    lowered = _lowered(module, float(bound.detach()), asked)
    assert (0.6 if norm == "tok" else 0.1) < lowered < 1.5


def _lowered(module, bound, asked):
    """Return how far a step along the gradient lowers the logarithm, beside what it predicts."""
    gradients = [weight.grad for weight in module.parameters() if weight.grad is not None]
    steepness = sum(float(gradient.square().sum()) for gradient in gradients)
    # A step that lowers the logarithm by 0.01 if the bound were smooth; it is a maximum.
    predicted = 0.01
    moved = copy.deepcopy(module)
    with torch.no_grad():
        for weight, other in zip(module.parameters(), moved.parameters(), strict=True):
            if weight.grad is not None:
                other -= predicted / steepness * weight.grad
    after = certify(moved, **asked, cross_check=False).total
    return math.log(bound / after) / predicted


def _long_chain():
    widths = [(5, 8), (8, 8), (8, 8), (8, 3)]
    maps = [nn.Linear(*shape) for shape in widths]
    return nn.Sequential(*[part for linear in maps for part in (linear, nn.ReLU())][:-1])


WITH_UNITS = {
    "feed-forward": lambda: MLP(6, 12),
    "with its skip": lambda: InvertibleResidual(MLP(6, 12)),
    "maxmin": lambda: MaxMinFeedForward(6, 12),
    "maxmin with its skip": lambda: InvertibleResidual(MaxMinFeedForward(6, 12)),
}


def _unread(first, second):
    first.weight[0] *= 10
    second.weight[:, 0] = 0


def _constant(first, second):
    second.weight[:, 1] *= 10
    first.weight[1] = 0


def _both(first, second):
    _unread(first, second)
    _constant(first, second)


def _half_of_them(first, second):
    first.weight[::2] = 0
    second.weight[:, 1::4] = 0


IDLE = {_unread: [0], _constant: [1], _both: [0, 1], _half_of_them: [0, 1, 2, 4, 5, 6]}


@pytest.mark.parametrize("idle", IDLE)
@pytest.mark.parametrize("name", WITH_UNITS)
def test_units_that_do_nothing_leave_the_gradient_right(name, idle):
    torch.manual_seed(0)
    module = WITH_UNITS[name]().double().eval()
    first, second = [part for part in module.modules() if isinstance(part, nn.Linear)][:2]
    with torch.no_grad():
        idle(first, second)
    bound = certified_bound(module, seq_len=3)
    bound.log().backward()
    assert 0.6 < _lowered(module, float(bound.detach()), {"seq_len": 3}) < 1.5


def _without(net, units):
    """Return the net without some units of its first hidden layer."""
    smaller = copy.deepcopy(net)
    first, second = [part for part in smaller.modules() if isinstance(part, nn.Linear)][:2]
    remaining = [unit for unit in range(len(first.weight)) if unit not in units]
    first.weight = nn.Parameter(first.weight.detach()[remaining])
    first.bias = nn.Parameter(first.bias.detach()[remaining])
    second.weight = nn.Parameter(second.weight.detach()[:, remaining])
    return smaller, remaining


NETWORKS = {
    "two maps": ((6, 8, 6), nn.GELU),
    "three maps": ((6, 8, 8, 6), nn.ReLU),
    "four maps": ((6, 8, 8, 8, 6), nn.ReLU),
    "three maps, tanh": ((6, 8, 8, 6), nn.Tanh),
}


@pytest.mark.parametrize("has_skip", [False, True])
@pytest.mark.parametrize("idle", IDLE)
@pytest.mark.parametrize("name", NETWORKS)
def test_units_that_do_nothing_change_neither_bound_nor_gradient(name, idle, has_skip):
    torch.manual_seed(0)
    widths, activation = NETWORKS[name]
    maps = [nn.Linear(*shape) for shape in itertools.pairwise(widths)]
    net = nn.Sequential(*[part for linear in maps for part in (linear, activation())][:-1])
    net = InvertibleResidual(net).double() if has_skip else net.double()
    with torch.no_grad():
        idle(*maps[:2])
    smaller, remaining = _without(net, IDLE[idle])
    bounds = [certified_bound(module, seq_len=3) for module in (net, smaller)]
    torch.testing.assert_close(*bounds, rtol=1e-12, atol=0)
    for bound in bounds:
        bound.backward()
    first, second = (module.grad for module in (maps[0].weight, maps[1].weight))
    others = [part.weight.grad for part in smaller.modules() if isinstance(part, nn.Linear)]
    torch.testing.assert_close(first[remaining], others[0], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(second[:, remaining], others[1], rtol=1e-9, atol=1e-12)
    for linear, other in zip(maps[2:], others[2:], strict=True):
        torch.testing.assert_close(linear.weight.grad, other, rtol=1e-9, atol=1e-12)
    # Moving a weight that no other reads changes nothing at first.
    assert not first[IDLE[idle]].any()


def test_a_unit_read_by_one_that_does_nothing_does_nothing():
    net = _long_chain().double()
    with torch.no_grad():
        net[4].weight[:, 2] = 0  # so what the third unit of the second layer alone reads is idle
        net[2].weight[:, 5] = 0
        net[2].weight[2, 5] = 1e6
    network = network_of(
        [Matrix(part.weight) if isinstance(part, nn.Linear) else Slopes(0, 1) for part in net]
    )
    first, second, third = network.units_in_use()
    assert [int(unit) for unit in (~first).nonzero()] == [5]
    assert [int(unit) for unit in (~second).nonzero()] == [2]
    assert bool(third.all())
    assert certify(net, cross_check=False).total < 1e3


@pytest.mark.parametrize("widths", [(5, 8, 8, 3), (5, 8, 8, 4, 3), (5, 8, 8, 4, 4, 3)])
def test_chains_too_costly_for_one_proof_have_the_gradient_of_their_pairs(widths, monkeypatch):
    monkeypatch.setattr("wellposed.certification.bounds._chain._LARGEST_WORK", 1.0)
    torch.manual_seed(0)
    maps = [nn.Linear(*shape) for shape in itertools.pairwise(widths)]
    layers = [part for linear in maps for part in (linear, nn.LeakyReLU(1.5))][:-1]
    net = nn.Sequential(*layers).double()
    certificate = certify(net, cross_check=False)
    assert "two maps at a time" in certificate.form
    bound = certified_bound(net)
    assert float(bound.detach()) == pytest.approx(certificate.total, rel=1e-9)
    bound.log().backward()
    for linear in maps:
        # The bound is of degree one in each matrix.
        slope = float((linear.weight.grad * linear.weight.detach()).sum())
        assert slope == pytest.approx(1.0, rel=0.05)


def test_a_product_of_zero_has_a_finite_gradient():
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 0.0]]))
        net[1].weight.copy_(torch.tensor([[0.0, 0.0], [0.0, 1.0]]))
    bound = certified_bound(net)
    bound.backward()
    assert 0 <= bound.item() < 1e-12
    assert all(weight.grad.isfinite().all() for weight in net.parameters())


@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_a_map_of_width_zero_is_constant():
    net = nn.Sequential(nn.Linear(3, 0), nn.ReLU(), nn.Linear(0, 2))
    bound = certified_bound(net)
    bound.backward()
    assert bound.item() == certify(net).total == 0.0


def test_a_few_steps_lower_the_bound_of_a_parametrised_weight_too():
    torch.manual_seed(0)

    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6)).double()
    parametrize.register_parametrization(net[0], "weight", Double())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    first = float(certified_bound(net).detach())
    for _ in range(5):
        optimizer.zero_grad()
        certified_bound(net).log().backward()
        optimizer.step()
    assert float(certified_bound(net).detach()) < 0.9 * first


def test_bad_input_is_refused_by_name():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with pytest.raises(ConfigError, match="has no gradient"):
        certified_bound(net.requires_grad_(False))
    with pytest.raises(ConfigError, match="has no gradient"):
        certified_bound(nn.ReLU())
    with pytest.raises(NotLipschitzError, match="LSTM"):
        certified_bound(nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4)))
    with pytest.raises(ConfigError, match="unknown norm"):
        certified_bound(net, norm="l2")
    with pytest.raises(
        ConfigError, match=r"attention depends on the number of tokens; pass seq_len="
    ):
        certified_bound(_body().eval())
