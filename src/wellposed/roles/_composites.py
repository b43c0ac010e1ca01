"""Composite functions of torch, written out so that a mode sees their steps."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch.nn.functional as F
from torch import Tensor


def _glu(values: Tensor, dim: int = -1) -> Tensor:
    left, right = values.chunk(2, dim)
    return left * right.sigmoid()


def _traceable(function: Any) -> Callable[..., Any]:
    """Return a copy of a composite function of torch, whose steps a mode can see."""
    unseen = {**function.__globals__, "has_torch_function": lambda _: False}
    copy = FunctionType(function.__code__, unseen, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


_ATTENTION: Any = F.multi_head_attention_forward
WRITTEN_OUT: dict[Any, Callable[..., Any]] = {F.glu: _glu, _ATTENTION: _traceable(_ATTENTION)}
