"""Isomap of tokens: a flat sheet is laid out flat, layers are turned onto each other, never
scaled."""

import csv
import math

import pytest
import torch
from tests.support.refusal import refuses

from wellposed.errors import ConfigError, ConvergenceError, ShapeError
from wellposed.measurement import isomap

pytest.importorskip("sklearn")
TOKENS = [f"t{index}" for index in range(20)]


def sheet():
    """A 4 x 5 grid in the plane."""
    return torch.cartesian_prod(torch.arange(4.0), torch.arange(5.0))


def points(rows, layer):
    return torch.tensor([[row["x"], row["y"]] for row in rows if row["layer"] == layer])


def test_layers_that_keep_distances_coincide_in_the_picture():
    lifted = sheet() @ torch.linalg.qr(torch.randn(6, 2))[0].T
    rotation = torch.linalg.qr(torch.randn(6, 6))[0]
    found = isomap(
        [lifted[None], (lifted @ rotation)[None], (3 * lifted)[None]], TOKENS, neighbors=19
    )
    first, second, third = (points(found.rows, layer) for layer in range(3))
    # With every other token a neighbour, the graph holds the plane distances themselves.
    assert torch.allclose(torch.cdist(first, first), torch.cdist(sheet(), sheet()), atol=1e-4)
    assert torch.allclose(first, second, atol=1e-4)
    assert torch.allclose(third, 3 * first, atol=1e-3)
    assert found.residual_variance == pytest.approx([0.0] * 3, abs=1e-5)


def test_rows(tmp_path):
    states = [torch.randn(1, 20, 4) for _ in range(2)]
    found = isomap(states, TOKENS, chosen=["t3"], neighbors=6)
    places = [(row["layer"], row["position"]) for row in found.rows]
    assert places == [(n, p) for n in range(2) for p in range(20)]
    assert [row["token"] for row in found.rows if row["chosen"]] == ["t3", "t3"]
    with found.to_csv(tmp_path / "figure-4.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 40


def test_bad_input():
    states = [torch.randn(1, 20, 4)] * 2
    refuses(ShapeError, "3 names", isomap, states, TOKENS[:3])
    says = "neighbors = 20, expected at most 19 with 20 tokens$"
    refuses(ConfigError, says, isomap, states, TOKENS, neighbors=20)
    says = r"isomap: chosen tokens \['zebra'\] do"
    refuses(ConfigError, says, isomap, states, TOKENS, chosen=["zebra"])
    for neighbors in (True, 2.0):
        says = rf"neighbors = {neighbors}, expected an integer"
        refuses(ConfigError, says, isomap, states, TOKENS, neighbors=neighbors)
    with pytest.raises(ShapeError, match="at least three"):
        isomap([torch.randn(1, 2, 4)] * 2, TOKENS[:2], neighbors=1)
    flat = torch.ones(1, 20, 4)
    refuses(ConfigError, r"equal in states \[1, 2\]", isomap, [states[0], flat, 0 * flat], TOKENS)
    flat[0, 3, :2] = math.nan
    flat[0, 4, 1] = -math.inf
    with pytest.raises(
        ConvergenceError, match=r"isomap: .*\n  state 1: 3 of 80 values, in 2 tokens\n"
    ):
        isomap([states[0], flat], TOKENS)


def test_equal_distances_correlate_with_nothing():
    triangle = torch.eye(3)[None]
    assert math.isnan(isomap([triangle, triangle], TOKENS[:3], neighbors=2).residual_variance[0])
