"""Checks that a call of a module computes what its class and its weights say, as rules assume.

A call may differ by hooks, a replaced `forward`, adapters, or weights that live elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Container, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from wellposed.hooks import hooks_in_call, replaced_method
from wellposed.nn import OrthogonalLinear
from wellposed.roles import BASE, sources_of

_ORDINARY: tuple[type, ...] = (Tensor, nn.Parameter)
# Their weights say what they compute, so a rule may read them by itself.
_PLAIN_PARTS = (
    nn.Linear, NonDynamicallyQuantizableLinear, OrthogonalLinear, nn.Embedding, nn.Identity, nn.Dropout,
    nn.ModuleList, nn.ModuleDict,
)  # fmt: skip
LOCAL_ONLY = (
    "models of transformers have no bound on all inputs, as LayerNorms make every total vacuous (1e6 to"
    " 1e30 for two layers); BERT, RoBERTa, DistilBERT, GPT-2, Llama, Mistral and Qwen2 have one around given"
    " inputs: pass around= and radius="
)
_PARAMETRIZE = "torch.nn.utils.parametrize"


def class_called(module: nn.Module) -> type[nn.Module]:
    """Return the class whose `forward` runs, behind torch's class for parametrised weights."""
    kind = type(module)
    return kind.__bases__[0] if kind.__module__ == _PARAMETRIZE else kind


def is_class(kind: type, module: str, name: str) -> bool:
    """Return whether ``kind`` is the class of this name in this module, and no other of that name."""
    return (kind.__module__, kind.__qualname__) == (module, name) and getattr(
        sys.modules.get(module), name, None
    ) is kind


def without_compiler(module: nn.Module) -> nn.Module:
    """Return the module inside `torch.compile`, if its wrapper is torch's and has no hooks."""
    while (type(module).__module__, type(module).__name__) == (
        "torch._dynamo.eval_frame",
        "OptimizedModule",
    ):
        if hooks_in_call(module) or not _written_in(module.forward).startswith("torch."):
            break
        module = module._orig_mod  # pyright: ignore[reportAssignmentType]
    return module


def uncertifiable_reason(module: nn.Module) -> str | None:
    """Return how a call of ``module`` differs from its class's `forward` on its weights, or None.
    Children are checked separately. Hooks marked ``observes_only`` are allowed."""
    hooks = hooks_in_call(module)
    if hooks:
        return (
            f"it runs {', '.join(hooks)}, which may change what it computes; remove the hook and"
            " certify again (weight_norm, spectral_norm and prune of the old style are hooks:"
            " torch.nn.utils.remove_weight_norm, remove_spectral_norm and prune.remove make their"
            " weights permanent)"
        )

    replaced = _replaced(module)
    if replaced is not None:
        return (
            f"its {replaced} was replaced, so its class and weights do not say what it computes;"
            " remove the replacement (accelerate: accelerator.unwrap_model, or load without"
            " offloading) and certify again"
        )

    return _unusual_tensors(module)


def first_deviation(module: nn.Module) -> str | None:
    """Return the first `uncertifiable_reason` of ``module`` and its parts, or None."""
    parts = [module, *(part for _, part in _parts_not_reached(module))]
    return next(
        (reason for part in parts if (reason := uncertifiable_reason(part)) is not None), None
    )


def changes_input(module: nn.Module) -> bool:
    """Return whether a module says that its call overwrites its input: ``inplace=True``."""
    dropout = isinstance(module, nn.modules.dropout._DropoutNd)
    idle = dropout and not (module.training and module.p > 0)
    return getattr(module, "inplace", False) is True and not idle


def overwritten(part: str) -> str:
    """Return why a module has no bound if ``part`` changes a tensor that is used again."""
    return (
        f"{part} overwrites its input, which is used again: a residual adds what it wrote; build it"
        " with inplace=False"
    )


def _unknown_class(module: nn.Module) -> str | None:
    kind = class_called(module)
    drops = isinstance(module, nn.Dropout) and module.training and module.p > 0
    if kind in _PLAIN_PARTS and not drops:
        return None
    name = f"{kind.__module__}.{kind.__qualname__}"
    return f"{name}, a class whose weights do not say what it computes{advice(module)}"


def advice(module: nn.Module) -> str:
    """Return what to do about a module without a rule, if it is a known kind of wrapper."""
    if any(base.__module__.startswith("peft.") for base in type(module).__mro__):
        below = (part._modules.get(BASE) for part in module.modules())
        if any(sources_of(layer) for layer in below if layer is not None):
            first = (
                "; remove the parametrization or hook below the adapters first, as merging would"
            )
            return f"{first} lose them; then merge (model.merge_and_unload()) and certify"
        return (
            "; merge adapters into the weights (peft: model.merge_and_unload()) and certify the"
            " plain model"
        )
    if type(module).__module__.startswith("transformers."):
        return f"; {LOCAL_ONLY}"
    if isinstance(getattr(module, "module", None), nn.Module):
        return "; it wraps another module: certify what it wraps, `.module`"

    return ""


def differing_parts(
    module: nn.Module, reached: Container[int] = (), vouched: Container[int] = ()
) -> Iterator[str]:
    """Yield why a part that a rule read by itself (not in ``reached``) cannot be trusted: its call
    differs, or its class is neither plain nor ``vouched`` for (both are ids)."""
    for path, part in _parts_not_reached(module, reached):
        differs = uncertifiable_reason(part)
        if differs is not None:
            yield f"{path} ({class_called(part).__name__}): {differs}"
        elif id(part) not in vouched and (unknown := _unknown_class(part)) is not None:
            yield f"{path} is {unknown}"


def _parts_not_reached(
    module: nn.Module, reached: Container[int] = (), path: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module._modules.items():
        child = child if child is None else without_compiler(child)
        # A parametrisation is called whenever its weight is read, so the value read is the one used.
        made = name == "parametrizations" and class_called(module) is not type(module)
        if child is None or id(child) in reached or made:
            continue
        yield f"{path}{name}", child
        yield from _parts_not_reached(child, reached, f"{path}{name}.")


def _replaced(module: nn.Module) -> str | None:
    """Return the first method that was replaced, on the object or on its class."""
    kind = type(module)
    on_object = replaced_method(module)
    if on_object is not None:
        return on_object
    if kind.__call__ is not nn.Module.__call__:
        return "__call__"

    compiled = module._compiled_call_impl
    if compiled is not None and not _written_in(compiled).startswith("torch."):
        return "_compiled_call_impl"

    owner = next(base for base in kind.__mro__ if "forward" in vars(base))
    home, name = home_of(vars(owner)["forward"])
    if owner is nn.Module or (home, name) == (owner.__module__, f"{owner.__qualname__}.forward"):
        return _replaced_helper(kind)
    return f"class's forward ({home}.{name} stands in {owner.__qualname__})"


_LIBRARIES = ("torch.", "transformers.", "wellposed.")
_CALL = ("__call__", "_call_impl", "_wrapped_call_impl")


def _replaced_helper(kind: type) -> str | None:
    """Return the first method behind `forward` that was replaced on a class of these libraries."""
    for owner in kind.__mro__:
        if not owner.__module__.startswith(_LIBRARIES):
            continue
        for name in _CALL if owner is nn.Module else tuple(vars(owner)):
            method = vars(owner)[name]
            method = getattr(method, "__func__", method)
            if not isinstance(method, FunctionType):
                continue
            home, written = home_of(method)
            if not home.startswith((*_LIBRARIES, "contextlib")):
                return f"class's {name} ({home}.{written} stands in {owner.__qualname__})"
    return None


_WRAPPERS = ("torch.", "transformers.", "wellposed.call_checks", "wellposed.tensor_calls")


def home_of(function: Any) -> tuple[str, str]:
    """Return the module and name of a function from its code, as `functools.wraps` copies names.
    Wrappers of torch, transformers and our call checks are looked through."""
    while (home := _written_in(function)).startswith(_WRAPPERS):
        if not hasattr(function, "__wrapped__"):
            break
        function = function.__wrapped__
    code = getattr(function, "__code__", None)
    return home, code.co_qualname if code else type(function).__qualname__


def _written_in(function: Any) -> str:
    return getattr(function, "__globals__", {}).get("__name__", type(function).__module__)


def _is_same(first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors hold the same values; NaN is the same as NaN."""
    alike = (first.shape, first.dtype) == (second.shape, second.dtype)
    return alike and torch.allclose(first, second, rtol=0.0, atol=0.0, equal_nan=True)


def _unusual_tensors(module: nn.Module) -> str | None:
    tensors = {**module._parameters, **module._buffers}
    for name in (
        getattr(module, "parametrizations", {}) if class_called(module) is not type(module) else ()
    ):
        tensors[name] = getattr(module, name)
        again = getattr(module, name)
        if not tensors[name].is_meta and not _is_same(tensors[name], again):
            return (
                f"its {name} changes each time it is read (a parametrisation in train mode, as the"
                " power iteration of spectral_norm); call eval() and certify again"
            )

    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if type(tensor) not in _ORDINARY:
            return (
                f"its {name} is a {type(tensor).__module__}.{type(tensor).__qualname__} (quantised,"
                " sharded or not yet initialised), with its own products; certify the plain model"
                " it came from"
            )
        if tensor.is_meta:
            return (
                f"its {name} is on the meta device and holds no values; load the weights and"
                " certify again"
            )
        if tensor.is_complex():
            return f"its {name} is complex, and no bound is proved for complex maps"
        if tensor.is_quantized:
            return f"its {name} is quantised; certify the plain model it came from"

    return None
