"""Values and slopes of activations over intervals of their inputs (theory notes B22, B23)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wellposed.certification._as_called import is_class
from wellposed.certification._centres import Centre

# Allowance for float64 rounding of values and slopes, and for turns known to 1e-7.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Curve:
    """An activation of each entry, its derivative, and where either turns from rising to falling
    or back."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]
    value_turns: tuple[float, ...]
    slope_turns: tuple[float, ...]

    def values(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest value over intervals, entry by entry."""
        return _range(self.value, self.value_turns, low, high)

    def slopes(self, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest slope over intervals, entry by entry."""
        return _range(self.slope, self.slope_turns, low, high)


def _range(
    function: Callable[[Tensor], Tensor], turns: tuple[float, ...], low: Tensor, high: Tensor
) -> tuple[Tensor, Tensor]:
    # Between its turns the function is monotone.
    inside = (low.maximum(high.minimum(torch.full_like(low, turn))) for turn in turns)
    made = torch.stack([function(point) for point in (low, high, *inside)])
    smallest = made.amin(0)
    largest = made.amax(0)
    return (
        smallest - _ROUNDING * (1 + smallest.abs()),
        largest + _ROUNDING * (1 + largest.abs()),
    )


def _relu_slope(x: Tensor) -> Tensor:
    return (x > 0).to(x.dtype)


def _gelu_slope(x: Tensor) -> Tensor:
    normal = torch.exp(-x.square() / 2) / math.sqrt(2 * math.pi)
    return (1 + torch.erf(x / math.sqrt(2))) / 2 + x * normal


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _gelu_tanh_slope(x: Tensor) -> Tensor:
    bend = math.sqrt(2 / math.pi)
    inner = torch.tanh(bend * (x + 0.044715 * x**3))
    return (1 + inner) / 2 + x / 2 * (1 - inner.square()) * bend * (1 + 0.134145 * x.square())


def _silu_slope(x: Tensor) -> Tensor:
    gate = x.sigmoid()
    return gate * (1 + x * (1 - gate))


def _tanh_slope(x: Tensor) -> Tensor:
    return 1 - x.tanh().square()


_RELU = Curve(F.relu, _relu_slope, (), ())
_GELU = Curve(F.gelu, _gelu_slope, (-0.7517915246935646,), (-math.sqrt(2), math.sqrt(2)))
_GELU_TANH = Curve(
    _gelu_tanh, _gelu_tanh_slope, (-0.7524614220710162,), (-1.4185040087908283, 1.4185040087908283)
)
_SILU = Curve(F.silu, _silu_slope, (-1.2784645427610738,), (-2.399357280515467, 2.399357280515467))
_TANH = Curve(torch.tanh, _tanh_slope, (), (0.0,))

_BY_TYPE = {nn.ReLU: _RELU, nn.Tanh: _TANH, nn.SiLU: _SILU}
_OF_TRANSFORMERS = {
    "SiLUActivation": _SILU, "NewGELUActivation": _GELU_TANH, "FastGELUActivation": _GELU_TANH,
    "AccurateGELUActivation": _GELU_TANH,
}  # fmt: skip
_GELUS_OF_TRANSFORMERS = {
    "GELUActivation": (_GELU, "_gelu_python"),
    "GELUTanh": (_GELU_TANH, "_gelu_tanh_python"),
}


def curve_of(module: nn.Module) -> Curve | None:
    """Return the curve of an activation of torch or transformers, or None if it is not known here."""
    kind = type(module)
    if kind is nn.GELU:
        return _GELU_TANH if module.approximate == "tanh" else _GELU  # pyright: ignore[reportAttributeAccessIssue]
    if kind in _BY_TYPE:
        return _BY_TYPE[kind]
    if not is_class(kind, "transformers.activations", kind.__name__):
        return None
    if kind.__name__ in _GELUS_OF_TRANSFORMERS:
        curve, python_form = _GELUS_OF_TRANSFORMERS[kind.__name__]
        return curve if _is_its_own(module, python_form) else None
    return _OF_TRANSFORMERS.get(kind.__name__)


def _is_its_own(module: nn.Module, python_form: str) -> bool:
    """Return whether the function in an attribute is still torch's or the class's own."""
    function: Any = module.act
    if isinstance(function, functools.partial):
        return function.func is F.gelu and function.keywords == {"approximate": "tanh"}
    if function is F.gelu:
        return python_form == "_gelu_python"
    return getattr(function, "__func__", None) is getattr(type(module), python_form, None)


def slopes_near(module: nn.Module, centre: Centre, moved: float) -> tuple[Tensor, Tensor] | None:
    """Return the smallest and the largest slope of each entry of an activation in the balls (width,).

    An entry moves by at most ``moved`` too. None if nothing is known of the activation's slopes.
    """
    curve = curve_of(module)
    if curve is None:
        return None
    tokens = centre.tokens.flatten(0, 1)
    reach = centre.reach(moved)
    return curve.slopes(tokens.amin(0) - reach, tokens.amax(0) + reach)
