"""Metric names are public: this file pins them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from wellposed.errors import ConfigError, ConvergenceError
from wellposed.measurement import Monitor, measure

QUICK = ["scale_free_orthogonality_error", "orthogonality_error", "sigma_max", "stable_rank"]
EXACT = [*QUICK, "sigma_min", "condition_number"]
SELF = ["query", "key", "value", "output"]
FEEDFORWARD = ["feedforward_in", "feedforward_out"]


def test_names_of_an_encoder() -> None:
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 2, enable_nested_tensor=False
    )
    expected = {
        f"cond/encoder.{i}.{role}/{number}"
        for i in (0, 1)
        for role in SELF + FEEDFORWARD
        for number in QUICK
    }
    assert set(Monitor(model, every=5).step()) == expected
    assert set(Monitor(model, spectra=True).step()) == {
        f"cond/encoder.{i}.{role}/{number}"
        for i in (0, 1)
        for role in SELF + FEEDFORWARD
        for number in EXACT
    }


def test_names_of_cross_attention() -> None:
    model = nn.Transformer(8, 2, 1, 1, 12, batch_first=True)
    names = set(Monitor(model).step())
    assert {f"cond/decoder.0.cross_{role}/sigma_max" for role in SELF} <= names
    assert {f"cond/decoder.0.{role}/sigma_max" for role in SELF} <= names
    assert len(names) == (6 + 10) * len(QUICK)


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (
            nn.TransformerEncoderLayer(8, 2, 12, batch_first=True) for _ in range(2)
        )


def test_weights_that_would_share_a_name_carry_their_path() -> None:
    names = set(Monitor(Towers()).step())
    assert "cond/encoder.0.query@left.self_attn/sigma_max" in names
    assert "cond/encoder.0.query@right.self_attn/sigma_max" in names


def test_values_are_those_of_measure_and_come_every_k_steps() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    monitor = Monitor(model, every=3, spectra=True)
    steps = [monitor.step() for _ in range(7)]
    assert [bool(step) for step in steps] == [True, False, False, True, False, False, True]
    for row in measure(model).rows:
        for number in EXACT:
            assert steps[0][f"cond/encoder.0.{row['role']}/{number}"] == row[number]


def test_follows_the_weights_and_leaves_no_trace() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    attributes = [sorted(vars(module)) for module in model.modules()]
    state = torch.get_rng_state()
    monitor = Monitor(model, every=1)
    first = monitor.step()
    with torch.no_grad():
        model.linear1.weight.mul_(3)
    second = monitor.step()
    key = "cond/encoder.0.feedforward_in/"
    assert second[key + "sigma_max"] == pytest.approx(3 * first[key + "sigma_max"], rel=1e-5)
    assert second[key + "orthogonality_error"] == pytest.approx(
        9 * first[key + "orthogonality_error"], rel=1e-5
    )
    scale_free = key + "scale_free_orthogonality_error"
    assert second[scale_free] == pytest.approx(first[scale_free], rel=1e-5)
    assert second[key + "stable_rank"] == pytest.approx(first[key + "stable_rank"], rel=1e-5)
    assert torch.equal(torch.get_rng_state(), state)
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    assert all(parameter.grad is None for parameter in model.parameters())


def test_bad_input() -> None:
    model = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    for every in (0, -1, 2.5, True):
        with pytest.raises(ConfigError, match="every = "):
            Monitor(model, every=every)
    monitor = Monitor(model)
    with torch.no_grad():
        model.linear1.weight[0, 0] = torch.nan
    with pytest.raises(ConvergenceError, match=r"linear1\.weight"):
        monitor.step()
