"""What decides the output of a module beside its weights: plain attributes, modes and hooks."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

_LIBRARIES = ("torch.", "transformers.", "wellposed.")
# What torch and transformers keep on every module: notes, places, and a switch that changes no
# result.
_INTERNAL = {
    *vars(nn.Module()), "_compiled_call_impl", "_is_hf_initialized", "gradient_checkpointing", "hf_device_map",
    "model_tags", "name_or_path", "warnings_issued",
}  # fmt: skip
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
_DEEPEST = 8
"""Nested containers beyond this depth are not read."""

Render = Callable[[Tensor], str]
"""Names a tensor that is neither a parameter nor in the state_dict."""


def module_options(module: nn.Module, render: Render) -> Iterator[str]:
    """Yield one line for each module of a tree: its class and its options, but not its weights.

    Options are numbers, strings, tensors and containers of these that are plain attributes; the
    names of functions; the fields of dataclasses; buffers that are not saved; hooks that may change
    a result; and train or eval mode in classes that read it. Of other objects, a `config` among
    them, only the class counts.
    """
    for path, part in module.named_modules():
        plain = {name: value for name, value in vars(part).items() if _counts(part, name)}
        unsaved = part._non_persistent_buffers_set
        plain |= {name: value for name, value in part._buffers.items() if name in unsaved}
        options = [f"{name}={_shown(plain[name], render)}" for name in sorted(plain)]
        options += [f"hook {name}" for name in changing_hooks(part)]
        if part.training and mode_matters(part):
            options.append("training")
        kind = type(part)
        yield f"{path}: {kind.__module__}.{kind.__qualname__}({', '.join(options)})"


def _counts(module: nn.Module, name: str) -> bool:
    """Return whether an attribute may decide an output. Libraries keep notes in private ones."""
    rates = _rates(module)
    if name in _INTERNAL or (name in rates and not (module.training and any(rates.values()))):
        return False
    private = name.startswith("_") and not isinstance(vars(module)[name], Tensor)
    return not (private and _is_of(_LIBRARIES, module))


def _is_of(libraries: tuple[str, ...], module: nn.Module) -> bool:
    return f"{type(module).__module__}.".startswith(libraries)


def content_digest(tensor: Tensor) -> str:
    """Return dtype, shape and SHA-256 of a tensor's bytes."""
    described = f"{tensor.dtype} {tuple(tensor.shape)}"
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta or tensor.is_sparse:
        return described
    plain = tensor.detach().cpu().contiguous()
    # By address: torch needs numpy to return bytes.
    content = (ctypes.c_char * plain.nbytes).from_address(plain.data_ptr()) if plain.nbytes else b""
    return f"{described} {hashlib.sha256(content).hexdigest()}"


def changing_hooks(module: nn.Module) -> list[str]:
    """Return the names of forward hooks of a module that do not say that they only observe."""
    hooks = (hook for table in _HOOKS for hook in getattr(module, table).values())
    return [_name(hook) for hook in hooks if getattr(hook, "observes_only", False) is not True]


def mode_matters(module: nn.Module) -> bool:
    """Return whether a module's own code reads ``training``; not for dropout at a rate of 0."""
    if not _reads_mode(type(module)):
        return False
    numbers = _rates(module).values()
    # These also read it to recompute activations, which changes no result.
    if _is_of(("transformers.", "wellposed."), module) or (numbers and _is_of(("torch.",), module)):
        return any(numbers)
    return True


def _rates(module: nn.Module) -> dict[str, float]:
    """Return a module's dropout rates, which mean nothing in evaluation."""
    named = vars(module)
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return {"p": module.p}
    numbers = {name: value for name, value in named.items() if isinstance(value, (int, float))}
    return {name: value for name, value in numbers.items() if "drop" in name}


@functools.cache
def _reads_mode(kind: type[nn.Module]) -> bool:
    bases = (base for base in kind.__mro__ if issubclass(base, nn.Module) and base is not nn.Module)
    methods = (
        getattr(value, "__func__", value)
        for base in bases
        for name, value in vars(base).items()
        if name not in ("train", "eval")
    )
    return any(
        isinstance(method, FunctionType) and "training" in _names_in(method.__code__)
        for method in methods
    )


def _names_in(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def _shown(value: Any, render: Render, depth: int = 0) -> str:
    """Return a text that is equal for equal options, also in another process."""
    if isinstance(value, Tensor):
        return render(value)
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, Enum)):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.Size)):
        return str(value)
    if depth < _DEEPEST and (inner := _inside(value)) is not None:
        rows = [_shown(part, render, depth + 1) for part in inner]
        rows = sorted(rows) if isinstance(value, (AbstractSet, Mapping)) else rows
        return f"{type(value).__name__}[{', '.join(rows)}]"
    return _name(value)


def _inside(value: Any) -> Sequence[Any] | None:
    """Return the parts of a container, or None."""
    inner: Sequence[Any] | None = None
    if isinstance(value, Mapping):
        inner = list(value.items())
    elif isinstance(value, (list, tuple, AbstractSet)):
        inner = list(value)
    elif isinstance(value, functools.partial):
        inner = [value.func, value.args, value.keywords]
    elif isinstance(value, nn.Module):
        inner = [type(value), list(value.named_parameters()), list(value.named_buffers())]
    elif hasattr(value, "tobytes") and hasattr(value, "dtype"):
        inner = [str(value.dtype), getattr(value, "shape", ()), value.tobytes()]
    # The configuration of a model is what it was built from; a save and a load change its notes.
    elif dataclasses.is_dataclass(value) and not hasattr(value, "model_type"):
        fields = () if isinstance(value, type) else dataclasses.fields(value)
        inner = [(field.name, getattr(value, field.name, None)) for field in fields] or None
    return inner


def _name(value: Any) -> str:
    if isinstance(value, (FunctionType, BuiltinFunctionType, MethodType, type)):
        return f"{value.__module__}.{value.__qualname__}"
    return f"{type(value).__module__}.{type(value).__qualname__}"
