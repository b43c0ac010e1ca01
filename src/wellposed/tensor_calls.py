"""Calls that torch cannot compute end in an error that names the argument or the mode at fault."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from wellposed.errors import MAX_SHOWN, ConfigError, ShapeError, WellposedError, shortened

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# These types and no subclasses: memory that ended and lost devices are no fault of an argument.
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
"""Tensors that many calls cannot read -> how to tell, and what to type instead."""


def refusal_of(
    call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], error: Exception
) -> WellposedError | None:
    """Return an error that says which argument or mode made a call fail; None if that may be code
    of the caller's that the call runs, or no fault of an argument."""
    if type(error) not in _FOREIGN or torch.compiler.is_compiling():
        return None
    taken = inspect.signature(call).parameters
    hints = {name: str(each.annotation) for name, each in taken.items()}
    named = [*zip(hints, args, strict=False), *kwargs.items()]
    where = type(args[0]).__name__ if "self" in hints else call.__qualname__
    given = [pair for name, value in named for pair in _tensors(name, value)]
    built = [each for _, each in named if isinstance(each, nn.Module) and "_buffers" in vars(each)]
    held = [(f"weights of {type(each).__name__}", w) for each in built for w in each.parameters()]
    for kind, (is_kind, advice) in _KINDS.items():
        if found := [name for name, tensor in (*given, *held) if is_kind(tensor)]:
            names = shortened(list(dict.fromkeys(found)))
            return ConfigError(f"{where}: received {kind} ({names}); {advice}")
    if wrong := [name for name, value in named if _is_no_tensor(hints.get(name, ""), value)]:
        kinds = ", ".join(f"{name} of type {type(dict(named)[name]).__name__}" for name in wrong)
        return ShapeError(f"{where}: expected tensors, received {kinds}; take torch.as_tensor")
    words = str(error).partition("\n")[0][:MAX_SHOWN]
    if modes := [mode for mode, is_on in _MODES.items() if is_on()]:
        return ConfigError(f"{where} fails in {', '.join(modes)}: {words}; call it outside")
    if not _raised_by_torch(error):
        return None
    shown = [f"{name}: {_described(value)}" for name, value in named if name != "self"]
    shown += [f"{held[0][0]}: {_described(held[0][1])}"] if held else []
    return (ShapeError if given else ConfigError)(f"{where}: {words}; received {shortened(shown)}")


def _is_no_tensor(hint: str, value: Any) -> bool:
    if not hint.startswith("Tensor") or (value is None and "None" in hint):
        return False
    return not isinstance(value, (Tensor, list, tuple) if "Sequence" in hint else Tensor)


def _raised_by_torch(error: Exception) -> bool:
    """Whether torch or this package raised it, and not code of the caller's that was run."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith(("torch.", "wellposed."))


def in_ordinary_modes(call: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make a call record gradients, in the dtypes of its tensors, whatever modes the caller is in:
    what it measures belongs to a model, and not to `torch.inference_mode` or `torch.autocast`.

    >>> with torch.inference_mode():
    ...     in_ordinary_modes(torch.is_inference_mode_enabled)(), torch.is_inference_mode_enabled()
    (False, True)
    """

    @functools.wraps(call)
    def ordinary(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(mode=False))
            stack.enter_context(torch.enable_grad())
            for device in filter(torch.is_autocast_enabled, ("cpu", "cuda", "mps", "xpu")):
                stack.enter_context(torch.autocast(device, enabled=False))
            return call(*args, **kwargs)

    return ordinary


def is_transformed() -> bool:
    """Return whether torch.func or forward-mode differentiation follows what is computed now, for
    which a function with a backward pass of its own has no rule."""
    return not torch.compiler.is_compiling() and (
        torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    )


def with_graph(
    formula: Callable[..., Tensor], inputs: Sequence[Any], gradient: Tensor, *weights: Tensor
) -> list[Tensor | None]:
    """Return the gradients of a formula by its inputs, and by weights that it reads itself, with a
    graph of their own: so a backward pass written by hand can be differentiated again."""
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
        # By views of the inputs, two of which may be one tensor.
        own = [None if x is None else x.view_as(x) for x in inputs]
        wanted = [x for x in (*own, *weights) if x is not None and x.requires_grad]
        value, options = formula(*own), {"create_graph": True, "allow_unused": True}
        found = torch.autograd.grad(value, wanted, gradient, **options)
    by_id = dict(zip(map(id, wanted), found, strict=True))
    return [by_id.get(id(x)) for x in (*own, *weights)]


def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Return `scaled_dot_product_attention`, by its plain kernel under a transform; of a fused kernel
    a second derivative is refused in words.

    Cost: that of the function, and a hook that reads nothing.
    """
    if is_transformed():
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(query, key, value, **options)
    joined = F.scaled_dot_product_attention(query, key, value, **options)
    node = None if torch.compiler.is_compiling() else joined.grad_fn
    if node is not None and node.name().startswith("ScaledDotProduct"):
        node.register_hook(_differentiable_once)
    return joined


def _differentiable_once(gradients: tuple[Tensor | None, ...], _: Any) -> Any:
    if not torch.is_grad_enabled():
        return None
    problem = (
        "a fused attention kernel has no second derivative; run the forward pass in"
        " torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"
    )
    return tuple(None if each is None else Once.apply(problem, each) for each in gradients)


class Once(torch.autograd.Function):
    """``Once.apply(problem, gradient, *inputs)`` is the gradient; its derivative by itself or by the
    inputs is refused in these words."""

    @staticmethod
    def forward(ctx: Any, problem: str, gradient: Tensor, *inputs: Tensor) -> Tensor:
        del inputs
        ctx.problem = problem
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        del gradients
        raise ConfigError(ctx.problem)


_MODES: dict[str, Callable[[], bool]] = {
    "torch.inference_mode()": torch.is_inference_mode_enabled,
    "torch.device('meta')": lambda: torch.get_default_device().type == "meta",
    "a transform of torch.func, or forward-mode differentiation": is_transformed,
}
"""Modes of torch in which a call may fail -> whether it is on."""


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of an argument under its name, with their places in a sequence or mapping."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping | list | tuple):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for place, each in pairs:
            yield from _tensors(f"{name}[{place!r}]", each)


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)[:40] if isinstance(value, int | float | None) else type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
