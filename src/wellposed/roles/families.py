"""The model families whose weights are found by name; a new family is one registration here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import nn

from wellposed.registry import Registry
from wellposed.roles._located_module import LocatedModule, attention_role
from wellposed.roles._roles import AttentionRole, FeedForwardRole
from wellposed.roles._views import WeightView, chunked, is_linear, view_of

Role = TypeVar("Role", AttentionRole, FeedForwardRole)
ReadAttention = Callable[[LocatedModule], AttentionRole | None]
ReadFeedForward = Callable[[LocatedModule], FeedForwardRole | None]


@dataclass(frozen=True)
class Family:
    """Two readers: each returns the role a module plays, or None where the module is not of this
    family."""

    attention: ReadAttention
    feedforward: ReadFeedForward = lambda _: None


FAMILIES = Registry[Family]("model family", entry_points="wellposed.families")


def attention_named(query: str, key: str, value: str, output: str) -> ReadAttention:
    """Read an attention whose four weights are four linear layers of these names."""
    names = {"query": query, "key": key, "value": value, "output": output}

    def read(place: LocatedModule) -> AttentionRole | None:
        views = _linear_views(place, names)
        return attention_role(place, views) if len(views) == len(names) else None

    return read


def attention_fused(fused: str, output: str, *, grouped: bool = False) -> ReadAttention:
    """Read an attention whose query, key and value follow each other in one linear layer, as thirds
    or, ``grouped``, with fewer keys and values."""

    def read(place: LocatedModule) -> AttentionRole | None:
        layers = _linear_views(place, {"fused": fused, "output": output})
        if len(layers) != 2:
            return None
        rows, queries = layers["fused"].shape[0], layers["output"].shape[1]
        keys = (rows - queries) // 2
        if not grouped and rows != 3 * queries:
            return None  # nobody says in which order they are
        views = {
            "query": layers["fused"].of_rows(0, queries),
            "key": layers["fused"].of_rows(queries, queries + keys),
            "value": layers["fused"].of_rows(queries + keys, rows),
        }
        return attention_role(place, {**views, "output": layers["output"]})

    return read


def feedforward_named(up: str, down: str, gate: str | None = None) -> ReadFeedForward:
    """Read a feed-forward network of these names; a gate that is named must be there."""
    names = {"up": up, "down": down, **({"gate": gate} if gate else {})}

    def read(place: LocatedModule) -> FeedForwardRole | None:
        views = _linear_views(place, names)
        if len(views) != len(names):
            return None
        return FeedForwardRole(place.path, place.stack, place.layer, **views)

    return read


def first_of(
    *readers: Callable[[LocatedModule], Role | None],
) -> Callable[[LocatedModule], Role | None]:
    """Return the first reader's answer that is not None."""

    def read(place: LocatedModule) -> Role | None:
        return next((role for reader in readers if (role := reader(place)) is not None), None)

    return read


def _linear_views(place: LocatedModule, names: Mapping[str, str]) -> dict[str, WeightView]:
    """Return the views of those named children that exist and are linear layers."""
    layers = {role: place.child(name) for role, name in names.items()}
    return {
        role: view_of(place.join(names[role]), layer)
        for role, layer in layers.items()
        if layer is not None and is_linear(layer)
    }


def _gpt2_cross_attention(place: LocatedModule) -> AttentionRole | None:
    """GPT-2's cross-attention has a query of its own."""
    names = {"query": "q_attn", "key": "c_attn", "output": "c_proj"}
    views = _linear_views(place, names)
    if len(views) != len(names):
        return None
    fused = views["key"]
    return attention_role(
        place, {**views, "key": chunked(fused, (0, 2)), "value": chunked(fused, (1, 2))}
    )


def _l2_attention(place: LocatedModule) -> AttentionRole | None:
    """Where our L2 attention is tied, one projection is query and key; with free values it is the
    value as well."""
    if not isinstance(getattr(place.module, "tied", None), bool):
        return None
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
    views = _linear_views(place, names)
    if not {"query", "output"} <= views.keys():
        return None
    key = views.get("key", views["query"])
    return attention_role(place, {"key": key, "value": key, **views})


def _phi3_feedforward(place: LocatedModule) -> FeedForwardRole | None:
    views = _linear_views(place, {"merged": "gate_up_proj", "down": "down_proj"})
    if len(views) != 2:
        return None
    gate, up = (chunked(views["merged"], (index, 2)) for index in range(2))
    return FeedForwardRole(place.path, place.stack, place.layer, up, views["down"], gate)


def _torch_attention(place: LocatedModule) -> AttentionRole | None:
    """`torch.nn.MultiheadAttention`, with fused or separate projections."""
    module = place.module
    if not isinstance(module, nn.MultiheadAttention):
        return None
    if module.in_proj_weight is not None:
        whole = WeightView(place.path, module, "in_proj_weight")
        views = {r: chunked(whole, (i, 3)) for i, r in enumerate(("query", "key", "value"))}
    else:
        names = {"query": "q", "key": "k", "value": "v"}
        views = {r: WeightView(place.path, module, f"{n}_proj_weight") for r, n in names.items()}
    views["output"] = view_of(place.join("out_proj"), module.out_proj)
    return attention_role(place, views)


_BY_LETTERS = attention_named("q_proj", "k_proj", "v_proj", "o_proj")

# BART, Marian and kin: the layer holds the feed-forward network.
FAMILIES.register("bart")(
    Family(
        attention_named("q_proj", "k_proj", "v_proj", "out_proj"), feedforward_named("fc1", "fc2")
    )
)
# RoBERTa too, and under `attention.attention` the ViT of older transformers.
FAMILIES.register("bert")(
    Family(
        first_of(
            attention_named("self.query", "self.key", "self.value", "output.dense"),
            attention_named("attention.query", "attention.key", "attention.value", "output.dense"),
        ),
        feedforward_named("intermediate.dense", "output.dense"),
    )
)
FAMILIES.register("distilbert")(
    Family(attention_named("q_lin", "k_lin", "v_lin", "out_lin"), feedforward_named("lin1", "lin2"))
)
FAMILIES.register("gpt2")(
    Family(
        first_of(_gpt2_cross_attention, attention_fused("c_attn", "c_proj")),
        feedforward_named("c_fc", "c_proj"),
    )
)
FAMILIES.register("wellposed l2")(Family(_l2_attention))
# Mistral, Qwen and kin too.
FAMILIES.register("llama")(
    Family(_BY_LETTERS, feedforward_named("up_proj", "down_proj", gate="gate_proj"))
)
FAMILIES.register("phi3")(
    Family(attention_fused("qkv_proj", "o_proj", grouped=True), _phi3_feedforward)
)
# gelu(wi_0 x) * (wi_1 x): the factor inside the activation is the gate, as in Llama's gate_proj.
FAMILIES.register("t5")(
    Family(
        attention_named("q", "k", "v", "o"),
        first_of(feedforward_named("wi_1", "wo", gate="wi_0"), feedforward_named("wi", "wo")),
    )
)
FAMILIES.register("torch")(Family(_torch_attention, feedforward_named("linear1", "linear2")))
# timm's, then Hugging Face's.
FAMILIES.register("vit")(
    Family(first_of(attention_fused("qkv", "proj"), _BY_LETTERS), feedforward_named("fc1", "fc2"))
)
FAMILIES.register("wellposed")(Family(_BY_LETTERS, feedforward_named("up_proj", "down_proj")))
