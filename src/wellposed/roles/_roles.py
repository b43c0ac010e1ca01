"""What `find_roles` returns: every weight of a model by the part it plays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from wellposed.roles._views import Spans, WeightView
from wellposed.text_table import MISSING, aligned, format_number

ATTENTION = ("query", "key", "value", "output")
FEEDFORWARD = {"feedforward_in": "up", "feedforward_gate": "gate", "feedforward_out": "down"}
"""Role -> field of `FeedForwardRole`."""
_TABLES = ("token_embedding", "position_embedding")
ROLE_NAMES = (*ATTENTION, *FEEDFORWARD, "latent", "adapter", *_TABLES)

Stack = Literal["encoder", "decoder"]


@dataclass(frozen=True)
class AttentionRole:
    """Query, key, value and output weight of one attention module; ``kind`` tells self- from
    cross-attention.

    ``heads`` holds by role (query, key, value) the rows of each head in the parameter. ``further``
    holds weights with their role where a projection has several: the key's rotary part in latent
    attention, and as ``latent`` the first factor of a projection that is a product of two.
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
    further: tuple[tuple[str, WeightView], ...] = ()

    def by_head(self, role: str) -> tuple[WeightView, ...]:
        """Return the rows of each head of the ``"query"``, the ``"key"`` or the ``"value"``."""
        view: WeightView = getattr(self, role)
        return tuple(replace(view, spans=spans) for spans in self.heads[role])


def distinct_paths(attention: Sequence[AttentionRole]) -> dict[str, AttentionRole]:
    """Return each role by its path, or if several share it by the name of its query, with a number
    if that is shared, too."""
    paths, found = Counter(role.path for role in attention), dict[str, AttentionRole]()
    for role in attention:
        name = role.path if paths[role.path] == 1 else role.query.label
        alike = (f"{name}#{number}" for number in range(2, len(attention) + 1))
        found[next(each for each in (name, *alike) if each not in found)] = role
    return found


@dataclass(frozen=True)
class FeedForwardRole:
    """The two (gated: three) weights of one position-wise feed-forward network."""

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
    """One weight with its role name (one of `ROLE_NAMES`), stack, layer (None for embeddings) and
    owning module."""

    role: str
    stack: Stack | None
    layer: int | None
    path: str
    view: WeightView
    kind: Literal["self", "cross"] | None = None
    heads: tuple[Spans, ...] = ()
    """The rows of each head, of a query, key or value."""


@dataclass(frozen=True)
class Roles:
    """Every weight of a model by the part it plays; ``print`` it for a table.

    ``loose`` holds weights that do not make up a whole attention or feed-forward part. ``unnamed``
    holds the names of all parameters with two dimensions or more that play no role, and ``notes``
    what else there is to say. What only a pass tells: ``norms`` are the paths of modules whose output
    ignores the scale of their input, ``inline_norms`` those of modules that call a norm of torch in
    their own code, ``not_added`` those of parts whose result is added to nothing, as in a residual
    block it is.
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

    @property
    def positions(self) -> tuple[EmbeddingRole, ...]:
        """The tables whose rows are added to tokens by their place."""
        return tuple(table for table in self.embeddings if table.kind == "position")

    def weights(self) -> Iterator[RoleWeight]:
        """Yield every weight: attention, then feed-forward, embeddings and loose ones, in model
        order."""
        for part in self.attention:
            for role in ATTENTION:
                view, heads = getattr(part, role), part.heads.get(role, ())
                yield RoleWeight(role, part.stack, part.layer, part.path, view, part.kind, heads)
            for role, view in part.further:
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
            place, shape = (item.stack or MISSING, format_number(item.layer)), item.view.shape
            rows.append((*place, item.role, "x".join(map(str, shape)), item.view.label))
        table = aligned(rows, "lrlrl")
        unnamed = f"no role: {', '.join(self.unnamed)}" if self.unnamed else ""
        return "\n".join(line for line in (table, unnamed, *self.notes) if line)
