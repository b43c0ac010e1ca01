"""`certified_bound`: its value is the certificate's, its gradient the slope of that value."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from wellposed.certification import certified_bound, certify
from wellposed.errors import ConfigError, NotLipschitzError
from wellposed.models import WellposedConfig, WellposedModel
from wellposed.nn import MLP, InvertibleResidual, MaxMinFeedForward


def _body(**options):
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "norm": "none"}
    return WellposedModel(WellposedConfig(**{**sizes, "attention": "l2_tied", **options}))


def _with_dead_units():
    """One hidden unit is not read, and one reads nothing."""
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    with torch.no_grad():
        net[0].weight[0] *= 10
        net[2].weight[:, 0] = 0
        net[0].weight[1] = 0
    return net


NETS = {
    "one linear map": lambda: nn.Linear(6, 4),
    "feed-forward": lambda: MLP(6, 12),
    "with its skip": lambda: InvertibleResidual(MLP(6, 12)),
    "maxmin with its skip": lambda: InvertibleResidual(MaxMinFeedForward(6, 12)),
    "dead units": _with_dead_units,
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
    lowered = math.log(float(bound.detach()) / after)
    assert (0.6 if norm == "tok" else 0.1) * predicted < lowered < 1.5 * predicted


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
