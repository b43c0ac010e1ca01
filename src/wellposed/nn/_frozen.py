"""Layers that normalise by their weights do so once while no weight changes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from torch import nn


class NormalisesByWeights(ABC):
    """A layer that divides by a bound of its weights, and can keep it while none changes."""

    @abstractmethod
    def frozen(self, layers: Any = None) -> AbstractContextManager[None]:
        """Promise that no weight changes inside: the bound is computed once, or not at all if given."""


@contextmanager
def frozen(module: nn.Module, arguments_of: Mapping[int, Any] | None = None) -> Iterator[None]:
    """Compute what layers normalise by once for all calls inside. No weight may change there.

    Status: exact; outputs are the same, bit for bit. Only layers of this library take part, such as
    a contractive `L2SelfAttention`: another module may mean something else by ``frozen``.

    Args:
        module: The module that is called inside.
        arguments_of: By the id of such a layer, the value that its ``frozen`` takes.

    When not to use: around a step of an optimizer, whose weights would be divided by the old bound.

    Cost: one bound of each such layer, at its first call inside.

    >>> import torch
    >>> from wellposed.nn import L2SelfAttention
    >>> layer = torch.nn.Sequential(L2SelfAttention(8, 2, contractive=0.9))
    >>> with frozen(layer), torch.no_grad():
    ...     y = layer(layer(torch.randn(1, 4, 8)))
    """
    chosen = arguments_of or {}
    with ExitStack() as stack:
        for part in module.modules():
            if isinstance(part, NormalisesByWeights):
                arguments = [chosen[id(part)]] if id(part) in chosen else []
                stack.enter_context(part.frozen(*arguments))
        yield
