"""Bounds of convolutions (B20) against the singular values of their dense matrix."""

import math

import pytest
import torch
from tests.support.certificates import why
from torch import nn

from wellposed.certification import certify


def dense(layer, shape):
    """Return the matrix of a layer without its bias, by its values at unit vectors."""
    size = math.prod(shape)
    basis = torch.eye(size, dtype=torch.float64).reshape(size, *shape)
    with torch.no_grad():
        zero = layer(torch.zeros(1, *shape, dtype=torch.float64))
        return (layer(basis) - zero).flatten(1).mT


LAYERS = {
    "zeros": (nn.Conv1d, {"kernel_size": 3, "padding": 1}, 1.02),
    "no padding": (nn.Conv1d, {"kernel_size": 4}, 1.05),
    "wide padding": (nn.Conv1d, {"kernel_size": 3, "padding": 5}, 1.02),
    "circular": (nn.Conv1d, {"kernel_size": 3, "padding": 1, "padding_mode": "circular"}, 1.01),
    "same": (nn.Conv1d, {"kernel_size": 5, "padding": "same"}, 1.02),
    "stride": (nn.Conv1d, {"kernel_size": 3, "padding": 1, "stride": 2}, 1.02),
    "stride wider than the kernel": (nn.Conv1d, {"kernel_size": 2, "stride": 3}, 1.02),
    "stride of a circle": (
        nn.Conv1d, {"kernel_size": 3, "padding": 1, "stride": 2, "padding_mode": "circular"}, 3.0,
    ),
    "dilation": (nn.Conv1d, {"kernel_size": 3, "padding": 2, "dilation": 2}, 1.02),
    "dilation and stride": (nn.Conv1d, {"kernel_size": 3, "dilation": 2, "stride": 2}, 3.0),
    "groups": (nn.Conv1d, {"kernel_size": 3, "padding": 1, "groups": 2}, 1.02),
    "one tap": (nn.Conv1d, {"kernel_size": 1}, 1.00001),
    "two dimensions": (nn.Conv2d, {"kernel_size": 3, "padding": 1}, 1.15),
    "a rectangle": (nn.Conv2d, {"kernel_size": (2, 3), "padding": (1, 0), "stride": (1, 2)}, 1.15),
    "a torus": (nn.Conv2d, {"kernel_size": 3, "padding": 1, "padding_mode": "circular"}, 1.15),
    "depthwise": (nn.Conv2d, {"kernel_size": 3, "padding": 1, "groups": 4}, 1.15),
}  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", LAYERS)
def test_the_bound_is_above_the_dense_matrix_and_near_it(name, seed):
    kind, options, looseness = LAYERS[name]
    torch.manual_seed(seed)
    layer = kind(4, 8, **options).double().eval()
    sizes = (7, 40) if kind is nn.Conv1d else (5, 8)
    dimensions = 1 if kind is nn.Conv1d else 2
    exact = 0.0
    rows = 0.0
    for size in sizes:
        matrix = dense(layer, (4, *(size,) * dimensions))
        exact = max(exact, float(torch.linalg.matrix_norm(matrix, 2)))
        rows = max(rows, float(matrix.abs().sum(1).max()))
    bound = certify(layer, seq_len=4, norm=2, cross_check=False).total
    assert exact <= bound <= looseness * exact
    in_inf = certify(layer, seq_len=4, norm="inf", cross_check=False).total
    assert rows <= in_inf <= rows * (1 + 1e-9)


@pytest.mark.parametrize(
    ("kernel", "factor"), [("alternating", 3.0), ("zero", 0.0), ("tiny", 1e-6), ("huge", 1e6)]
)
def test_adversarial_kernels(kernel, factor):
    layer = nn.Conv1d(3, 3, 3, padding=1, bias=False).double()
    with torch.no_grad():
        if kernel == "alternating":
            layer.weight.zero_()
            layer.weight[0, 0] = torch.tensor([1.0, -1.0, 1.0])
        else:
            layer.weight.mul_(factor)
    exact = float(torch.linalg.matrix_norm(dense(layer, (3, 60)), 2))
    bound = certify(layer, seq_len=1, norm=2, cross_check=False).total
    assert exact <= bound <= 1.02 * exact
    assert kernel != "alternating" or bound == pytest.approx(3.0, rel=5e-3)


REFUSED = {
    "reflect": ({"padding_mode": "reflect"}, 2, "padding_mode='reflect' repeats entries"),
    "replicate": ({"padding_mode": "replicate"}, 2, "padding_mode='replicate' repeats entries"),
    "more circle than kernel": (
        {"padding_mode": "circular", "padding": 2}, 2, "wraps outputs around more than once",
    ),
    "tok": ({}, "tok", "certify in norm=2"),
    "sum": ({}, "sum", "norm sum"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_bound_is_refused_by_name(name):
    options, norm, reason = REFUSED[name]
    layer = nn.Conv1d(4, 4, 3, **{"padding": 1, **options})
    assert reason in why(layer, norm=norm, cross_check=False)


def test_a_wide_kernel_has_the_sum_of_its_taps():
    layer = nn.Conv2d(64, 64, 7, padding=3)
    taps = layer.weight.detach().double().flatten(2).movedim(-1, 0)
    total = float(torch.linalg.matrix_norm(taps, 2).sum())
    assert certify(layer, seq_len=64, norm=2, cross_check=False).total <= total * (1 + 1e-5)


def test_a_stack_of_convolutions_is_a_product():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(4, 6, 3, padding=1), nn.ReLU(), nn.Conv1d(6, 3, 3)).double()
    certificate = certify(net, seq_len=4, norm=2)
    assert [row.module for row in certificate.layers] == ["Conv1d", "ReLU", "Conv1d"]
    x, y = torch.randn(2, 1, 4, 30, dtype=torch.float64)
    assert float((net(x) - net(y)).detach().norm()) <= certificate.total * float((x - y).norm())
