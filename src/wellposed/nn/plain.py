"""Whether a module may be replaced by its formula, and whether values may be read."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_ORDINARY = (nn.Parameter, Tensor)


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether calling `module` is nothing but the formula of `kind` with the module's own weights.

    No other class (adapters and parametrisations have their own), no hook, no `forward` put on the
    object (accelerate loads offloaded weights there), no weight of a special kind (sharded,
    quantised).

    >>> layer = nn.Linear(2, 2)
    >>> is_plain(layer, nn.Linear), is_plain(nn.Sequential(layer), nn.Linear)
    (True, False)
    >>> handle = layer.register_forward_hook(print)
    >>> is_plain(layer, nn.Linear)
    False
    """
    return (
        type(module) is kind
        and "forward" not in module.__dict__
        and not (module._forward_hooks or module._forward_pre_hooks)
        and not (module._backward_hooks or module._backward_pre_hooks)
        and all(
            weight is None or type(weight) in _ORDINARY for weight in module._parameters.values()
        )
        and not torch.nn.modules.module._has_any_global_hook()
    )


def on_host(tensor: Tensor) -> bool:
    """Return whether values may be read without making an accelerator wait or breaking a compiled
    graph."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling()
