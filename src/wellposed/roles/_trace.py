"""Mode that records one forward pass: products with parameters, attention calls, and their inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from wellposed.functional import mask_limit
from wellposed.roles._composites import WRITTEN_OUT
from wellposed.roles._locate import LocatedWeight, located
from wellposed.roles._record import Attention, Cut, Product, Record, ancestors
from wellposed.roles._views import WeightView, sources_of

# Treated as constants, so that a norm does not couple rows of a projection.
_STATISTICS = {"mean", "var", "std", "sqrt", "rsqrt", "norm", "vector_norm"}
_NORMS = {"layer_norm", "rms_norm", "group_norm", "normalize", "batch_norm", "instance_norm"}
_COPIES = {"to", "type_as", "contiguous", "clone", "float", "half", "bfloat16", "double"}


@dataclass
class Call:
    """One call of a function of torch; ``inputs`` lists the tensors that it received."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[Tensor]
    output: Tensor


class Tracer(TorchFunctionMode):
    """Mode that records a forward pass in ``record``; the model computes what it always does.

    The autograd graph is cut after each product with a parameter, attention call and embedding, so
    the search from a tensor ends at the nearest of them. Weights are recognised by their storage,
    through transposes, slices and indexing. ``forced`` keeps the graph if the model switches
    gradients off.
    """

    def __init__(self, model: nn.Module, *, forced: bool = False) -> None:
        super().__init__()
        self._forced = forced
        self.record = Record()
        self._order = 0
        self._scores: dict[Any, tuple[Tensor, Tensor]] = {}
        self._scored_in: dict[Any, nn.Module | None] = {}
        """Node of a product of two activations -> the module that ran."""
        self._weights: dict[Any, Tensor] = {}
        self._alive: list[Tensor] = []  # tensors known by address must not be freed
        self._places: dict[int, list[LocatedWeight]] = {}
        self._neutral: dict[int, frozenset[str]] = {}
        """Storages computed without activations -> the parameters behind them."""
        self._parametrized: dict[str, WeightView] = {}
        self._computed_by: dict[nn.Module, WeightView] = {}
        """Parametrisation -> the weight that it computes."""
        self._rows: dict[str, WeightView] = {}
        """Parameters whose rows may be positions, by name."""
        self._looked_up: dict[int, WeightView] = {}
        self._sums: dict[Any, dict[int, Cut | None]] = {}
        """Node of a sum -> result of `_unsummed` there."""
        self._input_addresses: set[int] = set()
        self._running: list[nn.Module] = []
        modules = dict(model.named_modules())
        for path, module in modules.items():
            for name, weight in module._parameters.items():
                if weight is not None and weight.numel():
                    view = self._of_parameter(modules, path, name)
                    self._remember(weight, view)
                    is_row = weight.ndim == 3 and len(weight) == 1 != weight.shape[1]
                    if weight.ndim == 2 or is_row:
                        self._rows[_name(view)] = view
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
        if func in WRITTEN_OUT:
            with self:
                return WRITTEN_OUT[func](*args, **kwargs)

        self._order += 1
        inputs = [item for item in _flat((args, kwargs)) if isinstance(item, Tensor)]
        output = func(*args, **kwargs)
        if isinstance(output, Tensor):
            if not torch.is_grad_enabled():
                output = self._constant(output)
            output = self._recorded(Call(name, args, kwargs, inputs, output))
            self._follow(name, args, inputs, output)
        elif name in {"var_mean", "std_mean"}:
            calls = (Call(name, args, kwargs, inputs, item) for item in output)
            return tuple(self._statistic(call) for call in calls)
        elif name == "frexp":
            for item in output:
                self._follow(name, args, inputs, item)

        return output

    @property
    def _module(self) -> nn.Module | None:
        return self._running[-1] if self._running else None

    def entered(self, module: nn.Module, _: Any) -> None:
        """Note that a module runs."""
        self._running.append(module)

    def left(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        """Note that a module is done, and whether it may be a norm: same shape, few vectors."""
        if module in self._running:
            del self._running[self._running.index(module) :]
        view = self._computed_by.get(module)
        if view is not None and isinstance(output, Tensor):
            # Its steps may transpose or stack the weight, so only the result has its layout.
            self._remember(output, view)
            self._alive.append(output)
        pair = (*inputs, output)
        if (
            len(pair) == 2
            and all(isinstance(tensor, Tensor) and tensor.is_floating_point() for tensor in pair)
            and pair[0].shape == pair[1].shape
            and [p.ndim for p in module.parameters()] in ([], [1], [1, 1])
        ):
            self.record.alike.setdefault(module, pair[0])

    def _recorded(self, call: Call) -> Tensor:
        """Record the call; return its output, cut off if it is a product."""
        read = _READERS.get(call.name)
        if read is None or not call.output.is_floating_point():
            return call.output
        return read(self, call)

    def _constant(self, output: Tensor) -> Tensor:
        self.record.constants.append(output)
        return output

    def _statistic(self, call: Call) -> Tensor:
        self.record.statistics.append((call.inputs[0].detach(), call.output.detach()))
        return call.output.detach()

    def _norm(self, call: Call) -> Tensor:
        source = call.inputs[0]
        output = call.output
        self.record.statistics.append((source.detach(), output.detach()))
        if self._running:
            self.record.inline_norms.append(self._running[-1])
        if (output.shape, output.dtype) != (source.shape, source.dtype):
            return output
        return output.detach() + (source - source.detach())

    def _embedding(self, call: Call) -> Tensor:
        """Record a lookup: of tokens if the ids are an input of the model, else maybe of positions."""
        ids, table = call.inputs[:2]
        is_neutral = all(_address(tensor) in self._neutral for tensor in call.inputs)
        output = call.output if is_neutral else self._cut(call.output)
        position = self._place_of(table)
        if position is None:
            return output

        view = position[0]
        if _address(ids) in self._input_addresses or len(ids.unique()) == 1:
            self._rows.pop(_name(view), None)
            if _address(ids) in self._input_addresses:
                self.record.tables[id(view.parameter)] = view, "token"
        else:
            self._looked_up[_address(output)] = view
            self._alive.append(output)

        return output

    def _sum(self, call: Call) -> Tensor:
        """Record products added to a residual stream, and positions added to tokens."""
        node = call.output.grad_fn
        parents = [parent for parent, _ in getattr(node, "next_functions", ())]
        if len(call.inputs) != 2 or len(parents) != 2:
            return call.output

        # in place, only the node of a factor is left
        sides = [self._unsummed(parent) for parent in parents]
        orders = [max(side, default=0) for side in sides]
        for number, other in enumerate(orders[::-1]):
            if other or call.inputs[1 - number].shape == call.output.shape:
                # Cuts newer than the whole other side were computed from it, and are added to it.
                later = [order for order in sides[number] if order > other]
                cuts = [id(sides[number].pop(order)) for order in later]
                self.record.summed.update(cuts)
                self.record.residuals |= dict.fromkeys(cuts, call.inputs[1 - number].detach())
            for view in self._positions(call.inputs[1 - number]):
                width = call.inputs[number].shape[-1]
                if width == view.shape[1] and self._is_early(self.record.above(parents[number])):
                    self.record.tables[id(view.parameter)] = view, "position"
        self._sums[node] = {max(orders): None, **sides[0], **sides[1]}

        return call.output

    def _unsummed(self, node: Any) -> dict[int, Cut | None]:
        """Return cuts not yet added to a residual stream by order; the newest other is None."""
        cuts: dict[int, Cut | None] = {}
        level = [node]
        visited = set[Any]()
        while level:
            node = level.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            cut = self.record.cuts.get(id(getattr(node, "variable", None)))
            if node in self._sums:
                cuts |= self._sums[node]
            elif cut is not None:
                cuts[cut.order] = cut
            else:
                level += [parent for parent, _ in node.next_functions]

        return cuts

    def _positions(self, added: Tensor) -> list[WeightView]:
        view = self._looked_up.get(_address(added))
        names = self._neutral.get(_address(added), ()) if added.ndim > 1 else ()
        return [view] if view else [self._rows[name] for name in names if name in self._rows]

    def _is_early(self, above: Sequence[Cut]) -> bool:
        """Return whether the cuts are embeddings, inputs, or products of these; nothing deeper."""
        products = [cut for cut in above if isinstance(cut, Product)]
        behind = self.record.above(*(cut.source for cut in products))
        return all(type(cut) is Cut for cut in (*behind, *set(above).difference(products)))

    def _scaled_dot_product(self, call: Call) -> Tensor:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        arguments = {**dict(zip(names, call.args, strict=False)), **call.kwargs}
        mask = arguments.get("attn_mask")
        causal = bool(arguments.get("is_causal"))
        if mask is not None and mask.ndim >= 2:
            causal = _is_causal(_closed_by(mask)[..., -1])
        parts = {name: arguments[name] for name in names[:3]}
        return self._cut(call.output, Attention, **parts, causal=causal, module=self._module)

    def _softmax(self, call: Call) -> Tensor:
        if call.output.grad_fn is not None and call.output.ndim >= 2:
            self._weights[call.output.grad_fn] = call.inputs[0]
            self._alive.append(call.output)
        return call.output

    def _gate(self, call: Call) -> Tensor:
        if call.output.grad_fn is not None and len({tensor.shape for tensor in call.inputs}) == 1:
            self.record.gates[call.output.grad_fn] = (call.inputs[0], call.inputs[-1])
        return call.output

    def _scaled_in_place(self, call: Call) -> Tensor:
        """Note the node that torch makes for a product written into a view."""
        above = getattr(call.output.grad_fn, "next_functions", ())
        writes = [node for node, _ in above if type(node).__name__ == "CopySlices"]
        self.record.scaled_views.update(writes[:1])
        return call.output

    def _multiplied(self, call: Call) -> Tensor:
        """Record a product: with a weight, of query and key, or of attention and values."""
        left, right = call.inputs if call.name != "__rmatmul__" else call.inputs[::-1]
        return self._pair(left, right.mT if right.ndim > 1 else right, call.output)

    def _pair(self, left: Tensor, right: Tensor, output: Tensor) -> Tensor:
        """Record ``left right^T``, both (..., rows, width)."""
        if min(left.ndim, right.ndim) < 2:
            return output
        if self._neutral.get(_address(right)):
            return self._product(left, right, output)

        scores = self._attention_of(left)
        if scores:
            (query, key), *extra = scores
            parts = {"query": query, "key": key, "value": right.mT, "extra": extra}
            causal = _is_causal(left[..., -1] == 0)
            return self._cut(output, Attention, **parts, causal=causal, module=self._module)

        if output.grad_fn is not None:
            nodes = ancestors([left, right])
            if self._module and any(self._scored_in.get(node) is self._module for node in nodes):
                self.record.without_softmax[self._module] = None
            self._scored_in[output.grad_fn] = self._module
            self._scores[output.grad_fn] = (left, right)
            self._alive.append(output)

        return output

    def _einsum(self, call: Call) -> Tensor:
        """Record a product of two tensors by its equation; ignore others."""
        inputs = call.inputs
        output = call.output
        equation = call.args[0] if isinstance(call.args[0], str) else ""
        ins, _, out = equation.replace(" ", "").partition("->")
        terms = ins.split(",")
        if self._place_of(inputs[0]) is not None:
            inputs = inputs[::-1]
            terms = terms[::-1]

        readable = len(terms) == len(inputs) == 2 and "." not in equation and out
        summed = [x for x in terms[0] if readable and x in terms[1] and x not in out]
        free = [x for x in terms[-1] if x not in terms[0]]
        if len(summed) != 1 or not free or out[-1] != free[-1]:
            # mixing heads or tokens keeps the rows of the numbers
            mixed = readable and terms[0][-1] == out[-1] not in terms[1]
            return output if mixed or self._place_of(inputs[-1]) is None else self._cut(output)

        sides: list[Tensor] = []
        for mine, other, tensor in zip(terms, terms[::-1], inputs, strict=True):
            order = sorted(mine, key=lambda x: (x in summed, x not in other))
            sides.append(tensor.permute([mine.index(x) for x in order]))
        return self._pair(sides[0], sides[1], output)

    def _attention_of(self, weights: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return queries and keys whose product has this tensor as its softmax."""
        pairs: dict[Any, tuple[Tensor, Tensor]] = {}
        for node in ancestors([weights]):
            if node in self._weights:
                above = ancestors([self._weights[node]])
                scores = next((ancestor for ancestor in above if ancestor in self._scores), None)
                if scores is not None:
                    pairs[scores] = self._scores[scores]
        return list(pairs.values())

    def _product(self, source: Tensor, weight: Tensor, output: Tensor) -> Tensor:
        position = self._place_of(weight)
        location = position and located(position, weight)
        if location:
            constant = _address(source) in self._neutral
            details = dict(zip(("view", "rows", "entries"), location, strict=True))
            return self._cut(output, Product, source, **details, constant=constant)
        details = _address(weight) in self._neutral and _address(source) not in self._neutral
        return self._cut(output) if position or details else output

    def mark_input(self, value: Tensor) -> Tensor:
        """Mark an input of the model, and cut the graph there so that tracing stops."""
        marked = self._cut(value) if value.is_floating_point() else value
        self._input_addresses |= {_address(value), _address(marked)}
        self._alive.append(marked)
        return marked

    def _cut(
        self, output: Tensor, kind: type[Cut] = Cut, source: Tensor | None = None, **details: Any
    ) -> Tensor:
        """Cut the graph at a tensor, so that tracing stops; return the tensor to continue with."""
        leaf = output.detach().requires_grad_()
        self.record.cuts[id(leaf)] = kind(order=self._order, leaf=leaf, source=source, **details)
        return leaf.clone()  # later code may write into it

    def _follow(
        self, name: str, args: tuple[Any, ...], inputs: list[Tensor], output: Tensor
    ) -> None:
        """Record an output computed from parameters only, as a view of them if it is one."""
        for tensor in inputs:
            self.record.used.add(_address(tensor))
        address = _address(output)
        if inputs and name in _COPIES and _address(inputs[0]) in self._input_addresses:
            self._input_addresses.add(address)
            self._alive.append(output)
        if address in self._neutral:
            return

        view, stored = (self._place_of(inputs[0]) if inputs else None) or (None, None)
        if name == "__getitem__" and view is not None and stored is not None and stored.ndim == 3:
            if isinstance(args[1], Tensor) and args[1].numel() == 1:
                self._remember(output, replace(view, expert=int(args[1])))
            return
        if any(_address(tensor) not in self._neutral for tensor in inputs):
            return

        names = frozenset[str]().union(*(self._neutral[_address(tensor)] for tensor in inputs))
        self._neutral[address] = names
        self._alive.append(output)
        if name not in _COPIES or output.shape != inputs[0].shape:
            view = self._parametrized.get(next(iter(names), "")) if len(names) == 1 else None
        if view is not None and output.ndim >= 2:
            self._remember(output, view)

    def _of_parameter(self, modules: dict[str, nn.Module], path: str, name: str) -> WeightView:
        """Return the view of a parameter, or of the weight that its parametrization computes."""
        owner_path, inside, attribute = f".{path}".rpartition(".parametrizations.")
        made = (computed for computed, names in sources_of(modules[path]).items() if name in names)
        attribute = attribute.partition(".")[0] if inside else next(made, None)
        if attribute is None:
            return WeightView(path, modules[path], name)
        owner_path = owner_path.lstrip(".") if inside else path
        view = WeightView(owner_path, modules[owner_path], attribute)
        self._parametrized[_name(view)] = view
        if inside:
            steps: Any = modules[owner_path].parametrizations
            self._computed_by[steps[attribute]] = view
        return view

    def _remember(self, weight: Tensor, view: WeightView) -> None:
        self._places.setdefault(_address(weight), []).append((view, weight))
        self._neutral.setdefault(_address(weight), frozenset({_name(view)}))

    def _place_of(self, weight: Tensor) -> LocatedWeight | None:
        for view, whole_weight in reversed(self._places.get(_address(weight), [])):
            size = 1 + sum(
                (n - 1) * s for n, s in zip(whole_weight.shape, whole_weight.stride(), strict=True)
            )
            if 0 <= weight.storage_offset() - whole_weight.storage_offset() < size:
                return view, whole_weight
        return None


def _name(view: WeightView) -> str:
    return f"{view.owner_path}.{view.attribute}"


_READERS: dict[str, Callable[[Tracer, Call], Tensor]] = {
    **dict.fromkeys(_STATISTICS, lambda tracer, call: tracer._statistic(call)),
    **dict.fromkeys(_NORMS, lambda tracer, call: tracer._norm(call)),
    **dict.fromkeys(("mul", "__mul__", "__rmul__", "multiply"), Tracer._gate),
    **dict.fromkeys(("mul_", "__imul__", "div_", "__itruediv__"), Tracer._scaled_in_place),
    **dict.fromkeys(("matmul", "mm", "bmm", "__matmul__", "__rmatmul__"), Tracer._multiplied),
    **dict.fromkeys(
        ("addmm", "baddbmm"),
        lambda tracer, call: tracer._multiplied(replace(call, inputs=call.inputs[1:])),
    ),
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d"),
        lambda tracer, call: tracer._cut(call.output, source=call.inputs[0]),
    ),
    **dict.fromkeys(
        ("grouped_mm", "_grouped_mm", "grouped_mm_fallback"),
        lambda tracer, call: tracer._product(call.inputs[0], call.inputs[1].mT, call.output),
    ),
    "linear": lambda tracer, call: tracer._product(call.inputs[0], call.inputs[1], call.output),
    **dict.fromkeys(("add", "__add__", "__radd__", "add_", "__iadd__"), Tracer._sum),
    "embedding": Tracer._embedding,
    "scaled_dot_product_attention": Tracer._scaled_dot_product,
    "softmax": Tracer._softmax,
    "einsum": Tracer._einsum,
}
"""Name of a function of torch -> its recorder."""


def _closed_by(mask: Tensor) -> Tensor:
    """Return which keys a mask leaves without weight."""
    if mask.dtype == torch.bool:
        return ~mask
    return mask <= mask_limit(mask, torch.promote_types(mask.dtype, torch.float32))


def _is_causal(closed: Tensor) -> bool:
    """Return whether the last key is closed to the first query but open to the last."""
    return bool((closed[..., 0] & ~closed[..., -1]).all())


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        yield value
        return
    for item in value:
        yield from _flat(item)
