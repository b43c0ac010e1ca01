"""Result of `find_roles`: every weight of a model by its role."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from wellposed.roles._views import Spans, WeightView
from wellposed.text_table import MISSING, aligned, format_number

ATTENTION = ("query", "key", "value", "output")
FEEDFORWARD = {"feedforward_in": "up", "feedforward_gate": "gate", "feedforward_out": "down"}
"""Role -> field of `FeedForwardRole`."""
EMBEDDINGS = ("token_embedding", "position_embedding")

Stack = Literal["encoder", "decoder"]


@dataclass(frozen=True)
class AttentionRole:
    """Query, key, value and output weight of one attention module; ``kind`` is self or cross.

    ``heads`` maps query, key and value to the rows of each head in the parameter. ``extra_projections`` lists
    additional weights with their role. Examples: the rotary part of the key in latent attention; as
    ``latent``, the first factor of a projection that is a product of two.
    """

    path: str
    kind: Literal["self", "cross"]
    stack: Stack
    layer: int
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    query: WeightView
    key: WeightView
    value: WeightView
    output: WeightView
    heads: Mapping[str, tuple[Spans, ...]] = field(default_factory=dict)
    extra_projections: tuple[tuple[str, WeightView], ...] = ()

    def by_head(self, role: str) -> tuple[WeightView, ...]:
        """Return one view per head of the ``"query"``, ``"key"`` or ``"value"``."""
        view: WeightView = getattr(self, role)
        return tuple(replace(view, spans=spans) for spans in self.heads[role])


def distinct_paths(attention: Sequence[AttentionRole]) -> dict[str, AttentionRole]:
    """Return roles by path, else (if they share it) by the name of the query and a number."""
    paths = Counter(role.path for role in attention)
    by_name = dict[str, AttentionRole]()
    for role in attention:
        name = role.path if paths[role.path] == 1 else role.query.label
        alike = (f"{name}#{number}" for number in range(2, len(attention) + 1))
        by_name[next(free for free in (name, *alike) if free not in by_name)] = role
    return by_name


@dataclass(frozen=True)
class FeedForwardRole:
    """The two (if gated, three) weights of one position-wise feed-forward network."""

    path: str
    stack: Stack
    layer: int
    up: WeightView
    down: WeightView
    gate: WeightView | None = None


@dataclass(frozen=True)
class EmbeddingRole:
    """An embedding table, shape (vocabulary or positions, width)."""

    path: str
    kind: Literal["token", "position"]
    weight: WeightView


@dataclass(frozen=True)
class RoleWeight:
    """One weight: role (of `ROLE_NAMES`), stack, layer (None for embeddings), owning module."""

    role: str
    stack: Stack | None
    layer: int | None
    path: str
    view: WeightView
    kind: Literal["self", "cross"] | None = None
    heads: tuple[Spans, ...] = ()
    """Rows of each head, for a query, key or value."""


@dataclass(frozen=True)
class Roles:
    """Every weight of a model by its role; ``print`` it for a table.

    ``loose`` lists weights outside complete attention or feed-forward parts, ``unnamed`` the other
    parameters with two or more dimensions, ``notes`` remarks. Only a pass fills ``norms`` (paths of
    modules whose output ignores the scale of their input), ``inline_norms`` (modules that call a
    norm of torch) and ``not_added``: parts whose result is added to nothing, unlike in a residual
    block. ``by_pass`` tells whether a pass ran.
    """

    attention: tuple[AttentionRole, ...] = ()
    feedforward: tuple[FeedForwardRole, ...] = ()
    embeddings: tuple[EmbeddingRole, ...] = ()
    loose: tuple[RoleWeight, ...] = ()
    unnamed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    inline_norms: tuple[str, ...] = ()
    not_added: tuple[str, ...] = ()
    by_pass: bool = False

    @property
    def positions(self) -> tuple[EmbeddingRole, ...]:
        """Position embeddings: tables whose rows are added to tokens by their position."""
        return tuple(table for table in self.embeddings if table.kind == "position")

    def weights(self) -> Iterator[RoleWeight]:
        """Yield attention, feed-forward, embedding and loose weights, each in model order."""
        for part in self.attention:
            for role in ATTENTION:
                view = getattr(part, role)
                heads = part.heads.get(role, ())
                yield RoleWeight(role, part.stack, part.layer, part.path, view, part.kind, heads)
            for role, view in part.extra_projections:
                yield RoleWeight(role, part.stack, part.layer, part.path, view, part.kind)

        for network in self.feedforward:
            for role, name in FEEDFORWARD.items():
                view = getattr(network, name)
                if view is not None:
                    yield RoleWeight(role, network.stack, network.layer, network.path, view)

        for table in self.embeddings:
            yield RoleWeight(f"{table.kind}_embedding", None, None, table.path, table.weight)
        yield from self.loose

    def __str__(self) -> str:
        rows = [("stack", "layer", "role", "shape", "parameter")]
        for item in self.weights():
            where = (item.stack or MISSING, format_number(item.layer))
            shape = item.view.shape
            rows.append((*where, item.role, "x".join(map(str, shape)), item.view.label))
        table = aligned(rows, "lrlrl")
        unnamed = f"no role: {', '.join(self.unnamed)}" if self.unnamed else ""
        return "\n".join(line for line in (table, unnamed, *self.notes) if line)


Part = AttentionRole | FeedForwardRole


def key_of(part: Part) -> object:
    """Return a key that is equal for parts of the same weights."""
    views = [value for value in vars(part).values() if isinstance(value, WeightView)]
    return type(part), *(view.key for view in views)


def once(parts: Iterable[Part]) -> list[Part]:
    """Return the parts without repetitions, as from layers that share their weights."""
    by_key: dict[object, Part] = {}
    for part in parts:
        by_key.setdefault(key_of(part), part)
    return list(by_key.values())


def views_of(role: AttentionRole | FeedForwardRole) -> dict[str, WeightView]:
    """Return the weights of a part by their names."""
    return {name: view for name, view in vars(role).items() if isinstance(view, WeightView)}


def weight_key(view: WeightView) -> object:
    """Return what is equal for two views of one weight."""
    return id(view.owner), view.attribute, view.expert


def weight_keys(part: Part) -> frozenset[object]:
    """Return names and keys of all weights of a part."""
    return frozenset((name, weight_key(view)) for name, view in views_of(part).items())
