"""A weight seen in one orientation, without ever copying it; and the one rule by which a dotted path
tells its layer."""

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
from wellposed.watch import evaluating

_CONV1D = "Conv1D"
_LAYER = re.compile(r"(?:^|\.)(?:layers?|blocks?|h|resblocks)\.(\d+)(?=\.|$)")
_NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")
BASE = "base_layer"
"""Where adapters (LoRA and kin) keep the layer that they adapt."""

Spans = tuple[tuple[int, int], ...]
"""Half-open ranges of rows, in order."""


@dataclass(frozen=True)
class WeightView:
    """W in ``(out_features, in_features)`` orientation, such that the layer computes ``W x``: a
    view, never a copy.

    Exact: `tensor` shares storage with the real parameter and autograd sends its gradient to that
    parameter, in the rows the view covers. A weight that its module computes from others (a
    parametrization, or the hooks of `torch.nn.utils.prune`, ``weight_norm`` and ``spectral_norm``)
    is computed anew at each access, as in evaluation mode, and changes no buffer. The parameter is
    looked up on its module at each access, so views stay right after ``model.to(...)``, sharding
    that swaps parameters, or a parametrization.

    Args:
        owner_path: dotted path of the module that owns the parameter.
        attribute: name of the parameter on that module.
        spans: half-open ranges of output rows inside a fused weight, or None for all of them.
        transposed: True where the parameter is stored ``(in_features, out_features)``.
        entry: which matrix of a stack of them, as where the weights of all experts are one
            parameter.

    Cost: no copy; a slice and a transpose of metadata.

    >>> from torch import nn
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
    entry: int | None = None

    @property
    def rows(self) -> tuple[int, int] | None:
        """The half-open range of output rows inside a fused weight, or None for all of them.

        Raises:
            ConfigError: the rows are no one block.
        """
        if self.spans is None or len(self.spans) == 1:
            return self.spans[0] if self.spans else None
        raise ConfigError(
            f"{self.parameter_name}: its rows {shown_spans(self.spans)} lie between those of other"
            " roles, so they are no block that can be changed in place; take the rows of each head"
            " by themselves (per='head'), or leave this weight out"
        )

    @property
    def parameter_name(self) -> str:
        """Full dotted name of the real `torch.nn.Parameter`; of several, the one with the shape of
        the weight."""
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
        """Whether the layer computes this weight from others, so that nothing can be written to
        it."""
        return self.attribute in sources_of(self.owner)

    @property
    def label(self) -> str:
        """The parameter's name, with the matrix and the rows of it where they are a part."""
        entry = "" if self.entry is None else f"[{self.entry}]"
        rows = "" if self.spans is None else f"[{shown_spans(self.spans)}]"
        return f"{self.parameter_name}{entry}{rows}"

    @property
    def parameter(self) -> torch.Tensor:
        """The real parameter; for a weight that is computed, its value in evaluation mode."""
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
        if len(shape) == 3 and (self.entry is not None or shape[0] == 1):
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
        """Whether a gradient of the weight reaches a parameter that is trained."""
        names = sources_of(self.owner).get(self.attribute)
        if names is None:
            return self.parameter.requires_grad
        return any(self.owner.get_parameter(name).requires_grad for name in names)

    @property
    def key(self) -> tuple[Any, ...]:
        """What two views of the same numbers have in common: parameter identity, rows,
        orientation."""
        computed = self.attribute in sources_of(self.owner)
        identity = (id(self.owner), self.attribute) if computed else id(self.parameter)
        return identity, self.spans, self.transposed, self.entry

    def tensor(self) -> torch.Tensor:
        """Return the weight, shape ``shape``: it sends gradients to the real parameter and shares
        storage with it, but for rows that are no one block, which are copied."""
        return self.seen(self.parameter)

    def seen(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the matrix inside a tensor of the parameter's shape, such as its gradient."""
        if tensor.ndim == 3:
            tensor = tensor[self.entry or 0]
        if self.transposed:
            tensor = tensor.t()
        if self.spans is None:
            return tensor
        rows = block_of(self.spans)
        if rows is not None:
            return tensor[rows.start : rows.stop : rows.step]
        return torch.cat([tensor[start:stop] for start, stop in self.spans])

    def of_rows(self, start: int, stop: int) -> WeightView:
        """Return the view of some output rows of a whole weight."""
        return replace(self, spans=((start, stop),))


def sources_of(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return, for each attribute that a module computes from parameters, their names below it.

    >>> layer = prune.identity(nn.Linear(2, 2), "weight")
    >>> sources_of(layer), sources_of(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))
    ({'weight': ('weight_orig',)}, {'weight': ('parametrizations.weight.original0', \
'parametrizations.weight.original1')})
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
    """Yield each attribute that a hook of torch sets before a call, and a function that returns its
    value."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, prune.BasePruningMethod):
            yield str(hook._tensor_name), partial(hook.apply_mask, module)
        elif isinstance(hook, WeightNorm):
            yield hook.name, partial(hook.compute_weight, module)
        elif isinstance(hook, SpectralNorm):
            yield hook.name, partial(hook.compute_weight, module, do_power_iteration=False)


def is_linear(layer: nn.Module) -> bool:
    """Tell whether a layer holds, or wraps one that holds, a matrix called ``weight``, quantised or
    not."""
    weight = getattr(getattr(layer, BASE, layer), "weight", None)
    return callable(weight) if not isinstance(weight, torch.Tensor) else weight.ndim == 2


def is_transposed(layer: nn.Module) -> bool:
    """Tell whether a layer is GPT-2's, which stores its weight (in, out); parametrised ones are of
    a subclass."""
    return any(kind.__name__ == _CONV1D for kind in type(layer).__mro__)


def is_table(module: Any) -> TypeGuard[nn.Embedding]:  # a bag has the same attributes
    """Tell whether a module looks up rows of its weight by number, or sums them over bags."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag))


def view_of(path: str, layer: nn.Module) -> WeightView:
    """Return the view of a linear-like layer's ``weight``."""
    while isinstance(base := getattr(layer, BASE, None), nn.Module):
        layer, path = base, f"{path}.{BASE}"
    weight: Any = layer.weight
    for name, part in layer.named_modules():  # a wrapper may hand on the weight of a part
        if name and part._parameters.get("weight") is weight:
            layer, path = part, f"{path}.{name}"
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
    """Return views of the same rows in the same order, those that follow each other in one fused
    parameter as one."""
    result = list(views[:1])
    for view in views[1:]:
        last = result[-1]
        parts = [(each.owner, each.attribute, each.entry) for each in (last, view)]
        rows = (*last.spans, *view.spans) if last.spans and view.spans else ()
        if parts[0] == parts[1] and len(rows) == 2 and rows[0][1] == rows[1][0]:
            whole, joint = replace(last, spans=None), last.of_rows(rows[0][0], rows[1][1])
            result[-1] = whole if whole.shape == joint.shape else joint
        else:
            result.append(view)
    return tuple(result)


def spans_of(rows: Iterable[int]) -> Spans:
    """Return sorted rows as ranges.

    >>> spans_of([0, 1, 2, 8, 9])
    ((0, 3), (8, 10))
    """
    spans: list[tuple[int, int]] = []
    for row in rows:
        if spans and spans[-1][1] == row:
            spans[-1] = (spans[-1][0], row + 1)
        else:
            spans.append((row, row + 1))
    return tuple(spans)


def block_of(spans: Spans) -> range | None:
    """Return rows that are one block, or at one distance from each other; None where they are neither.

    >>> block_of(((8, 16),)), block_of(((0, 1), (2, 3), (4, 5))), block_of(((0, 2), (4, 6)))
    (range(8, 16), range(0, 5, 2), None)
    """
    start, stop = spans[0][0], spans[-1][1]
    step = 1 if len(spans) == 1 else spans[1][0] - start
    rows = range(start, stop, step)
    return rows if len(spans) == 1 or spans == tuple((row, row + 1) for row in rows) else None


def shown_spans(spans: Spans | None) -> str:
    """Return rows for a message, such as ``0:8, 24:32``."""
    shown = [f"{start}:{stop}" for start, stop in spans or ()]
    return ", ".join([*shown[:4], *(["..."] if len(shown) > 4 else [])]) or "all"


def split_path(path: str) -> tuple[str, str]:
    """Return the container and the layer that hold a module; both are the root where nothing is
    numbered.

    >>> split_path("model.encoder.layers.3.self_attn"), split_path("self_attn"), split_path("layers.0")
    (('model.encoder.layers', 'model.encoder.layers.3'), ('', ''), ('layers', 'layers.0'))
    """
    match = _number_of_layer(path)
    if match is not None:
        return path[: match.start(1)].rstrip("."), path[: match.end(1)]
    # feed-forward roles of torch's and BART's layers sit on the layer itself, whose path is empty
    # at the root
    return "", ""


def layer_index(path: str) -> int:
    """Return the index of the layer that holds a module; 0 where nothing is numbered.

    >>> layer_index("model.encoder.layers.3.self_attn"), layer_index("self_attn")
    (3, 0)
    """
    match = _number_of_layer(path)
    return 0 if match is None else int(match.group(1))


def shared_segments(first: str, second: str) -> list[str]:
    """Return the leading segments two paths share.

    >>> shared_segments("layers.3.attention", "layers.3.mlp.up")
    ['layers', '3']
    """
    pairs = zip(first.split("."), second.split("."), strict=False)
    return [one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]


def _number_of_layer(path: str) -> re.Match[str] | None:
    return _LAYER.search(path) or _NUMBER.search(path)
