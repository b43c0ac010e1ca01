import math

import pytest
import torch

from wellposed.nn import LearnedPositions, SinusoidalPositions


@pytest.mark.parametrize("width", [1, 2, 7, 8])
def test_sinusoids_equal_the_formula(width):
    table = SinusoidalPositions(50, width, scale=0.5).double()
    table.reset_parameters()
    codes = table(torch.arange(50))
    for p in (0, 1, 17, 49):
        for c in range(width):
            angle = p / 10000 ** (2 * (c // 2) / width)
            wave = math.sin(angle) if c % 2 == 0 else math.cos(angle)
            assert codes[p, c].item() == pytest.approx(0.5 * wave, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_a_cast_table_is_as_exact_as_a_new_one(dtype):
    codes = SinusoidalPositions(50, 8, scale=0.3)
    fresh = SinusoidalPositions(50, 8, scale=0.3).double().table.to(dtype)
    assert torch.equal(codes.to(torch.bfloat16).to(dtype).table, fresh)
    assert codes.to("meta").to(torch.float64).table.is_meta


def test_large_angles_keep_float32_accuracy():
    table = SinusoidalPositions(100_001, 2)
    assert table(torch.tensor([100_000]))[0, 0].item() == pytest.approx(
        math.sin(100_000.0), abs=1e-7
    )


def test_sinusoids_have_no_weights():
    table = SinusoidalPositions(5, 4)
    assert table.state_dict() == {}
    assert sum(p.numel() for p in table.parameters()) == 0


def test_learned_positions_are_a_table():
    table = LearnedPositions(5, 4)
    assert torch.equal(table(torch.tensor([[3, 0]])), table.weight[[3, 0]][None])
