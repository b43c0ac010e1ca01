"""An invertible residual flow on two moons: density by the log-determinant, samples by the inverse.

    python examples/residual_flow.py                  # about a minute of one core
    python examples/residual_flow.py --out flow.png   # and a picture

A block maps x to `x + f(x)` with a slope of f below 1, so it has an inverse (Behrmann et al. 2019).
The density of x is that of a normal at the end of the blocks, times their determinants.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn

import wellposed as wp
from wellposed.nn import InvertibleResidual, ReversibleSequential

BOUND = 0.97
"""Largest spectral norm of each of the three matrices of a branch; the activations have slope 1."""


def two_moons(count: int, seed: int) -> Tensor:
    """Return points (count, 2) on two half circles, with noise."""
    generator = torch.Generator().manual_seed(seed)
    angle = math.pi * torch.rand(count, generator=generator)
    upper = torch.rand(count, generator=generator) < 0.5
    x = torch.where(upper, angle.cos(), 1 - angle.cos())
    y = torch.where(upper, angle.sin(), 0.5 - angle.sin())
    noise = 0.1 * torch.randn(count, 2, generator=generator)
    return 2 * (torch.stack([x, y], -1) - torch.tensor([0.5, 0.25])) + noise


def build_flow(blocks: int, width: int) -> ReversibleSequential:
    """Return the flow; each branch has a bound of `BOUND` to the power 3 once it is constrained."""
    layers = []
    for _ in range(blocks):
        branch = nn.Sequential(
            nn.Linear(2, width), nn.ELU(), nn.Linear(width, width), nn.ELU(), nn.Linear(width, 2)
        )
        layers.append(InvertibleResidual(branch, lipschitz=BOUND**3, norm=2))
    return ReversibleSequential(layers)


def log_density(flow: ReversibleSequential, x: Tensor) -> Tensor:
    """Return log p(x), (batch,): that of a normal at the flow's end, plus the log-determinants."""
    determinants = x.new_zeros(len(x), dtype=torch.float64)
    for block in flow.blocks:
        assert isinstance(block, InvertibleResidual)
        determinants = determinants + block.log_abs_det(x, method="exact").value
        x = block(x)
    normal = -0.5 * x.square().sum(-1) - math.log(2 * math.pi)
    return normal + determinants


def train(steps: int, *, blocks: int = 8, width: int = 64) -> ReversibleSequential:
    """Return a trained flow; the bounds of its matrices hold after every step."""
    torch.manual_seed(0)
    flow = build_flow(blocks, width)
    optimizer = torch.optim.Adam(flow.parameters(), lr=2e-3)
    wp.constrain_(flow, optimizer, where="*.f.*", to="spectral", bound=BOUND)
    for step in range(1, steps + 1):
        loss = -log_density(flow, two_moons(256, seed=step)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step}: {loss:.3f} nats")
    return flow


@torch.no_grad()
def density_on_grid(flow: ReversibleSequential, reach: float, cells: int) -> Tensor:
    """Return p at the centres of a grid of cells over [-reach, reach]^2, (cells, cells)."""
    centres = reach * ((2 * torch.arange(cells) + 1) / cells - 1)
    x, y = torch.meshgrid(centres, centres, indexing="xy")
    points = torch.stack([x, y], -1).reshape(-1, 2).to(next(flow.parameters()).dtype)
    return log_density(flow, points).exp().reshape(cells, cells)


def draw_samples(flow: ReversibleSequential, count: int = 350) -> tuple[Tensor, float]:
    """Return samples (count, 2), the inverse of a normal, and a bound on their error."""
    generator = torch.Generator().manual_seed(0)
    # In float64: each block may multiply an error by 1 / (1 - BOUND^3).
    normal = torch.randn(count, 2, generator=generator, dtype=torch.float64)
    samples, report = flow.double().inverse(normal)
    return samples, report.error_bound


def draw(flow: ReversibleSequential, samples: Tensor, path: str) -> None:
    """Write a picture of the data, the density, and the samples."""
    from matplotlib.figure import Figure

    reach = 4.0
    figure = Figure(figsize=(9, 3.2), layout="constrained")
    data, density, drawn = figure.subplots(1, 3)
    for axes in (data, density, drawn):
        axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
    points = two_moons(350, seed=0)
    style = {"s": 3, "color": "#0d64be"}
    data.scatter(*points.T.tolist(), **style)
    data.set_title("data")
    values = density_on_grid(flow, reach, 120)
    density.imshow(values.numpy(), origin="lower", extent=(-reach, reach, -reach, reach))
    density.set_title("density by the log-determinant")
    drawn.scatter(*samples.T.tolist(), **style)
    drawn.set_title("samples by the inverse")
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--out", help="write a picture to this file")
    options = parser.parse_args()
    flow = train(options.steps)

    points = two_moons(2000, seed=0)
    with torch.no_grad():
        loss = -float(log_density(flow, points).mean())
    covariance = torch.cov(points.T)
    gaussian = 1 + math.log(2 * math.pi) + 0.5 * float(torch.logdet(covariance))
    print(f"nats on other points: flow {loss:.3f}, the best Gaussian {gaussian:.3f}")

    mass = float(density_on_grid(flow, 6.0, 240).sum()) * (12 / 240) ** 2
    print(f"the density sums to {mass:.4f}")

    samples, off = draw_samples(flow)
    print(f"samples by the inverse: off by {off:.1e} at most")
    if options.out:
        draw(flow, samples, options.out)


if __name__ == "__main__":
    main()
