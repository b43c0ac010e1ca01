"""Turn failures in torch into errors that name the argument or the mode at fault."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from wellposed.errors import MAX_SHOWN, ConfigError, ShapeError, WellposedError, shortened
from wellposed.torch_modes import is_transformed

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# Not their subclasses: lost devices and out of memory are not the fault of an argument.
_FOREIGN = (AssertionError, AttributeError, IndexError, NotImplementedError, OverflowError)
_FOREIGN += (RuntimeError, TypeError, ValueError, ZeroDivisionError, torch.linalg.LinAlgError)
_KINDS: dict[str, tuple[Callable[[Tensor], bool], str]] = {
    "nested tensors": (lambda x: x.is_nested, "pad them by .to_padded_tensor(0.0)"),
    "sparse tensors": (lambda x: x.layout is not torch.strided, "take .to_dense() of them"),
    "quantised tensors": (lambda x: x.is_quantized, "take .dequantize() of them"),
    "complex numbers": (lambda x: x.is_complex(), "take the real part, or torch.view_as_real"),
    "float8 numbers": (
        lambda x: x.is_floating_point() and x.itemsize == 1,
        "take .float() of them, times their scale",
    ),
    "tensors on the meta device, which hold no numbers": (
        lambda x: x.is_meta,
        "give them numbers first, as by model.to_empty(device='cpu') and load_state_dict",
    ),
    "tensors that torch.func (vmap, grad or jvp) follows": (
        torch._C._functorch.is_functorch_wrapped_tensor,  # pyright: ignore[reportAttributeAccessIssue]
        "call it outside, on one after the other, and take gradients by backward()",
    ),
    "tensors made in torch.inference_mode()": (
        lambda x: x.is_inference() and not torch.is_inference_mode_enabled(),
        "make them outside, or take .clone() of them outside (of a model copy.deepcopy)",
    ),
}
"""Tensors that many calls cannot read -> a test, and what to type instead."""


def refusal_of(
    call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception
) -> WellposedError | None:
    """Return an error with the argument or mode at fault; None if the cause may be elsewhere."""
    if type(error) not in _FOREIGN or torch.compiler.is_compiling():
        return None
    taken = inspect.signature(call).parameters
    hints = {name: str(parameter.annotation) for name, parameter in taken.items()}
    named = [*zip(hints, args, strict=False), *kwargs.items()]
    where = type(args[0]).__name__ if "self" in hints else call.__qualname__
    inputs = [pair for name, value in named for pair in _tensors(name, value)]
    built = [m for _, m in named if isinstance(m, nn.Module) and "_buffers" in vars(m)]
    weights = [(f"weights of {type(m).__name__}", w) for m in built for w in m.parameters()]
    for kind, (is_kind, advice) in _KINDS.items():
        matching = [name for name, tensor in (*inputs, *weights) if is_kind(tensor)]
        if matching:
            names = shortened(list(dict.fromkeys(matching)))
            return ConfigError(f"{where}: received {kind} ({names}); {advice}")

    wrong = [name for name, value in named if _is_no_tensor(hints.get(name, ""), value)]
    if wrong:
        kinds = ", ".join(f"{name} of type {type(dict(named)[name]).__name__}" for name in wrong)
        return ShapeError(f"{where}: expected tensors, received {kinds}; take torch.as_tensor")

    words = str(error).partition("\n")[0][:MAX_SHOWN]
    modes = [mode for mode, is_on in _MODES.items() if is_on()]
    if modes:
        return ConfigError(f"{where} fails in {', '.join(modes)}: {words}; call it outside")
    if not _raised_by_torch(error):
        return None

    texts = [f"{name}: {_described(value)}" for name, value in named if name != "self"]
    texts += [f"{weights[0][0]}: {_described(weights[0][1])}"] if weights else []
    return (ShapeError if inputs else ConfigError)(f"{where}: {words}; received {shortened(texts)}")


def _is_no_tensor(hint: str, value: Any) -> bool:
    if not hint.startswith("Tensor") or (value is None and "None" in hint):
        return False
    return not isinstance(value, (Tensor, list, tuple) if "Sequence" in hint else Tensor)


def _raised_by_torch(error: Exception) -> bool:
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith(("torch.", "wellposed."))


_MODES: dict[str, Callable[[], bool]] = {
    "torch.inference_mode()": torch.is_inference_mode_enabled,
    "torch.device('meta')": lambda: torch.get_default_device().type == "meta",
    "a transform of torch.func, or forward-mode differentiation": is_transformed,
}
"""Modes of torch in which a call may fail -> a test of the mode."""


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an argument by name, with their indices in a sequence or mapping."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping | list | tuple):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for argument, item in pairs:
            yield from _tensors(f"{name}[{argument!r}]", item)


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)[:40] if isinstance(value, int | float | None) else type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
