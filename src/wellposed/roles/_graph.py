"""Read from one recorded pass which rows of which weight reach the query, key and value of every
attention call, and which products make a feed-forward network."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.roles._located_module import LocatedModule
from wellposed.roles._roles import (
    AttentionRole,
    EmbeddingRole,
    FeedForwardRole,
    Roles,
    RoleWeight,
)
from wellposed.roles._trace import Attention, Cut, Product, Record, ancestors
from wellposed.roles._views import WeightView, spans_of
from wellposed.roles.layer_paths import shared_segments

_PROJECTIONS = ("query", "key", "value")
_Part = tuple[Product, Sequence[int] | None]
"""A product and the rows of it that are meant; None for all."""


@dataclass(frozen=True)
class _Projection:
    """What a query, key or value is computed from: products, their rows, and those of each head."""

    products: tuple[Product, ...]
    rows: tuple[tuple[int, ...], ...]
    heads: tuple[tuple[int, ...], ...]

    @property
    def views(self) -> tuple[WeightView, ...]:
        pairs = zip(self.products, self.rows, strict=True)
        return tuple(product.view_of(rows) for product, rows in pairs)


@dataclass(frozen=True)
class Incomplete:
    """What was found of an attention call of which not all weights were."""

    found: tuple[RoleWeight, ...]
    missing: tuple[str, ...]

    def __str__(self) -> str:
        names = ", ".join(weight.view.label for weight in self.found)
        return (
            f"an attention call{f' of {names}' if names else ''}: its {', '.join(self.missing)} is no"
            " product with one parameter"
        )


def roles_of(
    model: nn.Module, record: Record, output: Sequence[Tensor]
) -> tuple[Roles, list[Incomplete]]:
    """Return the attention and feed-forward roles that a pass shows, in the order of the pass, and
    the attention calls of which it does not show all weights."""
    reader = _Reader(model, record, output)
    with torch.enable_grad():
        attention = [role for call in record.attention for role in reader.attention(call)]
        feedforward = [role for down in record.products for role in reader.feedforward(down)]
    widths = {role.query.shape[1] for role in attention} | {
        role.up.shape[1] for role in feedforward
    }
    tables = [
        EmbeddingRole(view.owner_path, kind, view)
        for view, kind in record.tables.values()
        if kind == "token" or view.shape[1] in widths
    ]
    roles = Roles(
        tuple(_once(attention)),
        tuple(_once(feedforward)),
        tuple(tables),
        not_added=tuple(dict.fromkeys(reader.not_added)),
    )
    return roles, reader.incomplete


class _Reader:
    def __init__(self, model: nn.Module, record: Record, output: Sequence[Tensor]) -> None:
        self.model = model
        self.record = record
        self.output = output
        self.used: set[int] = set()
        """Products that play a role in attention."""
        self.incomplete: list[Incomplete] = []
        self.readers: dict[int, list[tuple[Product, list[Cut]]]] = defaultdict(list)
        """Identity of a cut -> products that read it and at most four others, and these."""
        for product in record.products:
            above = record.above(product.source, limit=4)
            for cut in above:
                self.readers[id(cut)].append((product, above))
        self.not_added: list[str] = []
        """Paths of parts whose result is added to nothing."""

    def _note_sum(self, path: str, last: Product) -> None:
        if id(last) not in self.record.summed:
            self.not_added.append(path)

    def attention(self, call: Attention) -> list[AttentionRole]:
        """Return the role of one call; none where a part of it is no product with a parameter."""
        tensors = {name: getattr(call, name) for name in _PROJECTIONS}
        found = {name: self._projection(tensor) for name, tensor in tensors.items()}
        for number, pair in enumerate(call.beside):
            for name, tensor in zip(("query", "key"), pair, strict=True):
                found[f"{name} {number + 2}"] = self._projection(tensor)
        own = [product for each in found.values() if each for product in each.products]
        self.used |= {id(product) for product in own}
        outputs = self._outputs(call, own)
        self.used |= {id(product) for product in outputs}
        missing = [name for name, projection in found.items() if projection is None]
        missing += [] if outputs else ["output"]
        if missing:
            self._incomplete(found, missing)
            return []
        whole: dict[str, Any] = {name: each for name, each in found.items() if each is not None}
        views = {name: whole[name].views[0] for name in _PROJECTIONS}
        views["output"] = outputs[0].view_of()
        further = [
            (name.split()[0], view)
            for name, each in whole.items()
            for view in each.views[name in _PROJECTIONS :]
        ]
        further += [("latent", view) for view in self._latents(own)]
        heads = {
            name: tuple(
                spans_of(sorted(each.products[0].rows[row] for row in rows)) for rows in each.heads
            )
            for name, each in whole.items()
            if name in _PROJECTIONS
        }
        cross = self._is_cross(whole["query"].products[0], whole["key"].products[0])
        path = _common_path(self.model, [view.owner_path for view in views.values()])
        place = LocatedModule(path, self.model.get_submodule(path), self.model)
        self._note_sum(path, outputs[0])
        return [
            AttentionRole(
                path=path,
                kind="cross" if cross else "self",
                stack="decoder" if cross or call.causal else place.stack,
                layer=place.layer,
                num_heads=len(heads["query"]),
                num_key_value_heads=len(heads["key"]),
                head_dim=len(whole["query"].heads[0]),
                heads=heads,
                further=tuple(further),
                **views,
            )
        ]

    def feedforward(self, down: Product) -> list[FeedForwardRole]:
        """Return the network that ends in a product, one for each expert; none where it ends
        none."""
        above = self.record.above(down.source, limit=6)
        ups = self._without_adapters([each for each in above if isinstance(each, Product)])
        if (
            id(down) in self.used
            or not ups
            or not all(isinstance(each, Product) for each in above)
            or any(id(up) in self.used or not _same(up.source, ups[0].source) for up in ups)
            or len(down.rows) != ups[0].in_features
        ):
            return []
        parts = self._gate_and_up(down, ups)
        if parts is None:
            return []
        (up, up_rows), gate = parts
        roles: list[FeedForwardRole] = []
        for entry in _entries(down):
            views = {"up": up.view_of(up_rows, entry), "down": down.view_of(None, entry)}
            if gate is not None:
                views["gate"] = gate[0].view_of(gate[1], entry)
            path = _common_path(self.model, [view.owner_path for view in views.values()])
            place = LocatedModule(path, self.model.get_submodule(path), self.model)
            self._note_sum(path, down)
            roles.append(FeedForwardRole(path, place.stack, place.layer, **views))
        return roles

    def _gate_and_up(
        self, down: Product, ups: Sequence[Product]
    ) -> tuple[_Part, _Part | None] | None:
        """Return the part that passes the activation alone, or that a gate multiplies, and the
        gate: the factor that is not linear in what its product computes."""
        factors = [self.record.gates.get(node) for node in ancestors([down.source])]
        for one, other in filter(None, factors):
            first, second = self._part(one, ups), self._part(other, ups)
            if first is None or second is None or first == second:
                continue
            if _bends(one, first[0]) and not _bends(other, second[0]):
                first, second = second, first
            (up, rows), (gate, _) = first, second
            if gate is not up:
                return (up, None), (gate, None)
            # an activation may be flat at a row in all tokens, a factor that is linear never
            return (up, rows), (gate, [row for row in range(len(up.rows)) if row not in rows])
        if len(ups) > 1 or len(ups[0].rows) != down.in_features:
            return None
        (up,) = ups
        # without a bend in between, two products of low rank are one
        if len(up.rows) < up.in_features and not _bends(down.source, up):
            return None
        return (up, None), None

    def _part(self, tensor: Tensor, ups: Sequence[Product]) -> tuple[Product, Sequence[int]] | None:
        """Return the one product, and its rows, that a tensor is computed from."""
        found = [(up, rows) for up in ups if (rows := _rows(tensor, up))]
        return found[0] if len(found) == 1 else None

    def _projection(self, tensor: Tensor) -> _Projection | None:
        cuts = self.record.above(tensor, limit=8)
        products = self._without_adapters([cut for cut in cuts if isinstance(cut, Product)])
        others = [cut for cut in cuts if not isinstance(cut, Product)]
        if not products or len(cuts) > 8 or _are_added(tensor, [*products, *others]):
            return None
        pairs = [(product, _rows(tensor, product)) for product in products]
        pairs = sorted((pair for pair in pairs if pair[1]), key=lambda pair: -len(pair[1]))
        if not pairs:
            return None
        main, rows = pairs[0]
        heads: dict[tuple[int, ...], None] = {}
        left = set(rows)
        for matrix in tensor.reshape(-1, *tensor.shape[-2:]):
            if not left:
                break
            head = _rows(matrix, main)
            heads[head] = None
            left -= set(head)
        if left or len({len(head) for head in heads}) > 1:
            return None  # a part was not seen, or heads are of several widths
        return _Projection(
            tuple(each for each, _ in pairs), tuple(rows for _, rows in pairs), tuple(heads)
        )

    def _without_adapters(self, products: list[Product]) -> list[Product]:
        """Leave out products with the last factor of an adapter: its first reads what the adapted
        weight reads."""

        def adapts(product: Product) -> bool:
            above = self.record.above(product.source, limit=1)
            return len(above) == 1 and any(
                isinstance(above[0], Product)
                and other is not product
                and other is not above[0]
                and _same(above[0].source, other.source)
                and len(other.rows) == len(product.rows)
                for other in products
            )

        adapters = [product for product in products if adapts(product)]
        return [product for product in products if product not in adapters]

    def _outputs(self, call: Attention, own: Sequence[Product]) -> list[Product]:
        """Return the product that reads what a call returned, alone or gated by its own
        projections."""
        readers = [
            product
            for product, above in self.readers[id(call)]
            if product.order > call.order
            and all(isinstance(each, Attention) or each in own for each in above)
        ]
        same = [product for product in readers if _same(product.source, readers[0].source)]
        return sorted(same, key=lambda product: -len(product.rows))[:1]

    def _latents(self, own: Sequence[Product]) -> Iterator[WeightView]:
        """Yield the first factors of projections that are products of two: what nothing but these
        projections reads."""
        inner: dict[int, tuple[Product, set[int]]] = {}
        for outer in own:
            above = self.record.above(outer.source, limit=1)
            if len(above) == 1 and isinstance(above[0], Product):
                rows = inner.setdefault(id(above[0]), (above[0], set()))[1]
                rows.update(_rows(outer.source, above[0]))
        if not inner:
            return
        mine = {id(product) for product in own}
        others = [each.source for each in self.record.products if id(each) not in mine]
        elsewhere = {id(cut) for cut in self.record.above(*self.output, *others)}
        for product, rows in inner.values():
            if id(product) not in elsewhere:
                self.used.add(id(product))
                yield product.view_of(sorted(rows))

    def _is_cross(self, query: Product, key: Product) -> bool:
        """Tell whether query and key read different sequences: nothing that both come from."""
        if _same(query.source, key.source):
            return False
        sides: list[set[int]] = []
        for product in (query, key):
            above = self.record.above(product.source)
            inner = [cut.origin for cut in above if cut.origin is not None]
            sides.append({id(cut) for cut in (*above, *self.record.above(*inner))})
        return sides[0].isdisjoint(sides[1])

    def _incomplete(self, found: Mapping[str, _Projection | None], missing: list[str]) -> None:
        weights: list[RoleWeight] = []
        for role, projection in found.items():
            for view in projection.views if projection else ():
                place = LocatedModule(view.owner_path, view.owner, self.model)
                weights.append(
                    RoleWeight(role.split()[0], place.stack, place.layer, place.path, view, "self")
                )
        self.incomplete.append(Incomplete(tuple(weights), tuple(missing)))


def _rows(tensor: Tensor, product: Cut) -> tuple[int, ...]:
    """Return the rows of a product that a tensor depends on, by the gradient of a random
    direction."""
    (gradient,) = torch.autograd.grad(
        tensor, product.leaf, torch.randn_like(tensor), retain_graph=True, allow_unused=True
    )
    if gradient is None:
        return ()
    return tuple(gradient.reshape(-1, gradient.shape[-1]).ne(0).any(0).nonzero().flatten().tolist())


def _are_added(tensor: Tensor, cuts: Sequence[Cut]) -> bool:
    """Tell whether the first number of a tensor comes from several places."""
    return len(cuts) > 1 and sum(bool(_rows(tensor[..., :1], cut)) for cut in cuts) > 1


def _bends(tensor: Tensor, product: Product) -> bool:
    """Tell whether a tensor is not linear in what a product computes: its gradient depends on
    it."""
    (gradient,) = torch.autograd.grad(
        tensor, product.leaf, torch.randn_like(tensor), create_graph=True, allow_unused=True
    )
    return gradient is not None and gradient.requires_grad


def _same(first: Tensor, second: Tensor) -> bool:
    return first is second or (
        first.data_ptr() == second.data_ptr() and first.shape[-1] == second.shape[-1]
    )


def _entries(product: Product) -> Iterable[int | None]:
    """Return all entries of a stack of matrices, reached by this batch or not."""
    return range(product.view.parameter.shape[0]) if product.entries else (None,)


def _common_path(model: nn.Module, owners: Sequence[str]) -> str:
    """Return the path of the innermost module that is called and holds all owners."""
    shared = owners[0].split(".")
    for owner in owners[1:]:
        shared = shared_segments(".".join(shared), owner)
    while shared and type(model.get_submodule(".".join(shared))).forward is nn.Module.forward:
        shared.pop()
    return ".".join(shared)


def _once(roles: Iterable[Any]) -> list[Any]:
    """Return the roles without those of weights that were seen before, as layers that share theirs
    show them."""
    seen: dict[object, Any] = {}
    for role in roles:
        views = [value for value in vars(role).values() if isinstance(value, WeightView)]
        seen.setdefault((getattr(role, "role", ""), *(view.key for view in views)), role)
    return list(seen.values())
