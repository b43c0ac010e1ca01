"""What a model is worth in 8 and 4 bits: rounding by definition, and the row of a comparison."""

import json

import pytest
import torch
from scipy import stats
from tests.support.refusal import refuses_config
from torch import nn

from wellposed.compare.compare import compare
from wellposed.compare.rounding import rounded, rounded_model
from wellposed.report import aggregate
from wellposed.training import ModelOptions, RunConfig, TrainOptions
from wellposed.watch import kurtosis


def nearest(values, bits, dim):
    """The nearest of the numbers that a format has, by trying them all, in float64."""
    most = 2 ** (bits - 1) - 1
    steps = torch.arange(-most, most + 1, dtype=torch.float64)
    grid = steps * (values.double().abs().amax(dim, keepdim=True) / most)[..., None]
    place = (grid - values.double()[..., None]).abs().argmin(-1, keepdim=True)
    return grid.expand(*values.shape, -1).gather(-1, place)[..., 0]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dim", [0, 1])
def test_rounding_is_to_the_nearest_number_of_each_channel(bits, dim):
    values = torch.randn(5, 7) * torch.tensor([1e-3, 1.0, 30.0, 0.0, 1.0])[:, None]
    torch.testing.assert_close(
        rounded(values, bits, dim).double(), nearest(values, bits, dim), rtol=1e-5, atol=0
    )


def test_weights_and_what_enters_linear_maps_are_rounded_and_put_back():
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 9))
    model[3].weight = nn.Parameter(torch.randn(9, 8))
    ids, start = torch.arange(9)[None], [each.detach().clone() for each in model.parameters()]
    table, first, first_bias, second, bias = (each.double() for each in start)
    tails = {}
    with torch.no_grad(), rounded_model(model, 4, tails):
        found = model(ids)
    hidden = nearest(nearest(table, 4, 1)[ids], 4, -1) @ nearest(first, 4, 1).T + first_bias
    hidden = nearest(hidden.tanh(), 4, -1) @ nearest(second, 4, 1).T + bias
    torch.testing.assert_close(found.double(), hidden, rtol=1e-5, atol=1e-5)
    assert all(torch.equal(a, b) for a, b in zip(start, model.parameters(), strict=True))
    assert not tails
    with torch.no_grad(), rounded_model(model, None, tails):
        assert torch.equal(model(ids), model(ids))
    expected = 2 * float(stats.kurtosis(start[0].double().numpy(), axis=None, fisher=False))
    assert tails[model[1]] == pytest.approx(expected, rel=1e-5)
    assert float(
        kurtosis(torch.randn(100_000, generator=torch.Generator().manual_seed(0)))
    ) == pytest.approx(3, abs=0.1)


def test_a_comparison_has_a_column_for_each_format(tmp_path):
    train = TrainOptions(steps=2, batch_size=8)
    model = ModelOptions(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    data = {"num_train": 40, "num_valid": 8, "num_test": 8}
    base = RunConfig("listops", data, model=model, train=train)
    how = {"seeds": 1, "progress": False}
    runs = compare(
        base, ["dyt", "spectral"], out=tmp_path / "out", round_to=["int8", "int4"], **how
    )
    for folder in runs.folders:
        values = json.loads((folder / "rounded.json").read_text())["by_name"]
        assert set(values) == {
            "kurtosis,test",
            *(f"{kind}@{name},test" for kind in ("accuracy", "lost") for name in ("int8", "int4")),
        }
    table = aggregate(runs.folders).table()
    assert "accuracy@int4,test" in table
    assert "lost@int8,test" in table
    refuses_config("int3", compare, base, ["dyt"], out=tmp_path / "new", round_to=["int3"], **how)
