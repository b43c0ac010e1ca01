"""Products of bfloat16 matrices on a CPU that has no instructions for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

PRODUCTS = (torch.Tensor.__matmul__, torch.addmm)


def bfloat16_products() -> AbstractContextManager[object]:
    """Return a context for steps of `torch.optim.Muon`, whose Newton-Schulz multiplies in bfloat16.

    Status: the same to the order of sums. PyTorch multiplies bfloat16 matrices by adding in float32
    and rounding once; a CPU without such instructions takes twelve times as long for it as for
    float32. There the context multiplies in float32 and rounds: products of two entries are exact.
    On other CPUs it does nothing.

    >>> with bfloat16_products():
    ...     (torch.ones(2, 3).bfloat16() @ torch.ones(3, 1).bfloat16()).dtype
    torch.bfloat16
    """
    has_bfloat16 = any(
        has for name, has in torch.cpu.get_capabilities().items() if name.endswith("bf16")
    )
    return nullcontext() if has_bfloat16 else ProductsInFloat32()


class ProductsInFloat32(TorchFunctionMode):
    """Runs `PRODUCTS` of bfloat16 tensors on a CPU in float32, and rounds the results."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        options = kwargs or {}
        if func not in PRODUCTS or not all(map(_is_bfloat16_on_cpu, args)):
            return func(*args, **options)
        return func(*(factor.float() for factor in args), **options).bfloat16()


def _is_bfloat16_on_cpu(value: Any) -> bool:
    is_tensor = isinstance(value, Tensor)
    return is_tensor and value.dtype == torch.bfloat16 and value.device.type == "cpu"
