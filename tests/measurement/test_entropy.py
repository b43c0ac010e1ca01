"""Differential entropies against closed forms and against the estimators written out."""

import math

import pytest
import torch
from tests.support.refusal import refuses

from wellposed.errors import ConfigError, ConvergenceError, ShapeError
from wellposed.measurement import differential_entropy, layer_entropy


def test_standardised_entropy_does_not_know_the_scale():
    x = torch.randn(4, 500, generator=torch.Generator().manual_seed(0))
    plain, wide = differential_entropy(x), differential_entropy(7 * x)
    assert torch.allclose(wide - plain, torch.tensor(7.0).double().log())
    fitted = [differential_entropy(scale * x + 3, standardize=True) for scale in (1, 7)]
    assert torch.allclose(fitted[0], fitted[1], atol=1e-5)  # float32 values, float64 arithmetic
    assert torch.allclose(fitted[0], plain - x.double().std(-1).log(), atol=1e-5)


@pytest.mark.parametrize("neighbors", [1, 3, 5])
def test_neighbours_written_out(neighbors):
    values = torch.randn(9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    radii = [sorted(abs(a - b) for j, b in enumerate(values.tolist()) if j != i)[neighbors - 1]
             for i, a in enumerate(values.tolist())]  # fmt: skip
    psi = {n: -0.5772156649015329 + sum(1 / k for k in range(1, n)) for n in (9, neighbors)}
    expected = psi[9] - psi[neighbors] + math.log(2) + sum(map(math.log, radii)) / 9
    assert differential_entropy(values, neighbors=neighbors).item() == pytest.approx(
        expected, rel=1e-12
    )


def test_histogram_written_out():
    values = torch.tensor([0.0, 0.1, 0.2, 1.5, 4.0])  # four bins of width 1: 3, 1, 0 and 1 of 5
    expected = -(0.6 * math.log(0.6) + 2 * 0.2 * math.log(0.2))
    assert differential_entropy(values, "histogram", bins=4).item() == pytest.approx(expected)
    larger = differential_entropy(3 * values, "histogram", bins=4).item()
    assert larger == pytest.approx(expected + math.log(3))


@pytest.mark.parametrize("estimator", ["knn", "histogram"])
@pytest.mark.parametrize("standardize", [False, True])
def test_equal_values_have_no_density(estimator, standardize):
    x = torch.stack([torch.ones(10), torch.linspace(0, 1, 10)])
    found = differential_entropy(x, estimator, standardize=standardize)
    assert found[0].item() == -math.inf
    assert math.isfinite(found[1].item())


def test_layers_and_heads():
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(2, 5, 24, generator=generator) for _ in range(3)]
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    found = layer_entropy(states, heads=2, attention_mask=mask)
    real = [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1)]
    second = torch.stack([differential_entropy(states[1][b, t, 12:]) for b, t in real]).mean()
    assert found.shape == (3, 2)
    assert found[1, 1].item() == pytest.approx(second.item())
    states[1][1, 3] = 1e6  # padding
    assert torch.equal(layer_entropy(states, heads=2, attention_mask=mask), found)


def test_bad_input():
    x = torch.randn(1, 2, 8)
    refuses(ConfigError, "estimator = 'kernel'", differential_entropy, x, "kernel")
    refuses(ConfigError, "neighbors = 0", differential_entropy, x, neighbors=0)
    refuses(ConfigError, "bins = 0", differential_entropy, x, "histogram", bins=0)
    refuses(ShapeError, "at least 4 values", differential_entropy, torch.randn(3))
    refuses(ShapeError, r"torch\.int64", differential_entropy, torch.arange(9))
    with pytest.raises(ConvergenceError, match="1 of 2 values"):
        differential_entropy(torch.tensor([1.0, math.nan]), "histogram")
    refuses(ShapeError, "heads = 3", layer_entropy, [x, x], heads=3)
    refuses(ConfigError, "no real token", layer_entropy, [x, x], attention_mask=torch.zeros(1, 2))
