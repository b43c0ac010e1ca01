"""The parametrisation: orthogonal at every step, starts and loads at the nearest matrix, leaves
plainly."""

import pytest
import torch
from tests.support.constrained import isometry_error
from torch import nn
from torch.nn.utils import parametrize

from wellposed.constrain import orthogonal
from wellposed.errors import ConfigError, ConvergenceError, ShapeError

SHAPES = [(6, 6), (9, 4), (4, 9)]


def nearest(weight):
    left, _, right = torch.linalg.svd(weight.detach().double(), full_matrices=False)
    return left @ right


def step(layer, optimizer):
    optimizer.zero_grad()
    x = torch.randn(32, layer.in_features)
    (layer(x) - x.sum(-1, keepdim=True).sin()).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gain", [1.0, 0.5])
def test_starts_at_the_nearest_matrix_and_stays_orthogonal(shape, gain):
    layer = nn.Linear(shape[1], shape[0])
    before = layer.weight.detach().clone()
    orthogonal(layer, gain=gain)
    assert torch.allclose(layer.weight.double(), gain * nearest(before), atol=2e-6)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-2)
    for _ in range(40):
        step(layer, optimizer)
    assert isometry_error(layer.weight / gain) <= 1e-5
    assert float((layer.weight.detach() - gain * nearest(before)).norm()) > 0.1


@pytest.mark.parametrize("shape", SHAPES)
def test_both_components_are_reached_and_an_assigned_weight_is_projected(shape):
    layer = orthogonal(nn.Linear(shape[1], shape[0]))
    for sign in (1.0, -1.0):
        target = nearest(torch.randn(shape))
        if shape[0] == shape[1] and float(torch.linalg.det(target)) * sign < 0:
            target[0] = -target[0]
        layer.weight = target.float()
        assert torch.allclose(layer.weight.double(), target, atol=2e-6)
    layer.weight = torch.randn(shape)
    assert isometry_error(layer.weight) <= 1e-5


@pytest.mark.parametrize("shape", SHAPES)
def test_moving_the_base_keeps_the_weight(shape):
    layer = orthogonal(nn.Linear(shape[1], shape[0]))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.3)
    for _ in range(5):
        step(layer, optimizer)
    before = layer.weight.detach().clone()
    layer.weight = layer.weight
    assert torch.allclose(layer.weight, before, atol=2e-6)
    assert not layer.get_parameter("parametrizations.weight.original").any()


@pytest.mark.parametrize("shape", SHAPES)
def test_state_dict_round_trip_and_plain_checkpoint(shape):
    layer = orthogonal(nn.Linear(shape[1], shape[0]))
    step(layer, torch.optim.SGD(layer.parameters(), lr=0.3))
    fresh = nn.Sequential(orthogonal(nn.Linear(shape[1], shape[0])))
    fresh.load_state_dict({f"0.{key}": value for key, value in layer.state_dict().items()})
    x = torch.randn(5, shape[1])
    assert torch.equal(fresh(x), layer(x))

    plain = nn.Sequential(nn.Linear(shape[1], shape[0]))
    fresh.load_state_dict(plain.state_dict())
    assert torch.allclose(fresh[0].weight.double(), nearest(plain[0].weight), atol=2e-6)
    assert torch.equal(fresh[0].bias, plain[0].bias)

    expected = layer(x)
    baked = parametrize.remove_parametrizations(layer, "weight")
    assert set(baked.state_dict()) == {"bias", "weight"}
    assert torch.allclose(baked(x), expected, atol=1e-6)
    baked.load_state_dict(plain[0].state_dict())
    assert torch.equal(baked.weight, plain[0].weight)


def test_without_base_it_is_the_bare_cayley_map():
    layer = nn.Linear(5, 5)
    skew = torch.randn(5, 5)
    with torch.no_grad():
        layer.weight.copy_(torch.matrix_exp(0.3 * (skew - skew.T)))
    start = layer.weight.detach().clone()
    orthogonal(layer, base=False)
    assert torch.allclose(layer.weight, start, atol=1e-5)
    assert not list(layer.buffers())
    optimizer = torch.optim.AdamW(layer.parameters(), lr=3e-2)
    for _ in range(20):
        step(layer, optimizer)
    assert isometry_error(layer.weight) <= 1e-5
    assert float(torch.linalg.det(layer.weight.detach())) > 0
    mirror = nn.Linear(2, 2)
    mirror.weight = nn.Parameter(torch.diag(torch.tensor([1.0, -1.0])))
    with pytest.raises(ConvergenceError, match="base"):
        orthogonal(mirror, base=False)


def test_bfloat16_is_computed_in_float32():
    layer = orthogonal(nn.Linear(16, 16).to(torch.bfloat16))
    assert layer.weight.dtype == torch.bfloat16
    assert isometry_error(layer.weight) <= 4e-3
    for shape in ((64, 64), (64, 96), (96, 64)):
        later = orthogonal(nn.Linear(*shape)).to(torch.bfloat16)
        assert isometry_error(later.weight) <= 8e-3
    full = orthogonal(nn.Linear(16, 16))
    with torch.autocast("cpu", torch.bfloat16):
        assert isometry_error(full.weight) <= 1e-5


@pytest.mark.parametrize("shape", SHAPES)
# torch.compile raises the warning inside.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compiles_whole(shape):
    layer = orthogonal(nn.Linear(shape[1], shape[0]))
    x = torch.randn(3, shape[1])
    run = torch.compile(lambda x: layer(x).sin().sum(), backend="aot_eager", fullgraph=True)
    layer(x).sin().sum().backward()
    original = layer.get_parameter("parametrizations.weight.original")
    expected = original.grad.clone()
    original.grad = None
    run(x).backward()
    assert torch.allclose(original.grad, expected, atol=1e-6)


def test_bad_input():
    with pytest.raises(ConfigError, match="nearest: weight"):
        orthogonal(nn.Linear(3, 3), "wieght")
    with pytest.raises(ShapeError, match="bias"):
        orthogonal(nn.Linear(3, 3), "bias")
    with pytest.raises(ConfigError, match="gain"):
        orthogonal(nn.Linear(3, 3), gain=0.0)
    layer = orthogonal(nn.Linear(3, 3))
    with pytest.raises(ConfigError, match="received Tensor"):
        orthogonal(layer)
    with pytest.raises(ShapeError, match=r"\(3, 3\)"):
        layer.parametrizations.weight[0].solve(torch.zeros(2, 3))
