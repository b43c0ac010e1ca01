"""A weight seen in one orientation without a copy, and the rule that reads a layer from a path."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from wellposed.errors import ConfigError, ShapeError
from wellposed.hooks import evaluating
from wellposed.linalg import cut_of, gathered, is_sharded

_CONV1D = "Conv1D"
_LAYER = re.compile(r"(?:^|\.)(?:layers?|blocks?|h|resblocks)\.(\d+)(?=\.|$)")
_NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")
BASE = "base_layer"
"""Name under which adapters (LoRA and others) store the layer that they adapt."""

Spans = tuple[tuple[int, int], ...]
"""Half-open ranges of rows, in order."""


@dataclass(frozen=True)
class WeightView:
    """View of W as ``(out_features, in_features)``, such that the layer computes ``W x``.

    Exact: `tensor` shares storage with the parameter and sends gradients to the covered rows. The
    parameter is looked up at each access, so views stay valid after ``model.to(...)``, sharding or
    a parametrization. A weight that its module computes (a parametrization, or a hook for pruning,
    ``weight_norm`` or ``spectral_norm``) is recomputed as in evaluation mode; no buffer changes.

    Args:
        owner_path: dotted path of the module that owns the parameter.
        attribute: name of the parameter on that module.
        spans: half-open ranges of output rows inside a fused weight; None for all.
        transposed: True if the parameter is stored ``(in_features, out_features)``.
        expert: index of the matrix in a stack, as in one parameter for all experts.
        deviation: set by `find_roles` if a hook, a replaced ``forward`` or a wrapper makes the layer
            compute something else.

    Cost: no copy; a slice and a transpose of metadata.

    >>> attention = nn.MultiheadAttention(8, 2)
    >>> key = WeightView("", attention, "in_proj_weight", spans=((8, 16),))
    >>> key.shape, key.tensor().data_ptr() == attention.in_proj_weight[8:].data_ptr()
    ((8, 8), True)
    """

    owner_path: str
    owner: nn.Module = field(repr=False, compare=False)
    attribute: str
    spans: Spans | None = None
    transposed: bool = False
    expert: int | None = None
    deviation: str | None = field(default=None, repr=False, compare=False)
    """The layer that computes something else than this weight, and why; None if none does."""

    @property
    def rows(self) -> tuple[int, int] | None:
        """Half-open range of output rows, None for all; `ConfigError` if not one block."""
        if self.spans is None or len(self.spans) == 1:
            return self.spans[0] if self.spans else None
        raise ConfigError(
            f"{self.parameter_name}: its rows {shown_spans(self.spans)} lie between those of other"
            " roles, so they cannot be changed in place. Take the rows of each head by themselves"
            " (per='head'), or leave this weight out"
        )

    @property
    def parameter_name(self) -> str:
        """Full name of the `torch.nn.Parameter`; of several, the one with the weight's shape."""
        originals = [name for name in self.sources if name.endswith(".original")]
        return (*originals, self.sources[-1])[0]

    @property
    def sources(self) -> tuple[str, ...]:
        """Full dotted names of all parameters that the weight is computed from."""
        prefix = f"{self.owner_path}." if self.owner_path else ""
        names = sources_of(self.owner).get(self.attribute, (self.attribute,))
        return tuple(f"{prefix}{name}" for name in names)

    @property
    def is_computed(self) -> bool:
        """Whether the layer computes this weight, so that it cannot be written."""
        is_stored = self.attribute in self.owner._parameters
        return not is_stored and self.attribute in sources_of(self.owner)

    @property
    def label(self) -> str:
        """The parameter's name, with the index and the rows if it is only a part."""
        expert = "" if self.expert is None else f"[{self.expert}]"
        rows = "" if self.spans is None else f"[{shown_spans(self.spans)}]"
        return f"{self.parameter_name}{expert}{rows}"

    @property
    def parameter(self) -> torch.Tensor:
        """The parameter; of a computed weight, its value in evaluation mode."""
        if self.attribute in self.owner._parameters:
            return getattr(self.owner, self.attribute)
        hooks = dict(_hooks(self.owner))
        if self.attribute in hooks:
            return hooks[self.attribute]()
        steps: Any = getattr(self.owner, "parametrizations", {})
        if self.attribute not in steps:
            return getattr(self.owner, self.attribute)
        with evaluating(steps[self.attribute]):  # spectral_norm iterates in training mode
            return getattr(self.owner, self.attribute)

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features) of the view."""
        shape = tuple(self.parameter.shape)
        if len(shape) == 3 and (self.expert is not None or shape[0] == 1):
            shape = shape[1:]
        if len(shape) != 2:
            raise ShapeError(
                f"{self.parameter_name} has shape {tuple(self.parameter.shape)}; a weight with a"
                " role is a matrix"
            )
        rows, columns = reversed(shape) if self.transposed else shape
        return (rows if self.spans is None else sum(b - a for a, b in self.spans)), columns

    @property
    def trainable(self) -> bool:
        """Whether a gradient of the weight reaches a trained parameter."""
        names = sources_of(self.owner).get(self.attribute)
        if names is None:
            return self.parameter.requires_grad
        return any(self.owner.get_parameter(name).requires_grad for name in names)

    @property
    def key(self) -> tuple[Any, ...]:
        """Key that is equal for views of the same numbers: identity, rows, orientation."""
        identity = (id(self.owner), self.attribute) if self.is_computed else id(self.parameter)
        return identity, self.spans, self.transposed, self.expert

    def tensor(self) -> torch.Tensor:
        """Return the weight: shared storage, or a copy if its rows are not one block.

        A part of a parameter that is cut along that part (`crosses_shards`) is gathered, which
        every rank must do; DTensor would give it a gradient that is not cut as the parameter is.
        """
        stored = self.parameter
        return self.matrix_in(gathered(stored) if self.crosses_shards else stored)

    @property
    def crosses_shards(self) -> bool:
        """Whether the weight is a part of a parameter along a dimension that ranks share."""
        stored = self.owner._parameters.get(self.attribute)
        if stored is None or not is_sharded(stored) or (self.spans is None and stored.ndim < 3):
            return False
        cut = cut_of(stored, once=False)
        rows = stored.ndim - (1 if self.transposed else 2)
        is_of_stack = stored.ndim == 3 and cut is not None and cut.dim == 0
        return cut is None or is_of_stack or (self.spans is not None and cut.dim == rows)

    def matrix_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the matrix inside a tensor of the parameter's shape, such as its gradient."""
        matrix = tensor[self.expert or 0] if tensor.ndim == 3 else tensor
        return self.rows_in(matrix.t() if self.transposed else matrix)

    def rows_in(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the rows of this view in the whole weight, or in each of a stack, (..., out, in)."""
        if self.spans is None:
            return weights
        rows = block_of(self.spans)
        if rows is not None:
            return weights[..., rows.start : rows.stop : rows.step, :]
        return torch.cat([weights[..., start:stop, :] for start, stop in self.spans], -2)

    def of_rows(self, start: int, stop: int) -> WeightView:
        """Return the view of some output rows of a whole weight."""
        return replace(self, spans=((start, stop),))


def sources_of(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return, for each attribute that a module computes, the names of the parameters behind it.

    >>> sources_of(prune.identity(nn.Linear(2, 2), "weight"))
    {'weight': ('weight_orig',)}
    """
    steps: Any = getattr(module, "parametrizations", {})
    names = {
        name: tuple(
            f"parametrizations.{name}.{inner}" for inner, _ in steps[name].named_parameters()
        )
        for name in steps
    }
    for name, _ in _hooks(module):
        parts = (f"{name}{end}" for end in ("_orig", "_g", "_v"))
        names[name] = tuple(part for part in parts if part in module._parameters)
    return names


def _hooks(module: nn.Module) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
    """Yield attributes that hooks of torch set before a call, with functions for the values."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, prune.BasePruningMethod):
            yield str(hook._tensor_name), partial(hook.apply_mask, module)
        elif isinstance(hook, WeightNorm):
            yield hook.name, partial(hook.compute_weight, module)
        elif isinstance(hook, SpectralNorm):
            yield hook.name, partial(hook.compute_weight, module, do_power_iteration=False)


def is_linear(layer: nn.Module) -> bool:
    """Return whether a layer has or wraps a matrix called ``weight``, quantised or not."""
    weight = getattr(getattr(layer, BASE, layer), "weight", None)
    return callable(weight) if not isinstance(weight, torch.Tensor) else weight.ndim == 2


def is_transposed(layer: nn.Module) -> bool:
    """Return whether a layer is GPT-2's Conv1D (or a subclass), which stores (in, out)."""
    return any(kind.__name__ == _CONV1D for kind in type(layer).__mro__)


def is_table(module: Any) -> TypeGuard[nn.Embedding]:  # a bag has the same attributes
    """Return whether a module looks up rows of its weight by number, or sums them over bags."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag))


def view_of(path: str, layer: nn.Module) -> WeightView:
    """Return the view of a linear-like layer's ``weight``."""
    while isinstance(base := getattr(layer, BASE, None), nn.Module):
        layer = base
        path = f"{path}.{BASE}"

    weight: Any = layer.weight
    for name, part in layer.named_modules():  # a wrapper may expose the weight of a child
        if name and part._parameters.get("weight") is weight:
            layer = part
            path = f"{path}.{name}"
            break

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
        problem = f"{rows} output rows, which {count} fused weights cannot share"
        raise ShapeError(f"{view.parameter_name} has {problem}")
    size = rows // count
    return view.of_rows(index * size, (index + 1) * size)


def joined_views(views: Sequence[WeightView]) -> tuple[WeightView, ...]:
    """Return the same rows in order, with consecutive views of one parameter joined."""
    result = list(views[:1])
    for view in views[1:]:
        last = result[-1]
        parts = [(item.owner, item.attribute, item.expert) for item in (last, view)]
        rows = (*last.spans, *view.spans) if last.spans and view.spans else ()
        if parts[0] == parts[1] and len(rows) == 2 and rows[0][1] == rows[1][0]:
            full = replace(last, spans=None)
            joint = last.of_rows(rows[0][0], rows[1][1])
            result[-1] = full if full.shape == joint.shape else joint
        else:
            result.append(view)
    return tuple(result)


def spans_of(rows: Iterable[int]) -> Spans:
    """Return sorted rows as half-open ranges: 0, 1, 2, 8 as ``((0, 3), (8, 9))``."""
    spans: list[tuple[int, int]] = []
    for row in rows:
        if spans and spans[-1][1] == row:
            spans[-1] = (spans[-1][0], row + 1)
        else:
            spans.append((row, row + 1))
    return tuple(spans)


def block_of(spans: Spans) -> range | None:
    """Return rows one distance apart as a range (0, 2, 4: ``range(0, 5, 2)``), else None."""
    start = spans[0][0]
    stop = spans[-1][1]
    step = 1 if len(spans) == 1 else spans[1][0] - start
    rows = range(start, stop, step)
    return rows if len(spans) == 1 or spans == tuple((row, row + 1) for row in rows) else None


def shown_spans(spans: Spans | None) -> str:
    """Return rows for a message, such as ``0:8, 24:32``."""
    ranges = [f"{start}:{stop}" for start, stop in spans or ()]
    return ", ".join([*ranges[:4], *(["..."] if len(ranges) > 4 else [])]) or "all"


def split_path(path: str) -> tuple[str, str]:
    """Return the paths of the container and the layer around a module; "" without a number.

    >>> split_path("model.encoder.layers.3.self_attn"), split_path("self_attn")
    (('model.encoder.layers', 'model.encoder.layers.3'), ('', ''))
    """
    match = _number_of_layer(path)
    if match is not None:
        return path[: match.start(1)].rstrip("."), path[: match.end(1)]
    # feed-forward roles of torch's and BART's layers sit on the layer itself, whose path is empty
    # at the root
    return "", ""


def layer_index(path: str) -> int:
    """Return the index of the layer around a module; 0 if its path has no number."""
    match = _number_of_layer(path)
    return 0 if match is None else int(match.group(1))


def shared_segments(first: str, second: str) -> list[str]:
    """Return the leading segments that two dotted paths share."""
    pairs = zip(first.split("."), second.split("."), strict=False)
    return [one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]


def _number_of_layer(path: str) -> re.Match[str] | None:
    return _LAYER.search(path) or _NUMBER.search(path)
