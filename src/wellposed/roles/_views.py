"""A weight seen in one orientation, without ever copying it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from wellposed.errors import ConfigError, ShapeError

_CONV1D = "Conv1D"


@dataclass(frozen=True)
class WeightView:
    """W in ``(out_features, in_features)`` orientation, such that the layer computes ``W x``: a
    view, never a copy.

    Exact: `tensor` shares storage with the real parameter and autograd sends its gradient to that
    parameter, in the rows the view covers. The parameter is looked up on its module at each access,
    so views stay right after ``model.to(...)``, sharding that swaps parameters, or a
    parametrization.

    Args:
        owner_path: dotted path of the module that owns the parameter.
        attribute: name of the parameter on that module.
        rows: half-open range of output rows inside a fused weight, or None for all of them.
        transposed: True where the parameter is stored ``(in_features, out_features)``.

    Cost: no copy; a slice and a transpose of metadata.

    >>> from torch import nn
    >>> attention = nn.MultiheadAttention(8, 2)
    >>> key = WeightView("", attention, "in_proj_weight", rows=(8, 16))
    >>> key.shape, key.tensor().data_ptr() == attention.in_proj_weight[8:].data_ptr()
    ((8, 8), True)
    """

    owner_path: str
    owner: nn.Module = field(repr=False, compare=False)
    attribute: str
    rows: tuple[int, int] | None = None
    transposed: bool = False

    @property
    def parameter_name(self) -> str:
        """Full dotted name of the real `torch.nn.Parameter`."""
        name = (
            f"parametrizations.{self.attribute}.original" if self._parametrized else self.attribute
        )
        return f"{self.owner_path}.{name}" if self.owner_path else name

    @property
    def parameter(self) -> torch.Tensor:
        """The real parameter (for a parametrized weight, the weight the layer uses)."""
        return getattr(self.owner, self.attribute)

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features) of the view."""
        shape = tuple(self.parameter.shape)
        if len(shape) == 3 and shape[0] == 1:
            shape = shape[1:]
        if len(shape) != 2:
            raise ShapeError(
                f"{self.parameter_name} has shape {tuple(self.parameter.shape)}; a weight with a"
                " role is a matrix"
            )
        rows, columns = reversed(shape) if self.transposed else shape
        return (rows if self.rows is None else self.rows[1] - self.rows[0]), columns

    @property
    def trainable(self) -> bool:
        """Whether a gradient of the weight reaches a parameter that is trained."""
        if self._parametrized:
            steps: Any = self.owner.parametrizations
            return any(each.requires_grad for each in steps[self.attribute].parameters())
        return self.parameter.requires_grad

    @property
    def key(self) -> tuple[Any, ...]:
        """What two views of the same numbers have in common: parameter identity, rows,
        orientation."""
        identity = id(self.owner) if self._parametrized else id(self.parameter)
        return identity, self.rows, self.transposed

    def tensor(self) -> torch.Tensor:
        """Return the weight, shape ``shape``: it shares storage with, and sends gradients to, the
        real parameter."""
        weight = self.parameter
        if weight.ndim == 3:
            weight = weight.squeeze(0)
        if self.transposed:
            weight = weight.t()
        return weight if self.rows is None else weight[self.rows[0] : self.rows[1]]

    def of_rows(self, start: int, stop: int) -> WeightView:
        """Return the view of some output rows of a whole weight."""
        return replace(self, rows=(start, stop))

    @property
    def _parametrized(self) -> bool:
        return self.attribute in getattr(self.owner, "parametrizations", {})


def is_linear(layer: nn.Module) -> bool:
    """Tell whether a layer holds, or wraps one that holds, a matrix called ``weight``, quantised or
    not."""
    weight = getattr(getattr(layer, "base_layer", layer), "weight", None)
    return callable(weight) if not isinstance(weight, torch.Tensor) else weight.ndim == 2


def is_transposed(layer: nn.Module) -> bool:
    """Tell whether a layer is GPT-2's, which stores its weight (in, out); parametrised ones are of
    a subclass."""
    return any(kind.__name__ == _CONV1D for kind in type(layer).__mro__)


def view_of(path: str, layer: nn.Module) -> WeightView:
    """Return the view of a linear-like layer's ``weight``."""
    base = getattr(layer, "base_layer", None)  # adapters (LoRA and kin) keep the real layer here
    if isinstance(base, nn.Module):
        layer, path = base, f"{path}.base_layer"
    weight: Any = layer.weight
    if not isinstance(weight, torch.Tensor) or not weight.is_floating_point():
        raise ConfigError(
            f"{path} ({type(layer).__name__}) holds a quantised weight, which can neither be viewed"
            " as a matrix nor trained; find roles on the model before it is quantised"
        )
    return WeightView(path, layer, "weight", transposed=is_transposed(layer))


def chunked(view: WeightView, chunk: tuple[int, int]) -> WeightView:
    """Return the i-th of n equal blocks of output rows, ``chunk`` = (i, n)."""
    index, count = chunk
    rows = view.shape[0]
    if rows % count:
        raise ShapeError(
            f"{view.parameter_name} has {rows} output rows, which {count} fused weights cannot"
            " share"
        )
    size = rows // count
    return view.of_rows(index * size, (index + 1) * size)


def joined_views(views: Sequence[WeightView]) -> tuple[WeightView, ...]:
    """Return views of the same rows in the same order, those that follow each other in one fused
    parameter as one."""
    result: list[WeightView] = []
    for view in views:
        last = result[-1] if result else None
        if last is not None and last.rows and view.rows and _follows(last, view):
            rows = (last.rows[0], view.rows[1])
            whole = replace(last, rows=None)
            result[-1] = whole if rows == (0, whole.shape[0]) else replace(last, rows=rows)
        else:
            result.append(view)
    return tuple(result)


def _follows(first: WeightView, second: WeightView) -> bool:
    same = first.owner is second.owner and first.attribute == second.attribute
    return same and first.rows is not None and first.rows[1:] == (second.rows or ())[:1]
