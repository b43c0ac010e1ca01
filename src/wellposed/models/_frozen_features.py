"""Features of windows that a frozen body has computed, for as long as the body is the same."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from wellposed.hooks import module_options

_MOST = 2**18
"""Most windows whose features are remembered: 0.8 GB at width 384."""
_COUNTED = (Tensor, nn.Parameter)


class FrozenFeatures:
    """Features by window. They are forgotten if the body or the head's dtype or device changes.

    The body is the same if its tensors lie in the same memory and torch has counted no write to
    them, and its options (`wellposed.hooks.module_options`) are equal. Writes that torch does not
    count are not seen: through ``weight.data``, numpy or another process. Copies and pickles start
    empty.
    """

    def __init__(self) -> None:
        self._features: dict[bytes, Tensor] = {}
        self._owner: tuple[Any, ...] = ()
        # While it exists, torch does not give the address of a freed memory to another one.
        self._memories: list[StorageWeakRef] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return FrozenFeatures, ()

    def features_of(self, body: nn.Module, like: Tensor) -> dict[bytes, Tensor]:
        """Return what is remembered of a body for a head whose weights are ``like``."""
        tensors = [*body.parameters(), *body.buffers()]

        def noted(tensor: Tensor) -> str:
            tensors.append(tensor)
            return str(len(tensors))

        options = [*module_options(body, noted)]
        # Writes to other tensors (of inference mode, sharded) are not counted: nothing is kept.
        counted = all(type(t) in _COUNTED and not t.is_inference() for t in tensors)
        states = tuple(map(_state, tensors)) if counted else (object(),)
        owner = (like.dtype, like.device, states, *options)
        if owner != self._owner or len(self._features) > _MOST:
            self._features = {}
            self._owner = owner
            self._memories = [StorageWeakRef(t.untyped_storage()) for t in tensors if counted]
        return self._features


def _state(tensor: Tensor) -> tuple[Any, ...]:
    memory = tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.stride()
    return *memory, tensor.shape, tensor.dtype, tensor._version
