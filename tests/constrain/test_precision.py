"""Weights of 16 bits in a constrained optimizer: those without a float32 copy are named, once."""

import logging

import pytest
import torch
from torch import nn

import wellposed as wp
from wellposed.half_weights import lost_steps

DTYPES = {torch.bfloat16: 512, torch.float16: 4096, torch.float32: None, torch.float64: None}
SETS = ("orthogonal", "spectral", "columns")


def model_in(dtype):
    """A layer without a bias, which every set can cover, and another one."""
    torch.manual_seed(0)
    layers = {"inside": nn.Linear(8, 8, bias=False), "outside": nn.Linear(8, 8, bias=False)}
    return nn.ModuleDict(layers).to(dtype)


def warnings_of(caplog):
    return [record.message for record in caplog.records if "rounded away" in record.message]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("to", SETS)
def test_constrain_names_the_weights_without_a_float32_copy(to, dtype, caplog):
    model = model_in(dtype)
    optimizer = torch.optim.SGD(model.parameters())
    with caplog.at_level(logging.WARNING):
        wp.constrain_(model, optimizer, where="inside", to=to)
    if dtype is not torch.bfloat16:
        assert warnings_of(caplog) == []
        return
    (warning,) = warnings_of(caplog)
    count = "1 trained weight is" if to == "orthogonal" else "2 trained weights are"
    assert f"constrain_: {count} bfloat16: steps below 1/512 of an entry" in warning
    assert "unless SGD keeps float32 copies" in warning
    assert "dtype=torch.float32" in warning


def test_an_optimizer_of_orthogonal_weights_alone_loses_nothing(caplog):
    model = model_in(torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters())
    with caplog.at_level(logging.WARNING):
        wp.constrain_(model, optimizer, where=("inside", "outside"))
    assert warnings_of(caplog) == []


def test_rows_of_a_fused_weight_that_no_set_covers_are_without_a_copy(caplog):
    """Queries are kept in float32; keys and values of the same parameter are not."""
    model = nn.MultiheadAttention(8, 2, bias=False).bfloat16()
    optimizer = torch.optim.SGD([model.in_proj_weight])
    with caplog.at_level(logging.WARNING):
        wp.constrain_(model, optimizer, where="query")
    (warning,) = warnings_of(caplog)
    assert "1 trained weight is bfloat16" in warning


def test_a_plan_says_nothing_and_frozen_weights_are_not_counted(caplog):
    model = model_in(torch.bfloat16)
    model["outside"].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters())
    with caplog.at_level(logging.WARNING):
        wp.constrain_(model, optimizer, where="inside", to="spectral", dry_run=True)
        assert warnings_of(caplog) == []
        wp.constrain_(model, optimizer, where="inside", to="spectral")
    (warning,) = warnings_of(caplog)
    assert "1 trained weight is bfloat16" in warning


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_step_below_the_share_is_lost_and_twice_the_share_is_not(dtype):
    """All entries of two powers of two, as float64 rounds them."""
    share = DTYPES[dtype]
    line = lost_steps([nn.Parameter(torch.ones(1, dtype=dtype))])
    if share is None:
        assert line == ""
        return
    assert f"below 1/{share} of an entry" in line
    count = round(1 / torch.finfo(dtype).eps)
    entries = torch.arange(count, 4 * count, dtype=torch.float64) / count
    entries = entries[entries.to(dtype).double() == entries]
    for part, is_lost in ((0.999, True), (2.001, False)):
        stepped = (entries + entries * part / share).to(dtype).double()
        assert (stepped == entries).all() if is_lost else (stepped != entries).all(), part
