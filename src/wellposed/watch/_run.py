"""Run somebody else's model on a batch and leave it as it was."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from wellposed.errors import ConfigError, WellposedError, listed, nearest_names
from wellposed.watch._attention import Attends

_PADDING = {
    "key_padding_mask": "attention_mask",
    "src_key_padding_mask": "attention_mask",
    "tgt_key_padding_mask": "decoder_attention_mask",
}


@contextmanager
def quiet_run(model: nn.Module, *, evaluate: bool = True) -> Iterator[None]:
    """Without gradients; training flags, buffers and random states are put back, and hooks see
    every module.

    ``evaluate=False`` runs each module in the mode it is in.
    """
    modes = {module: module.training for module in model.modules()}
    held = [(part, *each) for part in modes for each in part.named_buffers(recurse=False)]
    made = [each for each in held if not (each[2].is_meta or is_lazy(each[2]))]
    buffers = [(part._buffers, name, value, value.clone()) for part, name, value in made]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    fast = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # the fused layer hides its parts from hooks
        if evaluate:
            model.eval()
        with torch.random.fork_rng(devices), torch.inference_mode(mode=False), torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, training in modes.items():
            module.training = training
        with torch.no_grad():
            for table, name, buffer, value in buffers:
                table[name] = buffer  # a module may have put another tensor in its place
                if not torch.equal(buffer, value):  # untouched ones may be part of a graph
                    buffer.copy_(value)


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call the model as ``model(**batch)``, ``model(*batch)`` or ``model(batch)``, tensors moved to
    its device.

    Raises:
        ConfigError: the batch is none of the three, or the model fails on it; what it was called
            with is listed, with the nearest names of misspelt keywords.
    """
    if isinstance(batch, str) or not isinstance(batch, (Mapping, Tensor, Sequence)):
        expected = (
            "expected a tensor, a mapping of keyword arguments or a sequence of positional ones"
        )
        raise ConfigError(f"batch: received {type(batch).__name__}; {expected}")
    device = next((p.device for p in model.parameters() if not p.is_meta), None)
    named = batch if isinstance(batch, Mapping) else {}
    keywords = {str(name): _moved(value, device) for name, value in named.items()}
    sequence = [batch] if isinstance(batch, Tensor) else [] if keywords else batch
    arguments = [_moved(value, device) for value in sequence]
    try:
        return model(*arguments, **keywords)
    except (WellposedError, torch.OutOfMemoryError):
        raise
    except (
        AssertionError,
        AttributeError,
        ImportError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        taken = inspect.signature(model.forward).parameters
        given = [*keywords.items(), *(("argument", value) for value in arguments)]
        received = [_described(name, value) for name, value in given]
        for name in [each for each in keywords if each not in taken]:
            near = ", ".join(nearest_names(name, taken))
            received.append(f"{name} is no argument of forward; nearest: {near}")
        problem = f"{type(model).__name__} fails on the batch: {type(error).__name__}: {error}"
        raise ConfigError(f"{problem}; it was called with\n{listed(received)}") from error


def _moved(value: Any, device: torch.device | None) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _described(name: str, value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"{name}: {type(value).__name__}"
    return f"{name}: {str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"


def first_tensor(value: Any) -> Tensor | None:
    """Return the first floating tensor with at least two dimensions, looking into mappings and
    sequences."""
    if isinstance(value, Tensor):
        return value if value.is_floating_point() and value.ndim >= 2 else None
    if isinstance(value, Mapping):
        value = list(value.values())
    parts = value if isinstance(value, (tuple, list)) else ()
    return next((found for part in parts if (found := first_tensor(part)) is not None), None)


def kurtosis(values: Tensor) -> Tensor:
    """Return the fourth central moment of all entries over the square of the second: 3 for a normal
    distribution, far more where a few entries are much larger than all others."""
    values = values / values.abs().max().clamp_min(1e-30)  # so that no fourth power overflows
    square = (values - values.mean()).square()
    return square.square().mean() / square.mean().square().clamp_min(1e-30)


def real_tokens(batch: Any, stack: str | None, attention: Sequence[Attends]) -> Tensor | None:
    """Return the bool mask (batch, tokens) of a stack's real tokens; None where the batch holds
    none."""
    if not isinstance(batch, Mapping):
        return None
    translating = any(role.kind == "cross" for role in attention)
    wanted = "decoder_attention_mask" if translating and stack == "decoder" else "attention_mask"
    mask = batch.get(wanted)
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return mask.bool()
    padding = (batch.get(name) for name, of in _PADDING.items() if of == wanted)
    return next((~each.bool() for each in padding if isinstance(each, Tensor)), None)
