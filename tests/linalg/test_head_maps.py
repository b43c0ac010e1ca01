"""Norms of sums of maps, beside a search for the largest value in float64."""

import itertools
import math

import pytest
import torch

from wellposed.linalg import HeadMaps, shared_points_norm


def random_maps(seed, heads=3, rows=2, width=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(heads, rows, width, generator=generator, dtype=torch.float64)


def largest_sum(maps, sizes, tries=200):
    """Alternate between the outputs' direction and the best inputs; a lower bound."""
    generator = torch.Generator().manual_seed(1)
    best = 0.0
    for _ in range(tries):
        direction = torch.randn(maps.shape[-1], generator=generator, dtype=torch.float64)
        for _ in range(40):
            inputs = torch.nn.functional.normalize(maps @ direction, dim=-1) * sizes[:, None]
            output = torch.einsum("hre,hr->e", maps, inputs)
            direction = output / output.norm().clamp_min(1e-300)
        best = max(best, float(output.norm()))
    return best


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("sizes", [(1.0, 1.0, 1.0), (5.0, 0.1, 1.0), (1.0, 0.0, 2.0)])
def test_a_sum_of_maps_is_bounded_and_nearly_reached(seed, sizes):
    maps = random_maps(seed)
    sizes = torch.tensor(sizes, dtype=torch.float64)
    bound = float(HeadMaps(maps).joined(sizes))
    assert bound / 1.6 <= largest_sum(maps, sizes, tries=20) <= bound


def test_orthogonal_outputs_add_as_squares():
    maps = (
        torch.eye(6, dtype=torch.float64).reshape(3, 2, 6)
        * torch.tensor([1.0, 4.0, 9.0])[:, None, None]
    )
    sizes = torch.tensor([3.0, 2.0, 0.5])
    expected = math.sqrt(9 + 64 + 4.5**2)
    assert float(HeadMaps(maps).joined(sizes)) == pytest.approx(expected, rel=1e-5)


def test_a_map_of_zeros_is_constant_whatever_enters():
    maps = torch.zeros(2, 2, 3)
    assert float(HeadMaps(maps).joined(torch.tensor([math.inf, 1.0]))) == 0
    maps[1, 0, 0] = 1.0
    assert float(HeadMaps(maps).joined(torch.tensor([math.inf, 1.0]))) == pytest.approx(
        1.0, rel=1e-5
    )
    assert float(HeadMaps(maps).joined(torch.tensor([1.0, math.inf]))) == math.inf


@pytest.mark.parametrize("size", [1e-150, 1e-6, 1.0, 1e6, 1e150])
def test_products_keep_their_norm_at_every_size(size):
    left = random_maps(0, 2, 6, 3) * size
    right = random_maps(1, 2, 3, 4)
    product = HeadMaps.product(left, right)
    exact = torch.linalg.matrix_norm(left @ right, 2)
    assert bool((product.norms >= exact).all())
    assert bool((product.norms <= exact * (1 + 1e-5)).all())


def points(generator, count=3, width=4):
    x = torch.randn(count, width, generator=generator, dtype=torch.float64)
    return x / x.norm(dim=-1, keepdim=True).clamp_min(1.0)


def covariance(x, share):
    middle = x - share @ x
    return middle.T @ (share[:, None] * middle)


@pytest.mark.parametrize("seed", range(4))
def test_covariances_of_points_of_the_ball(seed):
    """|A^T S B| for covariances of points that an ascent places."""
    left = random_maps(seed, 1, 4, 2)
    right = random_maps(seed + 50, 1, 4, 3)
    bound = float(shared_points_norm(HeadMaps(left), HeadMaps(right)))
    assert bound <= float(HeadMaps(left).norms * HeadMaps(right).norms) * (1 + 1e-9)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(64, 3, 4, generator=generator, dtype=torch.float64).requires_grad_()
    logits = torch.randn(64, 3, generator=generator, dtype=torch.float64).requires_grad_()
    optimizer = torch.optim.Adam([x, logits], lr=0.05, maximize=True)
    for _ in range(150):
        optimizer.zero_grad()
        inside = x / x.norm(dim=-1, keepdim=True).clamp_min(1.0)
        share = logits.softmax(-1)
        middle = inside - (share[..., None] * inside).sum(1, keepdim=True)
        spread = middle.mT @ (share[..., None] * middle)
        reached = torch.linalg.matrix_norm(left[0].T @ spread @ right[0], 2)
        reached.sum().backward()
        optimizer.step()
    assert 0.9 * bound <= float(reached.detach().max()) <= bound


def test_orthogonal_readings_halve_the_product():
    left = torch.eye(4, dtype=torch.float64)[None, :, :2]
    right = torch.eye(4, dtype=torch.float64)[None, :, 2:]
    both = [HeadMaps(part) for part in (left, right)]
    assert float(shared_points_norm(*both)) == pytest.approx(0.5, rel=1e-5)
    assert float(shared_points_norm(both[0], both[0])) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_all_heads_read_one_vector(seed):
    """The joint bound covers every choice of covariances, one for each head."""
    outward = random_maps(seed, 3, 2, 5)
    inner = random_maps(seed + 9, 3, 2, 5)
    bound = float(HeadMaps(outward).through_points(HeadMaps(inner)))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(200):
        spreads = [
            covariance(
                points(generator, width=2),
                torch.rand(3, generator=generator, dtype=torch.float64).softmax(0),
            )
            for _ in range(3)
        ]
        total = sum(m.T @ s @ b for m, s, b in zip(outward, spreads, inner, strict=True))
        assert float(torch.linalg.matrix_norm(total, 2)) <= bound
    corners = itertools.product([0.0, 1.0], repeat=6)
    for corner in corners:
        total = sum(
            outward[h].T
            @ torch.diag(torch.tensor(corner[2 * h : 2 * h + 2], dtype=torch.float64))
            @ inner[h]
            for h in range(3)
        )
        # A diagonal of both ones has a trace of 2, above that of points of the unit ball.
        if all(sum(corner[2 * h : 2 * h + 2]) <= 1 for h in range(3)):
            assert float(torch.linalg.matrix_norm(total, 2)) <= bound
