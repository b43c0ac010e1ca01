"""What a family tells: which child of a module is the query, key, value, output or feed-forward
weight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wellposed.registry import Registry
from wellposed.roles._located_module import LocatedModule, attention_role
from wellposed.roles._roles import AttentionRole, FeedForwardRole
from wellposed.roles._views import WeightView, chunked, is_linear, view_of


@dataclass(frozen=True)
class Family:
    """Two readers: each returns the role a module plays, or None where the module is not of this
    family."""

    attention: Callable[[LocatedModule], AttentionRole | None]
    feedforward: Callable[[LocatedModule], FeedForwardRole | None]


FAMILIES = Registry[Family]("model family", entry_points="wellposed.families")


def attention_named(
    query: str, key: str, value: str, output: str
) -> Callable[[LocatedModule], AttentionRole | None]:
    """Read an attention whose four weights are four linear layers of these names."""
    names = {"query": query, "key": key, "value": value, "output": output}

    def read(place: LocatedModule) -> AttentionRole | None:
        views = linear_views(place, names)
        return attention_role(place, views) if len(views) == len(names) else None

    return read


def attention_fused(fused: str, output: str) -> Callable[[LocatedModule], AttentionRole | None]:
    """Read an attention whose query, key and value are the thirds of one linear layer."""

    def read(place: LocatedModule) -> AttentionRole | None:
        layers = linear_views(place, {"fused": fused, "output": output})
        if len(layers) != 2 or layers["fused"].shape[0] != 3 * layers["output"].shape[1]:
            return None  # grouped heads share the rows unevenly
        views = {
            role: chunked(layers["fused"], (i, 3))
            for i, role in enumerate(("query", "key", "value"))
        }
        return attention_role(place, {**views, "output": layers["output"]})

    return read


def feedforward_named(
    up: str, down: str, gate: str | None = None
) -> Callable[[LocatedModule], FeedForwardRole | None]:
    """Read a feed-forward network of these names; a gate that is named must be there."""
    names = {"up": up, "down": down, **({"gate": gate} if gate else {})}

    def read(place: LocatedModule) -> FeedForwardRole | None:
        views = linear_views(place, names)
        if len(views) != len(names):
            return None
        return FeedForwardRole(place.path, place.stack, place.layer, **views)

    return read


def first_of(
    *readers: Callable[[LocatedModule], FeedForwardRole | None],
) -> Callable[[LocatedModule], FeedForwardRole | None]:
    """Return the first reader's answer that is not None."""

    def read(place: LocatedModule) -> FeedForwardRole | None:
        return next((role for reader in readers if (role := reader(place)) is not None), None)

    return read


def linear_views(place: LocatedModule, names: dict[str, str]) -> dict[str, WeightView]:
    """Return the views of those named children that exist and are linear layers."""
    layers = {role: place.child(name) for role, name in names.items()}
    return {
        role: view_of(place.join(names[role]), layer)
        for role, layer in layers.items()
        if layer is not None and is_linear(layer)
    }
