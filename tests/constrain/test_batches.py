"""How many weights one batched product takes, and that it is those of one shape, dtype and size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from wellposed.constrain import constrain_

SETS: dict[str, str] = {
    "orthogonal": "wellposed.constrain._stiefel.OrthogonalWeight",
    "spectral": "wellposed.constrain._weight.SpectralWeight",
    "columns": "wellposed.constrain._weight.ColumnWeight",
}


def groups_of_a_step(
    shapes: Sequence[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    *,
    to: Any = "orthogonal",
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> list[int]:
    """Take one step and return the sizes of the groups whose weights were put back together,
    largest first."""
    sizes: list[int] = []
    target = SETS[to]
    module, _, name = target.rpartition(".")
    kind = getattr(__import__(module, fromlist=[name]), name)
    original = kind.retract_.__func__

    def counted(cls: Any, weights: Sequence[Any], work: Any) -> Any:
        sizes.extend([len(weights)] if len(weights) > 1 else [])
        return original(cls, weights, work)

    monkeypatch.setattr(f"{target}.retract_", classmethod(counted))
    layers = nn.ModuleList(
        nn.Linear(columns, rows, bias=False, dtype=dtype) for rows, columns in shapes
    )
    optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3)
    handle = constrain_(layers, optimizer, where=nn.Linear, to=to, **options)
    for weight in layers.parameters():
        weight.grad = torch.randn_like(weight)
    optimizer.step()
    assert handle.error().worst <= (1e-5 if dtype == torch.float32 else 8e-3)
    return sorted(sizes, reverse=True)


@pytest.mark.parametrize("to", SETS)
def test_small_weights_of_one_shape_are_worked_on_together(
    to: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = [(8, 8)] * 5 + [(8, 6)] * 3 + [(6, 8)] * 2 + [(5, 5)]
    assert groups_of_a_step(shapes, monkeypatch, to=to) == [5, 3, 2]


def test_none_are_where_it_is_not_wanted_and_half_weights_never(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert groups_of_a_step([(8, 8)] * 3, monkeypatch, batched=False) == []
    assert groups_of_a_step([(8, 8)] * 3, monkeypatch, dtype=torch.bfloat16, batched=True) == []


def test_a_cpu_stacks_up_to_16384_entries_by_itself_and_262144_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert groups_of_a_step([(128, 128)] * 2, monkeypatch, to="columns") == [2]
    assert groups_of_a_step([(128, 129)] * 2, monkeypatch, to="columns") == []
    assert groups_of_a_step([(128, 129)] * 2, monkeypatch, to="columns", batched=True) == [2]
    # 2^18 entries hold sixteen matrices of 128 x 128, and four of 256 x 256; a larger one is worked
    # on alone.
    assert groups_of_a_step([(128, 128)] * 17, monkeypatch, to="columns") == [16]
    assert groups_of_a_step([(256, 256)] * 7, monkeypatch, to="columns", batched=True) == [4, 3]
    assert groups_of_a_step([(520, 520)] * 2, monkeypatch, to="columns", batched=True) == []


def test_matrices_of_other_dtypes_and_gains_do_not_share_a_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert groups_of_a_step([(8, 8)] * 3, monkeypatch, gain="fit") == []
    assert groups_of_a_step([(8, 8)] * 3, monkeypatch, gain=0.5) == [3]
