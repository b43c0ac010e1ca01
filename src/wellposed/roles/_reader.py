"""Reads the roles of one recorded pass: attention calls, projections and feed-forward networks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from wellposed.roles._check import Claim
from wellposed.roles._families import LocatedModule
from wellposed.roles._gates import close_output_gates, close_projection_gates
from wellposed.roles._gradients import are_added, is_nonlinear, rows_reached
from wellposed.roles._record import Attention, Cut, Product, Record, ancestors
from wellposed.roles._roles import (
    AttentionRole,
    FeedForwardRole,
    RoleWeight,
)
from wellposed.roles._views import Spans, WeightView, shared_segments, spans_of

_NO_FORWARD = nn.Module.forward
_PROJECTIONS = ("query", "key", "value")
Incomplete = dict[str, tuple[RoleWeight, ...]]
"""Attention calls with missing weights -> the weights that were found."""
_Part = tuple[Product, Sequence[int] | None]
"""A product and some of its rows; None for all."""


class _Projection(NamedTuple):
    """Products behind a query, key or value, the view of each, and the rows of each head."""

    products: list[Product]
    views: list[WeightView]
    rows: tuple[tuple[int, ...], ...]
    """Rows of each head in the output of the first product."""

    @property
    def heads(self) -> tuple[Spans, ...]:
        numbers = self.products[0].rows
        return tuple(spans_of(sorted(numbers[row] for row in head)) for head in self.rows)


class Reader:
    """The parts of a model, read from the record of one pass of it."""

    def __init__(self, model: nn.Module, record: Record, output: Sequence[Tensor]) -> None:
        self.model = model
        self.paths = {module: path for path, module in model.named_modules()}
        self.record = record
        self.output = output
        self.used: set[int] = set()
        """Products with a role in attention."""
        self.incomplete: Incomplete = {}
        self.readers: dict[int, list[tuple[Product, list[Cut]]]] = defaultdict(list)
        """Identity of a cut -> products that read it and at most four other cuts, and these cuts."""

        for product in record.of_kind(Product):
            above = record.above(product.source, limit=4)
            for cut in above:
                self.readers[id(cut)].append((product, above))

        self.convolved: list[tuple[WeightView, WeightView]] = []
        """Two weights with a convolution between them."""
        self.not_added: dict[str, None] = {}
        """Paths of parts whose result is added to nothing."""

    def _locate(
        self, views: Mapping[str, WeightView], last: Product, call: Attention | None = None
    ) -> LocatedModule:
        """Return the innermost called module that contains all weights of a part."""
        paths = [view.owner_path for view in views.values()]
        ran = self.paths.get(call.module) if call and call.module is not None else None
        if ran is not None:  # keys may come from another layer
            paths = [views["output"].owner_path, ran]

        shared, *others = (path.split(".") for path in paths)
        for owner in others:
            shared = shared_segments(".".join(shared), ".".join(owner))

        while shared and type(self.model.get_submodule(".".join(shared))).forward is _NO_FORWARD:
            shared.pop()
        path = ".".join(shared)
        if id(last) not in self.record.summed:
            self.not_added[path] = None
        return LocatedModule(path, self.model.get_submodule(path), self.model)

    def attention(self, call: Attention) -> Claim | None:
        """Return the role of one call; None if a part is not a product with a parameter."""
        parts = {name: self._projection(tensor) for name, tensor in call.tensors.items()}
        used = [product for p in parts.values() if p for product in p.products]
        self.used |= {id(product) for product in used}
        outputs = self._outputs(call, used)
        self.used |= {id(product) for product in outputs}
        missing = [name for name, p in parts.items() if p is None]
        missing += [] if outputs else ["output"]
        if missing:
            self._note_incomplete(parts, missing)
            return None

        full: dict[str, Any] = {name: p for name, p in parts.items() if p is not None}
        views = {name: full[name].views[0] for name in _PROJECTIONS}
        views["output"] = outputs[0].view_of()
        rest = ((name, p.views[name in _PROJECTIONS :]) for name, p in full.items())
        extra = [(name.split()[0], view) for name, views_ in rest for view in views_]
        extra += [("latent", view) for view in self._latents(used)]
        heads = {name: full[name].heads for name in _PROJECTIONS}
        cross = self._is_cross(full["query"].products[0], full["key"].products[0])
        located = self._locate(views, outputs[0], call)
        part = AttentionRole(
            path=located.path,
            kind="cross" if cross else "self",
            stack="decoder" if cross or call.causal else located.stack,
            layer=located.layer,
            num_heads=len(heads["query"]),
            num_key_value_heads=len(heads["key"]),
            head_dim=len(full["query"].rows[0]),
            heads=heads,
            extra_projections=tuple(extra),
            **views,
        )
        groups = {name: (p.products[0], p.rows) for name, p in full.items()}

        return Claim([part], outputs[0], groups, call)

    def feedforward(self, down: Product) -> Claim | None:
        """Return the network that ends in ``down``, one role per expert; None if there is none."""
        above = self.record.above(down.source, limit=6)
        ups = [product for product in above if isinstance(product, Product)]
        if len(ups) == len(above) <= 6:
            ups = self._without_adapters(down.source, ups)
        else:
            self._note_convolved(down, above)
            return None

        if (
            id(down) in self.used
            or not ups
            or any(id(up) in self.used or not _same(up.source, ups[0].source) for up in ups)
            or ups[0].source.shape[-1:] != (len(down.rows),)
            or ups[0].constant
            or self._scales_positions(down)
        ):
            return None

        parts = self._gated(down, ups)
        if parts is None or len(ups) > 1 + (parts[1] is not None):
            return None

        named = {"up": parts[0], **({"gate": parts[1]} if parts[1] else {})}
        roles: list[FeedForwardRole] = []
        for entry in down.experts:
            views = {name: product.view_of(rows, entry) for name, (product, rows) in named.items()}
            views["down"] = down.view_of(None, entry)
            located = self._locate(views, down)
            roles.append(FeedForwardRole(located.path, located.stack, located.layer, **views))

        groups = {
            name: (
                product,
                [*zip(range(len(product.rows)) if rows is None else rows, strict=True)],
            )
            for name, (product, rows) in named.items()
        }
        return Claim(roles, down, groups)

    def _note_convolved(self, down: Product, above: Sequence[Cut]) -> None:
        """Note a network with a convolution between its two products, as in PVT v2 and SegFormer."""
        if len(above) != 1 or type(above[0]) is not Cut or id(down) in self.used:
            return
        ups = self.record.above(above[0].source, limit=1)
        if len(ups) != 1:
            return
        up = ups[0]
        if isinstance(up, Product) and id(up) not in self.used:
            self.convolved.append((up.view, down.view))

    def _scales_positions(self, down: Product) -> bool:
        """Return whether a result multiplies values of no product, such as sines."""
        for one, other in self.record.gates.values():
            for mine, rest in ((one, other), (other, one)):
                is_wide = rest.shape[-1:] == (len(down.rows),)
                if is_wide and self.record.above(mine, limit=1) == [down]:
                    above = self.record.above(rest, limit=1)
                    return not any(isinstance(cut, (Product, Attention)) for cut in above)
        return False

    def _gated(self, down: Product, ups: Sequence[Product]) -> tuple[_Part, _Part | None] | None:
        """Return the linear part, and the gate (the factor that is not linear in its product)."""
        factors = [self.record.gates.get(node) for node in ancestors([down.source])]
        for one, other in filter(None, factors):
            first = self._part(one, ups)
            second = self._part(other, ups)
            if first is None or second is None or first == second:
                continue
            if is_nonlinear(one, first[0]) and not is_nonlinear(other, second[0]):
                first, second = second, first
            up, rows = first
            gate, _ = second
            if gate is not up:
                return (up, None), (gate, None)
            # an activation may be flat at a row in all tokens, a factor that is linear never
            gate_rows = [row for row in range(len(up.rows)) if row not in rows]
            if gate_rows:
                return (up, rows), (gate, gate_rows)

        if len(ups) > 1 or len(ups[0].rows) != down.source.shape[-1]:
            return None
        (up,) = ups
        # two products of low rank without a nonlinearity in between are one
        if len(up.rows) < up.source.shape[-1] and not is_nonlinear(down.source, up):
            return None
        return (up, None), None

    def _part(self, tensor: Tensor, ups: Sequence[Product]) -> tuple[Product, Sequence[int]] | None:
        sources = [(up, rows) for up in ups if (rows := rows_reached(tensor, up))]
        return sources[0] if len(sources) == 1 else None

    def _projection(self, tensor: Tensor) -> _Projection | None:
        self.used |= {id(gate) for gate in close_projection_gates(self.record, tensor)}
        cuts = self.record.above(tensor, limit=8)
        products = [cut for cut in cuts if isinstance(cut, Product)]
        products = self._without_adapters(tensor, products) if len(cuts) <= 8 else []
        others = [cut for cut in cuts if not isinstance(cut, Product)]
        if not products or are_added(tensor, [*products, *others]):
            return None

        pairs = [(product, rows_reached(tensor, product)) for product in products]
        pairs = sorted((pair for pair in pairs if pair[1]), key=lambda pair: -len(pair[1]))
        if not pairs:
            return None
        if any(product.is_stack for product, _ in pairs):
            return None

        main, rows = pairs[0]
        heads: dict[tuple[int, ...], None] = {}
        left = set(rows)
        for matrix in tensor.reshape(-1, *tensor.shape[-2:]):
            if not left:
                break
            head = rows_reached(matrix, main)
            heads[head] = None
            left -= set(head)

        if left or len({len(head) for head in heads}) > 1:
            return None  # a part is missing, or head widths differ
        views = [product.view_of(product_rows) for product, product_rows in pairs]
        return _Projection([product for product, _ in pairs], views, tuple(heads))

    def _without_adapters(self, tensor: Tensor, products: list[Product]) -> list[Product]:
        """Leave out adapters: their input is the weight's, and the results are added."""

        def adapts(product: Product) -> bool:
            above = self.record.above(product.source, limit=1)
            return len(above) == 1 and any(
                isinstance(above[0], Product)
                and other is not product
                and other is not above[0]
                and _same(above[0].source, other.source)
                and len(other.rows) == len(product.rows)
                and are_added(tensor, [product, other])
                for other in products
            )

        adapters = [product for product in products if adapts(product)]
        return [product for product in products if product not in adapters]

    def _outputs(self, call: Attention, projections: Sequence[Product]) -> list[Product]:
        """Return the product that reads only the result of a call, gated or not."""
        readers: list[Product] = []
        behind: dict[int, Cut] = {}
        """Cuts behind a gate, by identity."""
        for product, above in self.readers[id(call)]:
            if product.order <= call.order or product.is_stack:
                continue
            gates: list[Cut] = []
            if not self._reads_only(above, projections):
                gates = close_output_gates(self.record, product.source, call)
                above = self.record.above(product.source)
            if self._reads_only(above, projections):
                readers.append(product)
                behind |= self._later(gates, call)

        self.used |= behind.keys()
        readers = [product for product in readers if id(product) not in behind]
        same = [product for product in readers if _same(product.source, readers[0].source)]
        return sorted(same, key=lambda product: -len(product.rows))[:1]

    def _reads_only(self, above: Sequence[Cut], projections: Sequence[Product]) -> bool:
        return all(isinstance(cut, Attention) or cut in projections for cut in above)

    def _later(self, gates: Sequence[Cut], call: Attention) -> dict[int, Cut]:
        """Return the cuts of gates, and those behind them that are later than the call."""
        cuts: dict[int, Cut] = {id(gate): gate for gate in gates}
        left = [*gates]
        while left:
            gate = left.pop()
            if gate.source is None:
                continue
            above = self.record.above(gate.source)
            new = [cut for cut in above if cut.order > call.order and id(cut) not in cuts]
            cuts |= {id(cut): cut for cut in new}
            left += new
        return cuts

    def _latents(self, projections: Sequence[Product]) -> Iterator[WeightView]:
        """Yield the first factors of projections with two, if no other product reads them."""
        inner: dict[int, tuple[Product, set[int]]] = {}
        for outer in projections:
            above = self.record.above(outer.source, limit=1)
            if len(above) == 1 and isinstance(above[0], Product):
                rows = inner.setdefault(id(above[0]), (above[0], set()))[1]
                rows.update(rows_reached(outer.source, above[0]))

        if not inner:
            return
        mine = {id(product) for product in projections}
        others = [other.source for other in self.record.of_kind(Product) if id(other) not in mine]
        elsewhere = {id(cut) for cut in self.record.above(*self.output, *others)}
        for product, rows in inner.values():
            if id(product) not in elsewhere:
                self.used.add(id(product))
                yield product.view_of(sorted(rows))

    def _is_cross(self, query: Product, key: Product) -> bool:
        """Return whether query and key read different sequences, without a common origin."""
        if _same(query.source, key.source):
            return False
        sides: list[set[int]] = []
        for product in (query, key):
            above = self.record.above(product.source)
            inner = [cut.source for cut in above if cut.source is not None]
            sides.append({id(cut) for cut in (*above, *self.record.above(*inner))})
        return sides[0].isdisjoint(sides[1])

    def _note_incomplete(
        self, projections: Mapping[str, _Projection | None], missing: Sequence[str]
    ) -> None:
        weights: list[RoleWeight] = []
        for role, projection in projections.items():
            for view in projection.views if projection else ():
                located = LocatedModule(view.owner_path, view.owner, self.model)
                weight = RoleWeight(
                    role.split()[0], located.stack, located.layer, located.path, view, "self"
                )
                weights.append(weight)
        names = ", ".join(weight.view.label for weight in weights)
        text = f"an attention call{f' of {names}' if names else ''}: its {', '.join(missing)} is no"
        self.incomplete[f"{text} product with one parameter"] = tuple(weights)


def _same(first: Tensor, second: Tensor) -> bool:
    same_place = first.data_ptr() == second.data_ptr()
    return first is second or (same_place and first.shape[-1] == second.shape[-1])
