"""The residual flow of the examples: its density against Jacobians of the whole flow, its samples back."""

import runpy
from pathlib import Path

import pytest
import torch

EXAMPLE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "residual_flow.py"))
LOG_DENSITY = EXAMPLE["log_density"]


@pytest.fixture(scope="module")
def flow():
    return EXAMPLE["train"](60, blocks=3, width=16).double()


def test_the_density_is_that_by_the_jacobian_of_the_whole_flow(flow):
    normal = torch.distributions.MultivariateNormal(
        torch.zeros(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)
    )
    for point in EXAMPLE["two_moons"](5, seed=1).double():
        jacobian = torch.autograd.functional.jacobian(lambda x: flow(x[None])[0], point)
        expected = normal.log_prob(flow(point[None])[0]) + torch.linalg.slogdet(jacobian).logabsdet
        density = LOG_DENSITY(flow, point[None])[0]
        assert density.item() == pytest.approx(expected.item(), abs=1e-9)


def test_the_density_sums_to_one_and_rises_on_the_data(flow):
    mass = float(EXAMPLE["density_on_grid"](flow, 6.0, 120).sum()) * 0.1**2
    assert mass == pytest.approx(1, abs=5e-3)
    points = EXAMPLE["two_moons"](500, seed=2).double()
    start = EXAMPLE["build_flow"](3, 16).double()
    with torch.no_grad():
        assert LOG_DENSITY(flow, points).mean() > LOG_DENSITY(start, points).mean() + 0.5


def test_samples_go_back_to_the_normal_they_were_drawn_as(flow):
    samples, off = EXAMPLE["draw_samples"](flow, 50)
    normal = torch.randn(50, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with torch.no_grad():
        assert (flow(samples) - normal).abs().max() < 1e-12
    assert off < 1e-9


def test_it_runs_and_draws(tmp_path, monkeypatch, capsys):
    picture = tmp_path / "flow.png"
    monkeypatch.setattr("sys.argv", ["residual_flow.py", "--steps", "1", "--out", str(picture)])
    EXAMPLE["main"]()
    assert "the density sums to 1.00" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
