"""Where a module sits in a model: its stack, layer and heads, read from paths, attributes and
configurations."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from wellposed.errors import ShapeError
from wellposed.roles._roles import AttentionRole, Stack
from wellposed.roles._views import Spans, WeightView
from wellposed.roles.layer_paths import layer_index

_CROSS = re.compile("encoder_attn|cross_?attn|cross_?attention|multihead_attn|EncDecAttention")
_HEAD_WIDTHS = ("head_dim", "attention_head_size", "key_value_proj_dim")
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")


@dataclass(frozen=True)
class LocatedModule:
    """A module, its dotted path, and the model it is part of."""

    path: str
    module: nn.Module
    model: nn.Module

    @property
    def name(self) -> str:
        """Last segment of the path."""
        return self.path.rpartition(".")[2]

    def join(self, dotted: str) -> str:
        """Return the full path of something inside this module."""
        return f"{self.path}.{dotted}" if self.path else dotted

    def child(self, dotted: str) -> nn.Module | None:
        """Return the submodule at ``dotted``, or None."""
        found: Any = self.module
        for segment in dotted.split("."):
            found = getattr(found, segment, None)
        return found if isinstance(found, nn.Module) else None

    @property
    def layer(self) -> int:
        """Index of the layer this module belongs to."""
        return layer_index(self.path)

    @property
    def kind(self) -> Literal["self", "cross"]:
        """Self- or cross-attention, by the names the families use."""
        named = _CROSS.fullmatch(self.name) or type(self.module).__name__.endswith("CrossAttention")
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
        model = type(self.model).__name__
        causal = getattr(inner, "is_causal", False) is True or model.endswith("ForCausalLM")
        return "decoder" if causal else "encoder"

    def num_heads(self, rows: int) -> int | None:
        """Number of heads that share the ``rows`` of a query weight: by their width where the module
        has one, as it stays right where heads were pruned, else by the number it or a configuration
        names."""
        own = (self.module, getattr(self.module, "self", None))
        for holder in own:
            width = _first_count(holder, _HEAD_WIDTHS)
            if width is not None and rows % width == 0:
                return rows // width
        holders: list[Any] = [*own, *(getattr(holder, "config", None) for holder in own)]
        segments = self.path.split(".")
        for end in range(len(segments) - 1, -1, -1):
            around = self.model.get_submodule(".".join(segments[:end]))
            holders += [around, getattr(around, "config", None)]
        return next((n for each in holders if (n := _first_count(each, _HEADS))), None)


def attention_role(place: LocatedModule, views: Mapping[str, WeightView]) -> AttentionRole:
    """Build the role; head sizes follow from the number of heads and the shapes of the weights."""
    rows, key_rows = views["query"].shape[0], views["key"].shape[0]
    num_heads = place.num_heads(rows)
    if num_heads is None:
        raise ShapeError(
            f"{place.path} ({type(place.module).__name__}) has query, key, value and output weights"
            f" but no number of heads; looked for {', '.join(_HEADS)} on it, on what contains it"
            " and on their configurations; set one"
        )
    head_dim = rows // num_heads
    if rows % num_heads or key_rows % head_dim:
        raise ShapeError(
            f"{place.path}: {num_heads} heads do not divide the query weight's {rows} rows and the"
            f" key weight's {key_rows}; check the model's configuration, or pass patterns= without"
            " this module"
        )
    return AttentionRole(
        path=place.path,
        kind=place.kind,
        stack=place.stack,
        layer=place.layer,
        num_heads=num_heads,
        num_key_value_heads=key_rows // head_dim,
        head_dim=head_dim,
        query=views["query"],
        key=views["key"],
        value=views["value"],
        output=views["output"],
        heads={role: _even(views[role], head_dim) for role in ("query", "key", "value")},
    )


def _even(view: WeightView, width: int) -> tuple[Spans, ...]:
    """Return the rows of each head where heads of one width follow each other."""
    first = view.spans[0][0] if view.spans else 0
    return tuple(
        ((first + start, first + start + width),) for start in range(0, view.shape[0], width)
    )


def _first_count(holder: object, names: Sequence[str]) -> int | None:
    counts = (getattr(holder, name, None) for name in names)
    return next((count for count in counts if isinstance(count, int) and count > 0), None)
