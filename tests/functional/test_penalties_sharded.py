"""Penalties of sharded weights are those of the whole ones, in value and gradient; on a mesh of one
process."""

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from wellposed.errors import ConfigError
from wellposed.functional import gram_penalty, orthogonality_errors, qr_penalty


def spread(matrix, mesh, placement):
    cut = matrix.clone() if placement is None else distribute_tensor(matrix, mesh, [placement])
    return nn.Parameter(cut)


ROWS = Shard(0)
COLUMNS = Shard(1)
ALL = Replicate()
PLACED = [[ROWS], [COLUMNS], [ALL], [ROWS, ROWS], [COLUMNS, COLUMNS], [ROWS, COLUMNS]]
PLACED += [[ALL, None], [None, ROWS]]


@pytest.mark.parametrize("placements", PLACED, ids=lambda listed: "-".join(map(str, listed)))
@pytest.mark.parametrize("tall", [True, False], ids=["tall", "wide"])
def test_the_gram_penalty_of_shards(placements, tall, mesh):
    shapes = [(6, 4), (3, 4)] if tall else [(2, 4), (1, 4)]
    wholes = [torch.randn(shape, dtype=torch.float64) for shape in shapes[: len(placements)]]
    for squared, side in itertools.product((True, False), ("columns", "rows")):
        plain = [nn.Parameter(matrix.clone()) for matrix in wholes]
        expected = gram_penalty(plain, squared=squared, side=side)
        slopes = torch.autograd.grad(expected, plain)
        placed = zip(wholes, placements, strict=True)
        weights = [spread(matrix, mesh, placement) for matrix, placement in placed]
        actual = gram_penalty(weights, squared=squared, side=side)
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
        actual.backward()
        for weight, slope in zip(weights, slopes, strict=True):
            grad = weight.grad.full_tensor() if hasattr(weight.grad, "full_tensor") else weight.grad
            torch.testing.assert_close(grad, slope, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("placement", [ROWS, COLUMNS, ALL], ids=str)
@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_qr_and_errors_of_shards(placement, shape, mesh):
    matrix = torch.randn(shape, dtype=torch.float64)
    plain = nn.Parameter(matrix.clone())
    weight = spread(matrix, mesh, placement)
    for method in ("householder", "gram_schmidt"):
        expected = qr_penalty(plain, method)
        actual = qr_penalty(weight, method)
        assert actual.item() == expected.item()
        (slope,) = torch.autograd.grad(expected, plain)
        (gradient,) = torch.autograd.grad(actual, weight)
        torch.testing.assert_close(gradient.full_tensor(), slope, rtol=1e-12, atol=1e-12)
    assert orthogonality_errors(weight) == orthogonality_errors(plain)
    with pytest.raises(ConfigError, match="quantised"):
        gram_penalty(distribute_tensor(torch.ones(2, 2, dtype=torch.int8), mesh, [placement]))
