"""Record one forward pass: products with parameters, attention calls, and what each read."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from wellposed.roles._views import WeightView, spans_of

# Taken as constants, so that a norm couples no row of a projection with another.
_STATISTICS = {"mean", "var", "std", "sqrt", "rsqrt", "norm", "vector_norm"}
_NORMS = {"layer_norm", "rms_norm", "group_norm", "normalize", "batch_norm", "instance_norm"}
_COPIES = {"to", "type_as", "contiguous", "clone", "float", "half", "bfloat16", "double"}


@dataclass(frozen=True)
class Place:
    """A parameter, or what is computed from it alone, and how it lies in storage."""

    path: str
    owner: nn.Module
    attribute: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    entry: int | None = None

    @property
    def name(self) -> str:
        """Full dotted name of the weight."""
        return f"{self.path}.{self.attribute}".lstrip(".")


@dataclass(eq=False, kw_only=True)
class Cut:
    """A tensor at which the graph was cut: its gradient ends in ``leaf``."""

    order: int
    leaf: Tensor
    origin: Tensor | None = None
    """What it was computed from, where that is one tensor."""


@dataclass(eq=False, kw_only=True)
class Product(Cut):
    """``output = input W^T``: the weight as the product reads it, and of which entries of a
    stack."""

    view: WeightView
    rows: range
    entries: tuple[int, ...]
    source: Tensor
    in_features: int

    def view_of(self, rows: Sequence[int] | None = None, entry: int | None = None) -> WeightView:
        """Return the view of some of the product's own rows, of all by default."""
        chosen = self.rows if rows is None else [self.rows[row] for row in rows]
        whole = WeightView(
            self.view.owner_path,
            self.view.owner,
            self.view.attribute,
            transposed=self.view.transposed,
            entry=entry,
        )
        if list(chosen) == list(range(whole.shape[0])):
            return whole
        return WeightView(**{**vars(whole), "spans": spans_of(sorted(chosen))})


@dataclass(eq=False, kw_only=True)
class Attention(Cut):
    """One attention call: query, key and value as (..., tokens, width)."""

    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool


@dataclass
class Record:
    """What was seen in one pass, in order."""

    products: list[Product] = field(default_factory=list)
    attention: list[Attention] = field(default_factory=list)
    gates: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Autograd node of an elementwise product -> its factors."""
    cuts: dict[int, Cut] = field(default_factory=dict)
    """Identity of a leaf -> where it came from."""
    used: set[int] = field(default_factory=set)
    """Storages that any function read."""
    switched: bool = False
    """Whether the model switched gradients on or off."""

    def above(self, *tensors: Tensor, limit: float = math.inf) -> list[Cut]:
        """Return the nearest cuts that the tensors were computed from, no more than ``limit`` + 1
        of them."""
        found: dict[int, Cut] = {}
        for node in ancestors(tensors):
            cut = self.cuts.get(id(getattr(node, "variable", None)))
            if cut is not None:
                found[id(cut)] = cut
                if len(found) > limit:
                    break
        return list(found.values())


def ancestors(tensors: Sequence[Tensor]) -> Iterator[Any]:
    """Yield the autograd nodes above the tensors, the nearest first."""
    level: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen: set[Any] = set()
    while level:
        above: list[Any] = []
        for node in level:
            if node is not None and node not in seen:
                seen.add(node)
                yield node
                above += [parent for parent, _ in node.next_functions]
        level = above


@dataclass
class _Call:
    """One call of a function of torch; ``given`` are the tensors it received."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: list[Tensor]
    output: Tensor


class Tracer(TorchFunctionMode):
    """A mode under which a forward pass fills ``record``; the model computes what it always does.

    The graph of autograd is cut behind every product with a parameter, every attention call and
    every embedding, so that the way up from a tensor ends at the nearest of them, whether or not
    weights require a gradient. Weights are known by where they lie in storage, so transposes,
    slices and entries of a stack need no following. With ``forced`` the graph is kept where the model
    itself switches gradients off.
    """

    def __init__(self, model: nn.Module, *, forced: bool = False) -> None:
        super().__init__()
        self._forced = forced
        self.record = Record()
        self._order = 0
        self._scores: dict[Any, tuple[Tensor, Tensor]] = {}
        self._weights: dict[Any, Tensor] = {}
        self._kept: list[Tensor] = []  # what is known by its address must not be freed
        self._places: dict[int, list[Place]] = {}
        self._neutral: dict[int, frozenset[str]] = {}
        """Storages that no activation had a part in -> parameters that had one."""
        self._parametrized: dict[str, Place] = {}
        modules = dict(model.named_modules())
        for path, module in modules.items():
            for name, weight in module._parameters.items():
                if weight is not None and weight.numel():
                    self._know(weight, self._of_parameter(modules, path, name, weight))
            for buffer in module._buffers.values():
                if buffer is not None and buffer.numel():
                    self._neutral.setdefault(_address(buffer), frozenset())

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "_set_grad_enabled":
            self.record.switched = True
            return None if self._forced else func(*args, **kwargs)
        if name == "__get__":
            return func(*args, **kwargs)
        if func in (F.multi_head_attention_forward, F.glu):
            with self:
                return _written_out(func)(*args, **kwargs)
        self._order += 1
        given = [each for each in _flat((args, kwargs)) if isinstance(each, Tensor)]
        output = func(*args, **kwargs)
        if isinstance(output, Tensor):
            output = self._seen(_Call(name, args, kwargs, given, output))
            self._follow(name, args, given, output)
        elif name in {"var_mean", "std_mean"}:
            return tuple(each.detach() for each in output)
        elif name == "frexp":
            for each in output:
                self._follow(name, args, given, each)
        return output

    def _seen(self, call: _Call) -> Tensor:
        """Note what a function did; return its output, cut off where it is a product."""
        read = _READERS.get(call.name)
        if read is None or not call.output.is_floating_point():
            return call.output
        return read(self, call)

    def _norm(self, call: _Call) -> Tensor:
        source, output = call.given[0], call.output
        if (output.shape, output.dtype) != (source.shape, source.dtype):
            return output
        return output.detach() + (source - source.detach())

    def _embedding(self, call: _Call) -> Tensor:
        known = all(_address(each) in self._neutral for each in call.given)
        return call.output if known else self._cut(call.output)

    def _scaled_dot_product(self, call: _Call) -> Tensor:
        named = [call.kwargs[name] for name in ("query", "key", "value") if name in call.kwargs]
        query, key, value = (*call.args, *named)[:3]
        causal = _is_causal(call.args, call.kwargs, query, key)
        return self._attended(query, key, value, call.output, causal)

    def _softmax(self, call: _Call) -> Tensor:
        if call.output.grad_fn is not None and call.output.ndim >= 2:
            self._weights[call.output.grad_fn] = call.given[0]
            self._kept.append(call.output)
        return call.output

    def _gate(self, call: _Call) -> Tensor:
        if call.output.grad_fn is not None and len({each.shape for each in call.given}) == 1:
            self.record.gates[call.output.grad_fn] = (call.given[0], call.given[-1])
        return call.output

    def _multiplied(self, call: _Call) -> Tensor:
        """See a product of two tensors: with a weight, of query and key, or of attention weights
        and values."""
        left, right = call.given if call.name != "__rmatmul__" else call.given[::-1]
        output = call.output
        if right.ndim >= 2 and self._neutral.get(_address(right)):
            return self._product(left, right.mT, output)
        if left.ndim < 2 or right.ndim < 2:
            return output
        if (scores := self._attention_of(left)) is not None:
            return self._attended(*scores[:2], right, output, scores[2])
        self._score(output, left, right.mT)
        return output

    def _einsum(self, call: _Call) -> Tensor:
        """Read a product of two tensors from its equation; others are let pass."""
        given, output = call.given, call.output
        equation = call.args[0] if isinstance(call.args[0], str) else ""
        ins, _, out = equation.replace(" ", "").partition("->")
        terms = ins.split(",")
        known = any(self._at(each) is not None for each in given)
        readable = len(terms) == len(given) == 2 and "." not in equation and out
        summed = [x for x in terms[0] if readable and x in terms[1] and x not in out]
        if len(summed) != 1:
            return self._cut(output) if known else output
        weight = next((i for i in (1, 0) if self._at(given[i]) is not None), None)
        if weight is not None:
            own = [letter for letter in terms[weight] if letter not in terms[1 - weight]]
            shared = [letter for letter in terms[weight] if letter not in (*own, *summed)]
            if len(own) != 1 or out[-1] != own[0] or len(shared) > 1:
                return self._cut(output)
            order = [terms[weight].index(letter) for letter in (*shared, *own, *summed)]
            return self._product(given[1 - weight], given[weight].permute(order), output)
        left, right = given
        scores = self._attention_of(left)
        token = terms[0][-1] if scores is not None else out[-1]
        if scores is not None and summed == [token]:
            others = [letter for letter in terms[1] if letter != token]
            width = next(
                (letter for letter in reversed(others) if letter not in terms[0]), others[-1]
            )
            order = [*(letter for letter in others if letter != width), token, width]
            value = right.permute([terms[1].index(letter) for letter in order])
            return self._attended(*scores[:2], value, output, scores[2])
        if token in terms[1] and len(out) >= 2 and out[-2] in terms[0]:
            sides = []
            for term, side, own in ((terms[0], left, out[-2]), (terms[1], right, token)):
                rest = [letter for letter in term if letter not in (own, summed[0])]
                sides.append(side.permute([term.index(x) for x in (*rest, own, summed[0])]))
            self._score(output, *sides)
        return output

    def _score(self, output: Tensor, query: Tensor, key: Tensor) -> None:
        if output.grad_fn is not None:
            self._scores[output.grad_fn] = (query, key)
            self._kept.append(output)

    def _attention_of(self, weights: Tensor) -> tuple[Tensor, Tensor, bool] | None:
        """Return query and key where a tensor comes from the softmax of a product of the two."""
        node = next((n for n in ancestors([weights]) if n in self._weights), None)
        if node is None:
            return None
        logits = self._weights[node]
        scores = next((n for n in ancestors([logits]) if n in self._scores), None)
        if scores is None:
            return None
        square = weights.shape[-1] == weights.shape[-2] > 1
        return (*self._scores[scores], bool(square and not weights.triu(1).any()))

    def _attended(
        self, query: Tensor, key: Tensor, value: Tensor, output: Tensor, causal: bool
    ) -> Tensor:
        output, cut = self._leaf(
            output,
            lambda leaf: Attention(
                order=self._order, leaf=leaf, query=query, key=key, value=value, causal=causal
            ),
        )
        self.record.attention.append(cut)
        return output

    def _product(self, source: Tensor, weight: Tensor, output: Tensor) -> Tensor:
        """Note ``source weight^T``."""
        place = self._at(weight)
        if place is None:
            known = _address(weight) in self._neutral and _address(source) not in self._neutral
            return self._cut(output) if known else output
        found = _located(place, weight)
        if found is None:
            return self._cut(output)
        entries, transposed, rows = found
        view = WeightView(place.path, place.owner, place.attribute, transposed=transposed)
        output, cut = self._leaf(
            output,
            lambda leaf: Product(
                order=self._order,
                leaf=leaf,
                origin=source,
                source=source,
                view=view,
                rows=rows,
                entries=entries,
                in_features=weight.shape[-1],
            ),
        )
        self.record.products.append(cut)
        return output

    def given(self, value: Tensor) -> Tensor:
        """Return an input of the model as a place where the way up ends."""
        with torch.enable_grad():
            return self._cut(value)

    def _cut(self, output: Tensor, origin: Tensor | None = None) -> Tensor:
        return self._leaf(output, lambda leaf: Cut(order=self._order, leaf=leaf, origin=origin))[0]

    def _leaf(self, output: Tensor, cut: Callable[[Tensor], Any]) -> tuple[Tensor, Any]:
        leaf = output.detach().requires_grad_()
        made = cut(leaf)
        self.record.cuts[id(leaf)] = made
        return leaf.clone(), made  # what follows may write into it

    def _follow(
        self, name: str, args: tuple[Any, ...], given: list[Tensor], output: Tensor
    ) -> None:
        """Know what is computed from parameters alone."""
        for each in given:
            self.record.used.add(_address(each))
        address = _address(output)
        if address in self._neutral:
            return
        place = self._at(given[0]) if given else None
        if name == "__getitem__" and place is not None and len(place.shape) == 3:
            if isinstance(args[1], Tensor) and args[1].numel() == 1:
                entry = _place(place.path, place.owner, place.attribute, output, int(args[1]))
                self._know(output, entry)
            return
        if any(_address(each) not in self._neutral for each in given):
            return
        names = frozenset[str]().union(*(self._neutral[_address(each)] for each in given))
        self._neutral[address] = names
        self._kept.append(output)
        if place is None or name not in _COPIES or output.shape != given[0].shape:
            place = self._parametrized.get(next(iter(names), "")) if len(names) == 1 else None
        if place is not None and output.ndim >= 2:
            self._know(
                output, _place(place.path, place.owner, place.attribute, output, place.entry)
            )

    def _of_parameter(
        self, modules: dict[str, nn.Module], path: str, name: str, weight: Tensor
    ) -> Place:
        """Return where a parameter is; those of a parametrization stand for the weight that it
        computes."""
        owner_path, inside, attribute = f".{path}".rpartition(".parametrizations.")
        if not inside or "." in attribute:
            return _place(path, modules[path], name, weight)
        owner_path = owner_path.lstrip(".")
        place = _place(owner_path, modules[owner_path], attribute, weight)
        self._parametrized[place.name] = place
        return place

    def _know(self, weight: Tensor, place: Place) -> None:
        self._places.setdefault(_address(weight), []).append(place)
        self._neutral.setdefault(_address(weight), frozenset({place.name}))
        self._kept.append(weight)

    def _at(self, weight: Tensor) -> Place | None:
        for place in reversed(self._places.get(_address(weight), [])):
            size = 1 + sum((n - 1) * s for n, s in zip(place.shape, place.stride, strict=True))
            if place.offset <= weight.storage_offset() < place.offset + size:
                return place
        return None


_READERS: dict[str, Callable[[Tracer, _Call], Tensor]] = {
    **dict.fromkeys(_STATISTICS, lambda _, call: call.output.detach()),
    **dict.fromkeys(_NORMS, Tracer._norm),
    **dict.fromkeys(("mul", "__mul__", "__rmul__", "multiply"), Tracer._gate),
    **dict.fromkeys(("matmul", "mm", "bmm", "__matmul__", "__rmatmul__"), Tracer._multiplied),
    **dict.fromkeys(
        ("addmm", "baddbmm"),
        lambda tracer, call: tracer._multiplied(replace(call, given=call.given[1:])),
    ),
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d"),
        lambda tracer, call: tracer._cut(call.output, call.given[0]),
    ),
    **dict.fromkeys(
        ("grouped_mm", "_grouped_mm", "grouped_mm_fallback"),
        lambda tracer, call: tracer._product(call.given[0], call.given[1].mT, call.output),
    ),
    "linear": lambda tracer, call: tracer._product(call.given[0], call.given[1], call.output),
    "embedding": Tracer._embedding,
    "scaled_dot_product_attention": Tracer._scaled_dot_product,
    "softmax": Tracer._softmax,
    "einsum": Tracer._einsum,
}
"""Name of a function of torch -> what a trace makes of it."""


def _place(
    path: str, owner: nn.Module, attribute: str, weight: Tensor, entry: int | None = None
) -> Place:
    return Place(
        path,
        owner,
        attribute,
        tuple(weight.shape),
        weight.stride(),
        int(weight.storage_offset()),
        entry,
    )


def _located(place: Place, weight: Tensor) -> tuple[tuple[int, ...], bool, range] | None:
    """Return of which matrices of a parameter, in which orientation, a weight (..., out, in) is
    which rows; None where it is no such part."""
    shape, stride = place.shape, place.stride
    if len(shape) not in (2, 3) or weight.ndim not in (2, 3):
        return None
    step = stride[0] if len(shape) == 3 else 0
    rows, columns = shape[-2:]
    start = int(weight.storage_offset()) - place.offset
    entry, start = divmod(start, step) if step else (0, start)
    entries = range(entry, entry + 1)
    if weight.ndim == 3:
        if weight.shape[0] != 1 and weight.stride(0) != step:
            return None
        entries = range(entry, entry + weight.shape[0])
    chosen = () if len(shape) == 2 else tuple(entries)
    if place.entry is not None:
        chosen = (place.entry,)
    outs, ins = weight.shape[-2:]
    jump, across = weight.stride()[-2:]
    for transposed, (n, m), (by_row, by_column) in (
        (False, (rows, columns), stride[-2:]),
        (True, (columns, rows), stride[-2:][::-1]),
    ):
        if ins == m and (across == by_column or m == 1) and jump % by_row == 0:
            first, left = divmod(start, by_row)
            pace = max(jump // by_row, 1)
            if not left and first + (outs - 1) * pace < n:
                return chosen, transposed, range(first, first + outs * pace, pace)
    return None


def _is_causal(args: tuple[Any, ...], kwargs: dict[str, Any], query: Tensor, key: Tensor) -> bool:
    mask = kwargs.get("attn_mask", args[3] if len(args) > 3 else None)
    if kwargs.get("is_causal", args[5] if len(args) > 5 else False):
        return query.shape[-2] > 1
    if mask is None or query.shape[-2] != key.shape[-2] or mask.shape[-2] < 2:
        return False
    hidden = ~mask if mask.dtype == torch.bool else mask <= torch.finfo(mask.dtype).min / 2
    ahead = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
    return bool(hidden[..., ahead].all())


def _written_out(function: Any) -> Callable[..., Any]:
    """Return a composite function of torch that shows a mode what it consists of."""
    if function is F.glu:
        return _glu
    unseen = {**function.__globals__, "has_torch_function": lambda _: False}
    copy = FunctionType(function.__code__, unseen, function.__name__, function.__defaults__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _glu(values: Tensor, dim: int = -1) -> Tensor:
    left, right = values.chunk(2, dim)
    return left * right.sigmoid()


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        yield value
        return
    for each in value:
        yield from _flat(each)
