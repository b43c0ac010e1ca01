"""Whether a call of a layer is the product with its weight, found by calling it on random numbers."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from wellposed.errors import is_about_resources
from wellposed.hooks import (
    class_name,
    eager_calls,
    hooks_in_call,
    may_change,
    observing_paused,
    quiet_run,
    replaced_method,
)
from wellposed.linalg import full_precision, is_sharded
from wellposed.roles._live import unwrapped
from wellposed.roles._stand_ins import stand_ins
from wellposed.roles._views import BASE, WeightView, is_table, is_transposed

logger = logging.getLogger("wellposed.roles")
_EXACT = 1e-5
"""Largest relative difference between a layer's output and the product, in float32 and float64."""
_IN_EPS = 8
"""The same in units of eps, for lower precision."""
_AS_WRITTEN = (
    "torch.nn.modules.linear",
    "torch.nn.modules.sparse",
    "transformers.pytorch_utils",
)
"""Modules whose `forward` uses the weight alone: of Linear, Embedding and GPT-2's Conv1D."""

Answer = Literal["product", "linear", "other"]


@dataclass(frozen=True)
class Deviation:
    """A layer that computes something else than the product with a weight in it."""

    layer: nn.Module
    text: str
    """The layer's path, and what changes its call."""
    is_linear: bool
    """Whether it computes the product with another matrix, so that calls show that matrix."""


def unusual_call(module: nn.Module) -> str | None:
    """Return how a module's call may differ from its class's `forward`, without calling it."""
    hooks = hooks_in_call(module)
    if hooks:
        return f"{hooks[0]} changes what it computes"
    replaced = replaced_method(module)
    return None if replaced is None else f"its {replaced} was replaced"


def call_state(module: nn.Module) -> tuple[object, ...]:
    """Return a key that changes if a hook or a replaced method does, `fully_shard` aside."""
    hooks = (*module._forward_pre_hooks.items(), *module._forward_hooks.items())
    changing = [(number, id(hook)) for number, hook in hooks if may_change(hook)]
    return (*changing, replaced_method(module), id(vars(module).get("forward")))


class CallWatch:
    """The layers of some weights; `changes` names those that compute something else by now.

    Experts in a stack cannot be tried, so their changes are logged as a warning, once.
    """

    def __init__(self, model: nn.Module, views: Iterable[WeightView]) -> None:
        self._views = tuple(view for view in views if is_called(model, view.owner_path))
        self._states = [call_state(view.owner) for view in self._views]

    def changes(self) -> list[str]:
        """Return a line per layer that was changed since and deviates; runs only changed layers."""
        lines: list[str] = []
        doubts: dict[str | None, None] = {}
        for index, view in enumerate(self._views):
            now = call_state(view.owner)
            if now == self._states[index]:
                continue
            differs = layer_deviation(view)
            if differs is None:
                self._states[index] = now
                doubts[doubt_of_experts(view)] = None
            else:
                lines.append(differs.text)

        for doubt in doubts:
            if doubt is not None:
                logger.warning("%s", doubt)
        return list(dict.fromkeys(lines))


def doubt_of_experts(view: WeightView) -> str | None:
    """Return what may change the experts of a stack, which no call of a layer can show, or None."""
    is_stack = view.parameter.ndim == 3  # also if the view is of the whole of it
    why = unusual_call(view.owner) if is_stack else None
    if why is None:
        return None
    where = f"{view.owner_path} ({class_name(view.owner)})"
    return f"{where}: {why}. This may change what its experts compute, and was not tried"


def is_called(model: nn.Module, path: str) -> bool:
    """Return whether a layer is called; torch's attention reads the weight of its ``out_proj``."""
    around = model.get_submodule(path.rpartition(".")[0])
    is_read = path.rpartition(".")[2] == "out_proj" and isinstance(around, nn.MultiheadAttention)
    return not (is_read and type(around).forward is nn.MultiheadAttention.forward)


def deviation(model: nn.Module, view: WeightView, owners: Collection[int]) -> Deviation | None:
    """Return the outermost layer that computes something else than the weight of ``view``, or None.

    Args:
        model: the module that holds the layer.
        view: the weight, as its layer stores or computes it.
        owners: ids of the modules that own a weight with a role. A module around the layer is a
            part of it if it holds no other of them, and is linear.
    """
    result = layer_deviation(view)
    path = view.owner_path
    while _is_matrix(view) and (path := path.rpartition(".")[0]):
        around = model.get_submodule(path)
        if any(id(part) in owners and part is not view.owner for part in around.modules()):
            break
        if BASE in around._modules or unwrapped(around) is not around:
            continue
        if not _takes_one_argument(around):
            break
        with stand_ins(around):
            answer = _answer(around, view) if _can_be_called(view, around) else None
        if answer not in ("product", "linear"):
            break
        if answer == "linear":
            why = unusual_call(around) or "it computes with more than this weight"
            result = Deviation(around, _text(path, around, why), is_linear=True)

    return result


def layer_deviation(view: WeightView) -> Deviation | None:
    """Return how the layer that owns a weight computes something else than it, or None.

    A layer that is called as its class says is not run, if that class is of torch.
    """
    if not _is_matrix(view):
        return None
    layer = view.owner
    why = unusual_call(layer)
    written: Any = getattr(type(layer).forward, "__globals__", {}).get("__name__", "")
    if why is None and written in _AS_WRITTEN:
        return None

    stores_more = len([*layer.parameters(), *layer.buffers()]) > 1 + (
        getattr(layer, "bias", None) is not None
    )
    with stand_ins(layer):
        if not _can_be_called(view, layer):
            return None
        if written not in _AS_WRITTEN and isinstance(layer, nn.Linear) and stores_more:
            answer = "linear"
        else:
            answer = _answer(layer, view)

    if answer == "product" or (why is None and answer != "linear"):
        return None  # a class of its own may compute more than the product, such as a router
    if answer not in ("linear", "other"):
        why = f"{why}, and it cannot be called by itself ({answer})"
    why = why or f"its class {class_name(layer)} computes with more than this weight"
    return Deviation(layer, _text(view.owner_path, layer, why), is_linear=answer == "linear")


def _can_be_called(view: WeightView, *layers: nn.Module) -> bool:
    """Return whether layers can be called to see what they compute with a matrix in them."""
    if any(map(_is_out_of_reach, (view.owner, *layers))):
        return False
    return not is_traceable_wrapper_subclass(view.parameter)


def _takes_one_argument(layer: nn.Module) -> bool:
    """Return False if the signature of a layer shows that it cannot run on inputs alone."""
    if layer._forward_pre_hooks:
        return True  # they may add arguments
    try:
        inspect.signature(layer.forward, follow_wrapped=False).bind(None)
    except TypeError:
        return False
    except ValueError:  # of a builtin
        return True
    return True


def _is_matrix(view: WeightView) -> bool:
    if view.attribute != "weight" or view.expert is not None:
        return False
    stored = view.parameter
    return stored.ndim == 2 and stored.is_floating_point()


def _text(path: str, layer: nn.Module, why: str) -> str:
    return f"{path or 'the model'} ({class_name(layer)}): {why}"


def _is_out_of_reach(layer: nn.Module) -> bool:
    """Return whether a layer is not called, has no values, or has only a part of them here."""
    if isinstance(layer, NonDynamicallyQuantizableLinear):
        return True  # torch's attention reads its weight
    return any(weight.is_meta or is_sharded(weight) for weight in layer.parameters())


def _answer(layer: nn.Module, view: WeightView) -> Answer | str:
    """Return what a layer computes with random parameters, or the error that it raises.

    Its own values could hide a difference: the last factor of an adapter starts at zero.
    """
    generator = torch.Generator().manual_seed(0)
    stored = view.parameter
    is_lookup = is_table(view.owner)
    columns = is_lookup or is_transposed(view.owner)

    def drawn(shape: Any) -> Tensor:
        return torch.randn(shape, generator=generator).to(stored)

    parameters = {
        name: torch.zeros_like(value) if name.rpartition(".")[2] == "bias" else drawn(value.shape)
        for name, value in layer.named_parameters()
        if type(value) is nn.Parameter and value.is_floating_point() and not view.is_computed
    }
    used = (parameters[name] for name, p in layer.named_parameters() if p is stored)
    matrix = next(used, stored).detach()
    if columns:
        matrix = matrix.mT
    if is_lookup:
        inputs = torch.arange(min(4, len(stored)), device=stored.device)[:, None]
    else:
        pair = drawn((2, 3, matrix.shape[1]))  # of one token, attention is linear
        mixed = 2 * pair[:1] - 3 * pair[1:]
        inputs = torch.cat([pair, mixed, torch.zeros_like(mixed)])
    try:
        with ExitStack() as run:
            for context in _contexts(layer, stored.device.type):
                run.enter_context(context)
            output = functional_call(layer, parameters, (inputs,))
    except Exception as error:  # anybody's code, called in a way that it may not expect
        if is_about_resources(error):
            raise
        return f"{type(error).__name__}: {error!s:.100}"
    if not isinstance(output, Tensor) or output.shape != (*inputs.shape[:2], len(matrix)):
        return "other"
    if is_lookup:
        return "product" if _near(output, matrix.mT[inputs]) else "other"
    moved = output[:3] - output[3:]
    if _near(moved, inputs[:3] @ matrix.mT):
        return "product"
    return "linear" if _near(2 * moved[:1] - 3 * moved[1:2], moved[2:]) else "other"


def _contexts(layer: nn.Module, device: str) -> Iterator[Any]:
    yield quiet_run(layer)
    yield observing_paused()
    yield full_precision(device)
    yield eager_calls()


def _near(first: Tensor, second: Tensor) -> bool:
    eps = max(torch.finfo(tensor.dtype).eps for tensor in (first, second))
    size = torch.linalg.vector_norm(second.double())
    difference = torch.linalg.vector_norm(first.double() - second.double())
    return bool(difference <= max(_EXACT, _IN_EPS * eps) * size)
