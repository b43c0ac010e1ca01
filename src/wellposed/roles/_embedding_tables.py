"""Embedding tables of a model: of tokens and positions, by the pass or by their names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal, TypeAlias, cast

from torch import nn

from wellposed.roles._roles import EmbeddingRole
from wellposed.roles._views import WeightView, is_table

Kind: TypeAlias = Literal["token", "position"]
_NOT_TOKENS = ("type", "segment", "relative", "rel_", "class", "label")
_POSITION_TABLE = re.compile(r"pos(ition(al)?)?_embed(ding)?s?")


def embedding_roles(
    model: nn.Module, by_pass: Sequence[EmbeddingRole]
) -> tuple[EmbeddingRole, ...]:
    """Return the tables of the pass or of names; only names tell segments from tokens."""
    kinds: dict[int, Kind] = {id(table.weight.parameter): table.kind for table in by_pass}
    with suppress(AttributeError, NotImplementedError):  # not every model names its table
        input_table = cast(Any, model).get_input_embeddings()
        if is_table(input_table):
            kinds[id(input_table.weight)] = "token"

    tables: dict[int, EmbeddingRole] = {}
    for path, module in model.named_modules():
        looked_up = is_table(module)
        names = [] if looked_up else [name for name, _ in module.named_parameters(recurse=False)]
        for name in ["weight"] if looked_up else names:
            view = WeightView(path, module, name)
            key = id(view.parameter)
            kind = kinds.get(key)
            named_kind = _named_kind(path, name, looked_up=looked_up)
            kind = named_kind if named_kind and kind != "position" else kind
            if kind is not None and kind != "none":
                tables.setdefault(key, EmbeddingRole(path, kind, view))

    return tuple(tables.values())


def _named_kind(path: str, name: str, *, looked_up: bool) -> Kind | Literal["none"] | None:
    """Return the kind that a name implies: None if none, ``"none"`` for other tables."""
    if not looked_up:
        return "position" if _POSITION_TABLE.fullmatch(name) else None
    name = path.rpartition(".")[2].lower()
    if any(word in name for word in _NOT_TOKENS):
        return "none"
    return "position" if "pos" in name or name == "wpe" else "token"
