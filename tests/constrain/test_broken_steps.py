"""A step that raises before its end leaves the weights where they were, at the next step or when
the handle goes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from wellposed.constrain import constrain_


class Breaks(torch.optim.AdamW):
    """Raises in its step while it is told to."""

    broken = False

    def step(self, closure: Any = None) -> Any:
        if self.broken:
            raise RuntimeError("out of memory")
        return super().step(closure)


CASES = [(torch.float32, 0.0), (torch.float32, 0.1), (torch.bfloat16, 0.0), (torch.bfloat16, 0.1)]


@pytest.mark.parametrize("how", ["remove", "next step"])
@pytest.mark.parametrize(("dtype", "decay"), CASES, ids=str)
@pytest.mark.parametrize("shape", [(5, 5), (7, 4)])
def test_weights_come_back_from_a_step_that_broke(
    shape: tuple[int, int], dtype: torch.dtype, decay: float, how: str
) -> None:
    layer = nn.Linear(shape[1], shape[0], bias=False, dtype=dtype)
    optimizer = Breaks(layer.parameters(), lr=1e-3, weight_decay=decay)
    handle = constrain_(nn.Sequential(layer), optimizer, where="0", weight_decay="ignore")
    for _ in range(2):
        layer.weight.grad = torch.randn_like(layer.weight)
        optimizer.step()
    before = layer.weight.detach().clone()
    optimizer.broken = True
    layer.weight.grad = torch.randn_like(layer.weight)
    with pytest.raises(RuntimeError, match="out of memory"):
        optimizer.step()
    optimizer.broken = False
    # Decay, and half precision, are kept out of a step by a weight of zero while the optimizer
    # steps.
    assert bool((layer.weight == 0).all()) == (decay > 0 or dtype == torch.bfloat16)
    if how == "remove":
        handle.remove()
        assert torch.equal(layer.weight, before)
        return
    layer.weight.grad = torch.zeros_like(layer.weight)
    optimizer.step()
    assert float((layer.weight - before).detach().float().abs().max()) <= 0.02
    assert handle.error().worst <= (8e-3 if dtype == torch.bfloat16 else 1e-5)
