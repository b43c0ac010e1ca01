"""Activation factors, distances, entropies and Isomap against their formulas written out."""

import math
import statistics

import pytest
import torch

from wellposed.errors import ConfigError, ConvergenceError, ShapeError
from wellposed_studies.sengupta2023.distances import (
    activation_factors,
    token_distances,
)
from wellposed_studies.sengupta2023.entropy import differential_entropy, layer_entropy
from wellposed_studies.sengupta2023.isomap import isomap

METRICS = ["euclidean", "cosine", "dot"]


def distance(first, second, metric):
    a = first.double()
    b = second.double()
    if metric == "euclidean":
        return math.sqrt(sum((u - v) ** 2 for u, v in zip(a.tolist(), b.tolist(), strict=True)))
    inner = sum(u * v for u, v in zip(a.tolist(), b.tolist(), strict=True))
    return inner if metric == "dot" else 1 - inner / float(a.norm() * b.norm())


@pytest.mark.parametrize("metric", METRICS)
def test_eq_5_with_padding(metric):
    states = [torch.randn(2, 6, 4) for _ in range(3)]
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2])
    factors = activation_factors(states, mask, metric=metric)
    for layer, factor in zip(states[1:], factors, strict=True):
        for index, length in enumerate((6, 4)):
            pairs = [(i, j) for i in range(length) for j in range(length) if i != j]
            expected = statistics.fmean(
                distance(layer[index][i], layer[index][j], metric)
                / distance(states[0][index][i], states[0][index][j], metric)
                for i, j in pairs
            )
            assert factor[index] == pytest.approx(expected, rel=1e-9)


def test_sampled_pairs_estimate_the_mean():
    states = [torch.randn(20, 30, 8), torch.randn(20, 30, 8)]
    mask = torch.ones(20, 30)
    (exact,) = activation_factors(states, mask)
    drawn, again, other = (
        activation_factors(states, mask, pairs=100, seed=seed)[0] for seed in (1, 1, 2)
    )
    assert drawn == again != other
    error = statistics.stdev(drawn) / math.sqrt(20)
    assert statistics.fmean(drawn) == pytest.approx(statistics.fmean(exact), abs=5 * error)


def test_pairs_without_a_ratio_are_left_out():
    x = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [1.0, 0.0]], [[1.0, 1.0], [2.0, 0.0], [0.0, 3.0]]])
    mask = torch.tensor([[1, 1, 1], [1, 0, 0]])
    assert activation_factors([x, 3 * x], mask) == [[3.0]]
    x = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]])
    y = x * torch.tensor([[[0.0], [1.0], [1.0]]])
    (factor,) = activation_factors([x, y], torch.ones(1, 3), metric="cosine")
    assert factor == pytest.approx([1.0])
    with pytest.raises(ConfigError, match="two real tokens"):
        activation_factors([x, y], torch.tensor([[1, 0, 0]]))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("pairs", [None, 5])
def test_divergence_is_named_and_padding_may_hold_anything(metric, pairs):
    x = torch.randn(2, 4, 2, generator=torch.Generator().manual_seed(0))
    diverged = x.clone()
    diverged[1, 0] = math.inf
    states = [x, 2 * x, diverged]
    by = {"metric": metric, "pairs": pairs}
    with pytest.raises(ConvergenceError, match="sequence 1"):
        activation_factors(states, torch.ones(2, 4), **by)
    mask = torch.tensor([[1, 1, 1, 1], [0, 1, 1, 1]])
    assert activation_factors(states, mask, **by)[1] == pytest.approx([1, 1])
    far = torch.tensor([[[1.0, 2.0], [3.0, 5.0]]], dtype=torch.float64)
    if metric != "cosine":
        states = [far, 1e300 * far]
        with pytest.raises(ConvergenceError, match="distances"):
            activation_factors(states, torch.ones(1, 2), **by)


def test_token_distances_keep_near_tokens_apart():
    x = torch.tensor([[[1000.0, 0.0], [1000.001, 0.0], [0.0, 0.0]]])
    (near,) = token_distances([x])
    (cosine,) = token_distances([x], "cosine")
    assert near[0, 0, 1].item() == pytest.approx(float(x[0, 1, 0]) - 1000.0, rel=1e-9)
    assert cosine[0, 0, 1] == 0.0
    assert cosine[0, 0, 2].isnan()


@pytest.mark.parametrize("neighbors", [1, 3, 5])
def test_neighbours_written_out(neighbors):
    values = torch.randn(9, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    radii = [sorted(abs(a - b) for j, b in enumerate(values.tolist()) if j != i)[neighbors - 1]
             for i, a in enumerate(values.tolist())]  # fmt: skip
    psi = {n: -0.5772156649015329 + sum(1 / k for k in range(1, n)) for n in (9, neighbors)}
    expected = psi[9] - psi[neighbors] + math.log(2) + sum(map(math.log, radii)) / 9
    assert differential_entropy(values, neighbors).item() == pytest.approx(expected, rel=1e-12)
    assert differential_entropy(torch.ones(10), neighbors).item() == -math.inf
    with pytest.raises(ShapeError, match=f"more than {neighbors}"):
        differential_entropy(values[:1], neighbors)


def test_entropies_of_layers_and_heads():
    generator = torch.Generator().manual_seed(0)
    states = [torch.randn(2, 5, 24, generator=generator) for _ in range(3)]
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    entropy = layer_entropy(states, mask, heads=2)
    real = [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 0), (1, 1)]
    second = torch.stack([differential_entropy(states[1][b, t, 12:]) for b, t in real]).mean()
    assert entropy.shape == (3, 2)
    assert entropy[1, 1].item() == pytest.approx(second.item())
    states[1][1, 3] = 1e6  # padding
    assert torch.equal(layer_entropy(states, mask, heads=2), entropy)


def test_layers_that_keep_distances_coincide_in_the_picture():
    pytest.importorskip("sklearn")
    tokens = [f"t{index}" for index in range(20)]
    sheet = torch.cartesian_prod(torch.arange(4.0), torch.arange(5.0))
    lifted = sheet @ torch.linalg.qr(torch.randn(6, 2))[0].T
    rotation = torch.linalg.qr(torch.randn(6, 6))[0]
    states = [lifted[None], (lifted @ rotation)[None], (3 * lifted)[None]]
    rows = isomap(states, tokens, chosen=["t3"], neighbors=19)
    places = [(row["layer"], row["position"]) for row in rows]
    assert places == [(n, p) for n in range(3) for p in range(20)]
    assert [row["token"] for row in rows if row["chosen"]] == ["t3"] * 3
    first, second, third = torch.tensor([[row["x"], row["y"]] for row in rows]).split(20)
    # With every other token a neighbour, the graph holds the plane distances themselves.
    assert torch.allclose(torch.cdist(first, first), torch.cdist(sheet, sheet), atol=1e-4)
    assert torch.allclose(first, second, atol=1e-4)
    assert torch.allclose(third, 3 * first, atol=1e-3)
