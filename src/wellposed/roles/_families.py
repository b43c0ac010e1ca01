"""Model families whose weights are found by name; a new family is one registration here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, TypeVar, cast

from torch import nn

from wellposed.errors import ShapeError
from wellposed.hooks import class_name
from wellposed.registry import Registry
from wellposed.roles._live import path_inside
from wellposed.roles._roles import ATTENTION, AttentionRole, FeedForwardRole, RoleWeight, Stack
from wellposed.roles._views import Spans, WeightView, chunked, is_linear, layer_index, view_of

_CROSS = re.compile("encoder_attn|cross_?attn|cross_?attention|multihead_attn|EncDecAttention")
_HEAD_WIDTHS = ("head_dim", "attention_head_size", "key_value_proj_dim", "head_size", "dim_head")
_HEADS = (
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "n_head",
    "nhead",
    "nheads",
    "heads",
    "head",
    "n_local_heads",
    "num_attn_heads",
)
_KEY_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "n_kv_heads",
    "kv_heads",
    "num_heads_kv",
    "n_query_groups",
    "n_local_kv_heads",
)


_OTHER_KIND = re.compile("linear|delta|mamba|retention|recurrent|lightning|lstm|rwkv", re.I)
"""Words in the names of attention that is no softmax of products of queries and keys."""
_COUNT = re.compile(r"(num|n)_\w*heads?|\w+_heads|num_heads_\w+")
_COUNTS = {*_HEADS, *_KEY_HEADS}


class OtherAttentionError(ShapeError):
    """A module with the children of attention computes something else with them."""


class UnknownHeadsError(ShapeError):
    """The names of an attention tell its four weights, but nothing tells the number of its heads."""

    def __init__(self, located: LocatedModule, views: Mapping[str, WeightView]) -> None:
        super().__init__(
            f"{located.path} ({class_name(located.module)}) has query, key, value and output weights but"
            f" no number of heads; looked for {', '.join(_HEADS)} on it, on what contains it and on"
            " their configurations"
        )
        self.weights = [
            RoleWeight(role, located.stack, located.layer, located.path, views[role], located.kind)
            for role in ATTENTION
        ]


@dataclass(frozen=True)
class LocatedModule:
    """A module, its dotted path, and the model that contains it."""

    path: str
    module: nn.Module
    model: nn.Module

    def join(self, dotted: str) -> str:
        """Return the full path of something inside this module, through wrappers on the way."""
        inside = path_inside(self.module, dotted)
        return f"{self.path}.{inside}" if self.path else inside

    def child(self, dotted: str) -> nn.Module | None:
        """Return the submodule at ``dotted``, or None."""
        child: Any = self.module
        for segment in dotted.split("."):
            child = getattr(child, segment, None)
        return child if isinstance(child, nn.Module) else None

    @property
    def layer(self) -> int:
        """Index of the layer that contains this module."""
        return layer_index(self.path)

    @property
    def kind(self) -> Literal["self", "cross"]:
        """Self- or cross-attention, by the names the families use."""
        name = self.path.rpartition(".")[2]
        named = _CROSS.fullmatch(name) or class_name(self.module).endswith("CrossAttention")
        cross = named or getattr(self.module, "is_cross_attention", False)
        return "cross" if cross else "self"

    @property
    def stack(self) -> Stack:
        """Encoder or decoder; a causal self-attention stack is a decoder."""
        inner = getattr(self.module, "self", self.module)
        if self.kind == "cross" or getattr(inner, "is_decoder", False) or "decoder" in self.path:
            return "decoder"
        if "encoder" in self.path:
            return "encoder"
        model = class_name(self.model)
        causal = getattr(inner, "is_causal", False) is True or model.endswith("ForCausalLM")
        return "decoder" if causal else "encoder"

    def num_heads(self, rows: int) -> int | None:
        """Number of heads that share ``rows``: by a head width if known, else by a count."""
        # the width stays right if heads were pruned
        modules = (self.module, getattr(self.module, "self", None))
        for holder in modules:
            width = _first_count(holder, _HEAD_WIDTHS)
            if width is not None and rows % width == 0:
                return rows // width
        holders: list[Any] = [*modules, *(getattr(holder, "config", None) for holder in modules)]
        segments = self.path.split(".")
        for end in range(len(segments) - 1, -1, -1):
            around = self.model.get_submodule(".".join(segments[:end]))
            holders += [around, getattr(around, "config", None)]
        return next((n for located in holders if (n := _first_count(located, _HEADS))), None)

    def num_key_heads(self) -> int | None:
        """Number of heads of keys and values, by a count on the module or its configuration."""
        holders = (self.module, getattr(self.module, "config", None))
        return next((n for located in holders if (n := _first_count(located, _KEY_HEADS))), None)


def attention_role(located: LocatedModule, views: Mapping[str, WeightView]) -> AttentionRole:
    """Build the role; head sizes follow from the number of heads and the weight shapes."""
    why = _other_kind(located)
    if why:
        raise OtherAttentionError(f"{located.path} ({class_name(located.module)}): {why}")

    rows = views["query"].shape[0]
    key_rows = views["key"].shape[0]
    num_heads = located.num_heads(rows)
    if num_heads is None:
        raise UnknownHeadsError(located, views)

    head_dim = rows // num_heads
    if rows % num_heads or key_rows % head_dim:
        raise ShapeError(
            f"{located.path}: {num_heads} heads do not divide the query weight's {rows} rows and the"
            f" key weight's {key_rows}; check the model's configuration, or pass where= without"
            " this module"
        )

    read = views["output"].shape[1]
    key_heads = key_rows // head_dim
    if read * key_heads != num_heads * views["value"].shape[0]:
        raise ShapeError(
            f"{located.path}: the output weight reads {read} numbers, which {num_heads} heads of"
            f" {views['value'].shape[0]} / {key_heads} values do not make. Set its number of heads"
            f" ({_HEADS[0]}), or give a batch, as some rows of its query may be no query"
        )

    return AttentionRole(
        path=located.path,
        kind=located.kind,
        stack=located.stack,
        layer=located.layer,
        num_heads=num_heads,
        num_key_value_heads=key_rows // head_dim,
        head_dim=head_dim,
        heads={role: _even(views[role], head_dim) for role in ATTENTION[:3]},
        **cast("Mapping[str, Any]", views),
    )


def _other_kind(located: LocatedModule) -> str | None:
    """Return why the four weights of a module may not be those of attention by a softmax."""
    module = located.module
    # RecurrentGemma's attention is a softmax: the name of the family says nothing
    families = [class_name(located.model), type(getattr(module, "config", None)).__name__]
    kind = class_name(module)
    shared = max(_shared_letters(kind, family) for family in families)
    names = (kind[shared:], located.path.rpartition(".")[2])
    if any(_OTHER_KIND.search(name) for name in names):
        return "its name says another kind of attention"
    if any(isinstance(part, nn.Conv1d) and part.kernel_size[0] > 1 for part in module.modules()):
        return "it convolves over tokens"

    # a count that only the configuration has may be that of the other layers
    counts = {n for n, v in vars(module).items() if type(v) is int and _COUNT.fullmatch(n)}
    if counts and counts.isdisjoint(_COUNTS):
        return f"its heads are counted by {', '.join(sorted(counts))}"
    return None


def _shared_letters(one: str, two: str) -> int:
    """Return how many letters two names begin with alike."""
    pairs = zip(one, two, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(one), len(two)))


def _even(view: WeightView, width: int) -> tuple[Spans, ...]:
    """Return the rows of each head, for consecutive heads of one width."""
    first = view.spans[0][0] if view.spans else 0
    starts = range(first, first + view.shape[0], width)
    return tuple(((start, start + width),) for start in starts)


def _first_count(holder: object, names: Sequence[str]) -> int | None:
    counts = (getattr(holder, name, None) for name in names)
    return next((count for count in counts if type(count) is int and count > 0), None)


Role = TypeVar("Role", AttentionRole, FeedForwardRole)
Reader: TypeAlias = Callable[[LocatedModule], Role | None]
ReadAttention = Reader[AttentionRole]
ReadFeedForward = Reader[FeedForwardRole]


@dataclass(frozen=True)
class Family:
    """Two readers: each returns the role of a module, or None if it is of another family."""

    attention: ReadAttention
    feedforward: ReadFeedForward = lambda _: None


FAMILIES = Registry[Family]("model family", entry_points="wellposed.families")


def attention_named(query: str, key: str, value: str, output: str) -> ReadAttention:
    """Return a reader of attention with four linear layers of these names."""
    names = {"query": query, "key": key, "value": value, "output": output}

    def read(located: LocatedModule) -> AttentionRole | None:
        views = _linear_views(located, names)
        return attention_role(located, views) if views else None

    return read


def attention_fused(fused: str, output: str, *, grouped: bool = False) -> ReadAttention:
    """Return a reader of attention with query, key, value stacked in one linear layer.

    With ``grouped`` there may be fewer keys and values than queries, if the module counts them.
    """

    def read(located: LocatedModule) -> AttentionRole | None:
        views = _linear_views(located, {"fused": fused, "output": output})
        if not views:
            return None
        stacked = views.pop("fused")
        if stacked.shape[0] == 3 * views["output"].shape[1]:
            parts = [chunked(stacked, (index, 3)) for index in range(3)]
        elif grouped and (rows := _grouped_rows(located, stacked, views["output"].shape[1])):
            parts = [stacked.of_rows(*span) for span in rows]
        else:
            return None  # nobody says in which order they are
        views |= dict(zip(ATTENTION[:3], parts, strict=True))
        return attention_role(located, views)

    return read


def _grouped_rows(located: LocatedModule, stacked: WeightView, read: int) -> Spans | None:
    """Return the rows of queries, keys and values, if the counts of the module add up to them."""
    heads = located.num_heads(read)
    key_heads = located.num_key_heads()
    if not heads or not key_heads or read % heads:
        return None
    width = read // heads * key_heads
    ends = (read, read + width, read + 2 * width)
    return tuple(zip((0, *ends[:2]), ends, strict=True)) if stacked.shape[0] == ends[2] else None


def feedforward_named(
    up: str, down: str, gate: str | None = None, *, without: str = ""
) -> ReadFeedForward:
    """Return a reader of a feed-forward network; a named ``gate`` is required.

    A module with a child called ``without`` is another network.
    """
    names = {"up": up, "down": down, **({"gate": gate} if gate else {})}

    def read(located: LocatedModule) -> FeedForwardRole | None:
        if without and located.child(without) is not None:
            return None
        views = _linear_views(located, names)
        # a wider weight holds a gate too, in rows that no name tells
        width = views["down"].shape[1] if views else 0
        if not views or any(views[name].shape[0] != width for name in views if name != "down"):
            return None
        return FeedForwardRole(located.path, located.stack, located.layer, **views)

    return read


def feedforward_in_a_row(located: LocatedModule) -> FeedForwardRole | None:
    """Read a ``Sequential`` of two linear layers inside a module that is called a feed-forward.

    Beside them may be activations, norms and dropout, alone or with the first in a ``Sequential``.
    """
    holder, _, _ = located.path.rpartition(".")
    around = located.model.get_submodule(holder)
    if not isinstance(located.module, nn.Sequential) or not any(
        map(_FEEDFORWARD_NAME.search, (class_name(around), holder.rpartition(".")[2]))
    ):
        return None

    linear = [(name, part) for name, part in located.module.named_modules() if _is_layer(part)]
    others = [part for part in located.module.modules() if not _is_layer(part)]
    if len(linear) != 2 or any(isinstance(part, _NOT_POINTWISE) for part in others):
        return None

    up, down = (view_of(located.join(name), part) for name, part in linear)
    if up.shape != down.shape[::-1]:
        return None
    return FeedForwardRole(holder, located.stack, located.layer, up=up, down=down)


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def first_of(*readers: Reader[Role]) -> Reader[Role]:
    """Return a reader with the first result that is not None."""
    return lambda located: next(filter(None, (reader(located) for reader in readers)), None)


def _linear_views(located: LocatedModule, names: Mapping[str, str]) -> dict[str, WeightView]:
    """Return the views of these named children; nothing unless all are linear layers."""
    layers: dict[str, tuple[str, nn.Module]] = {}
    if not located.module._modules:
        return {}  # most modules: without parts, they are asked by every family
    for role, name in names.items():
        path = _path_of_linear(located, name)
        layer = located.child(path)
        # Most modules lack the first name of most families, and a lookup that fails is slow.
        if layer is None or not is_linear(layer):
            return {}
        layers[role] = (path, layer)
    return {role: view_of(located.join(path), layer) for role, (path, layer) in layers.items()}


def _path_of_linear(located: LocatedModule, name: str) -> str:
    """Return the path of a child, or of its first part if all others are dropout or identities."""
    child = located.child(name)
    if not isinstance(child, (nn.Sequential, nn.ModuleList)) or not len(child):
        return name
    first, *others = child
    is_alone = is_linear(first) and all(isinstance(part, _NO_MAP) for part in others)
    return f"{name}.0" if is_alone else name


def _l2_attention(located: LocatedModule) -> AttentionRole | None:
    """Read wellposed's L2 attention; if tied, one projection is both query and key."""
    if not isinstance(getattr(located.module, "tied", None), bool):
        return None
    views = _linear_views(located, {"query": "q_proj", "value": "v_proj", "output": "o_proj"})
    if not views:
        return None
    views |= _linear_views(located, {"key": "k_proj"}) or {"key": views["query"]}
    return attention_role(located, views)


def _torch_attention(located: LocatedModule) -> AttentionRole | None:
    module = located.module
    if not isinstance(module, nn.MultiheadAttention):
        return None
    stacked = WeightView(located.path, module, "in_proj_weight")
    fused = module.in_proj_weight is not None
    views = {
        role: chunked(stacked, (index, 3)) if fused else replace(stacked, attribute=name)
        for index, (role, name) in enumerate(_OF_TORCH.items())
    }
    views["output"] = view_of(located.join("out_proj"), module.out_proj)
    return attention_role(located, views)


_OF_TORCH = {"query": "q_proj_weight", "key": "k_proj_weight", "value": "v_proj_weight"}
_BY_LETTERS = attention_named("q_proj", "k_proj", "v_proj", "o_proj")

_FEEDFORWARD = feedforward_named("fc1", "fc2")
_NO_MAP = (nn.Dropout, nn.Identity)
_FEEDFORWARD_NAME = re.compile("feed_?fo|mlp|ffn|^ff$", re.I)
_NOT_POINTWISE = (nn.modules.conv._ConvNd, nn.RNNBase, nn.MultiheadAttention, nn.ModuleList)
_KNOWN = {
    # BART, Marian and kin: the layer holds the feed-forward network.
    "bart": Family(attention_named("q_proj", "k_proj", "v_proj", "out_proj"), _FEEDFORWARD),
    # RoBERTa too, and under `attention.attention` the ViT of older transformers.
    "bert": Family(
        first_of(
            attention_named("self.query", "self.key", "self.value", "output.dense"),
            attention_named("attention.query", "attention.key", "attention.value", "output.dense"),
        ),
        feedforward_named("intermediate.dense", "output.dense"),
    ),
    "distilbert": Family(
        attention_named("q_lin", "k_lin", "v_lin", "out_lin"), feedforward_named("lin1", "lin2")
    ),
    "gpt2": Family(attention_fused("c_attn", "c_proj"), feedforward_named("c_fc", "c_proj")),
    "wellposed l2": Family(_l2_attention),
    # Of older versions, `attn` has rows that interleave by group: only a pass tells them.
    "litgpt": Family(
        attention_fused("qkv", "proj", grouped=True),
        first_of(
            feedforward_named("fc_2", "proj", gate="fc_1"),
            feedforward_named("fc", "proj", without="fc_1"),
        ),
    ),
    # Mistral, Qwen and kin too.
    "llama": Family(_BY_LETTERS, feedforward_named("up_proj", "down_proj", gate="gate_proj")),
    # silu(w1 x) * (w3 x): w1 is inside the activation. Mixtral's experts too.
    "meta llama": Family(
        attention_named("wq", "wk", "wv", "wo"),
        first_of(
            feedforward_named("w3", "w2", gate="w1"), feedforward_named("w1", "w2", without="w3")
        ),
    ),
    # gelu(wi_0 x) * (wi_1 x): the factor inside the activation is the gate, as in Llama's gate_proj.
    "t5": Family(
        attention_named("q", "k", "v", "o"),
        first_of(feedforward_named("wi_1", "wo", gate="wi_0"), feedforward_named("wi", "wo")),
    ),
    "torch": Family(_torch_attention, feedforward_named("linear1", "linear2")),
    # timm's, then Hugging Face's.
    "vit": Family(first_of(attention_fused("qkv", "proj"), _BY_LETTERS), _FEEDFORWARD),
    "vit-pytorch": Family(attention_fused("to_qkv", "to_out"), feedforward_in_a_row),
    "x-transformers": Family(attention_named("to_q", "to_k", "to_v", "to_out")),
    "wellposed": Family(_BY_LETTERS, feedforward_named("up_proj", "down_proj")),
}
for _name, _family in _KNOWN.items():
    FAMILIES.register(_name)(_family)
