"""Layers of Hugging Face models: the bound of each is what the rows of its parts give, written
out."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tests.support import families
from torch import nn

from wellposed.certification import Certificate, CertifiedLayer, certify

R = 0.05


def inside(rows: tuple[CertifiedLayer, ...], path: str) -> list[CertifiedLayer]:
    return [row for row in rows if row.path.startswith(f"{path}.")]


def of_a_layer(parts: list[CertifiedLayer]) -> float:
    """Two sublayers with residuals and a norm each: before the branch, or after the sum."""
    bounds = [part.lipschitz for part in parts]
    is_pre = "Norm" in parts[0].module
    gated = next((part.lipschitz for part in parts if part.form.startswith("gated")), None)
    if is_pre:
        first, attention, second, *forward = bounds
        return (1 + first * attention) * (
            1 + second * (math.prod(forward) if gated is None else gated)
        )
    attention, first, *forward, second = bounds
    return (1 + attention) * first * (1 + math.prod(forward)) * second


@pytest.mark.parametrize("norm", ["tok", "inf"])
@pytest.mark.parametrize(
    ("name", "model"), [pytest.param(case[1], case[2], id=case[1]) for case in families.models()]
)
def test_rows_multiply_up(name: str, model: nn.Module, norm: Any) -> None:
    certificate: Certificate = certify(
        model.eval(), seq_len=3, norm=norm, radius=R, cross_check=False
    )
    if not math.isfinite(certificate.total):
        assert "two sequences" in certificate.table()
        return
    rows = certificate.layers
    layers = [
        row
        for row in rows
        if row.module.endswith(("Layer", "Block")) and len(inside(rows, row.path)) >= 5
    ]
    assert layers or isinstance(model, nn.MultiheadAttention)
    for layer in layers:
        assert layer.lipschitz == pytest.approx(of_a_layer(inside(rows, layer.path)), rel=1e-6), (
            layer.path
        )
        assert inside(rows, layer.path)[0].radius == layer.radius
    # A pooler lies in the body, but its head calls it.
    heads = [row.path for row in rows if ".pooler." not in row.path]
    outermost = [
        row
        for row in rows
        if not any(row.path.startswith(f"{path}.") for path in heads) or ".pooler." in row.path
    ]
    assert certificate.total == pytest.approx(
        math.prod(row.lipschitz for row in outermost), rel=1e-6
    ), name
