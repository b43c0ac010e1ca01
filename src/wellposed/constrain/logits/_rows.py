"""Rows of query and key by head, and their scaling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from wellposed.constrain._weight_slice import WeightSlice
from wellposed.errors import ConfigError
from wellposed.linalg import cut_of, is_sharded
from wellposed.roles import AttentionRole, WeightView

_IN_PROJECTION = {"q_proj_weight": 0, "k_proj_weight": 1}


@dataclass(frozen=True)
class HeadRows:
    """Rows of a parameter, the head of each, and the power of that head's factor it takes."""

    view: WeightView
    heads: Tensor
    rows: Tensor
    powers: Tensor

    @property
    def weight_slice(self) -> WeightSlice:
        """The parameter, for the checks that every constrained weight passes."""
        view = self.view
        parameter = self.view.parameter
        plain = parameter if isinstance(parameter, nn.Parameter) else None
        transposed = view.transposed
        return WeightSlice(
            view.owner_path, view.attribute, view.owner, plain, transposed=transposed
        )

    def stored(self) -> Iterator[tuple[Tensor, int, int]]:
        """Yield weight, and bias if there is one, with their output dimension and first row."""
        owner = self.view.owner
        attribute = self.view.attribute
        yield self.view.parameter, int(self.view.transposed), 0
        bias = getattr(owner, "bias", None)
        start = 0
        if isinstance(owner, nn.MultiheadAttention):
            bias = owner.in_proj_bias
            start = _IN_PROJECTION.get(attribute, 0) * owner.embed_dim
        if isinstance(bias, Tensor):
            yield bias, 0, start


@dataclass(frozen=True, eq=False)
class ScaledParameter:
    """A parameter; for each local row its head (one past the last if none) and power."""

    parameter: Tensor
    outputs: int
    """The dimension of its outputs."""
    heads: Tensor
    powers: Tensor

    @property
    def local(self) -> Tensor:
        """This process's part of the parameter, as (rows, inputs): a view."""
        values = self.parameter.detach()
        values = values.to_local() if is_sharded(values) else values
        return values[:, None] if values.ndim == 1 else values.mT if self.outputs else values


def scaled_parameters(parts: Sequence[HeadRows], num_heads: int) -> list[ScaledParameter]:
    """Return the parameters of all ``parts``, each once."""
    result: dict[int, ScaledParameter] = {}
    for part in parts:
        for parameter, outputs, start in part.stored():
            count = parameter.shape[outputs]
            fresh = ScaledParameter(
                parameter,
                outputs,
                heads=torch.full((count,), num_heads),
                powers=torch.zeros(count),
            )
            scaled = result.setdefault(id(parameter), fresh)
            scaled.heads[start + part.rows] = part.heads
            scaled.powers[start + part.rows] += part.powers
    return [_cut(scaled) for scaled in result.values()]


def _cut(scaled: ScaledParameter) -> ScaledParameter:
    """Restrict the rows of a parameter to those of this process."""
    parameter: Any = scaled.parameter
    cut = cut_of(parameter)
    placements = getattr(parameter, "placements", ())
    if cut is None and not all(placement.is_replicate() for placement in placements):
        raise ConfigError(
            "constrain_: to='logits' scales rows of weights that are cut once, as by fully_shard;"
            f" received placements {placements}. Leave it out with where=, or shard it on one mesh"
        )

    mine = slice(None)
    if cut is not None and cut.dim == scaled.outputs:
        mine = slice(*cut.span(len(scaled.heads), cut.rank))

    heads = scaled.heads.to(parameter.device)
    powers = scaled.powers.to(parameter.device)
    return replace(scaled, heads=heads[mine], powers=powers[mine])


Modules: TypeAlias = Sequence[Sequence[ScaledParameter]]


def heads_and_powers(modules: Modules, num_heads: int) -> tuple[Tensor, Tensor]:
    """Return the head, counted over all modules, and the power of every scaled row."""
    pairs = [(n * (num_heads + 1), part) for n, parts in enumerate(modules) for part in parts]
    device = pairs[0][1].parameter.device
    heads = torch.cat([start + part.heads.to(device) for start, part in pairs])
    return heads, torch.cat([part.powers.to(device) for _, part in pairs])


def scale_(modules: Modules, rows: tuple[Tensor, Tensor], factors: Tensor) -> None:
    """Multiply rows by the factors (modules, heads) of their heads, to their powers."""
    scaled = [part for parts in modules for part in parts]
    heads, powers = rows
    columns = nn.functional.pad(factors, (0, 1), value=1.0).flatten()[heads] ** powers
    pieces = columns[:, None].split([len(part.heads) for part in scaled])
    torch._foreach_mul_([part.local for part in scaled], list(pieces))


def head_rows(role: AttentionRole) -> list[HeadRows]:
    """Return the rows of query and key, with powers that add up to 1 for each product.

    A key that several heads read is not scaled (grouped-query attention, the rotary key of latent
    attention); the query rows that meet it take the whole factor.
    """
    grouped = len(role.heads["key"]) != len(role.heads["query"])
    result: list[HeadRows] = []
    for name in ("query",) if grouped else ("query", "key"):
        heads = []
        rows = []
        powers = []
        for head, spans in enumerate(role.heads[name]):
            indices = [row for span in spans for row in range(*span)]
            half = 0 if grouped else len(indices)
            if "key" in dict(role.extra_projections) and not grouped:
                half = sum(stop - start for start, stop in role.heads["key"][head])
            rows += indices
            heads += [head] * len(indices)
            powers += [0.5] * half + [1.0] * (len(indices) - half)
        result.append(HeadRows(getattr(role, name), *map(torch.tensor, (heads, rows, powers))))

    return result
