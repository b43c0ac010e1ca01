"""How far weights are from orthogonal, all of one shape at once, also if they lie in shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from wellposed.functional import batched_gram_penalties, gram_penalties, qr_penalty
from wellposed.linalg import Layout, gathered, mean_over_ranks, sum_over_ranks
from wellposed.penalize._forms import FORMS
from wellposed.penalize._read import Reader, Unit, lies_on_one_rank
from wellposed.penalize._terms import Part, Term


def weight_parts(terms: Sequence[Term], strengths: Mapping[str, float]) -> Iterator[Part]:
    """Yield distances to orthogonality times strengths, for all weights of one shape at once.

    Weights in shards come together: one all-reduce for their gradients. A weight that lies whole
    on one rank, such as an expert of a stack, is measured there.
    """
    sharded: dict[Any, list[Part]] = {}
    spread: list[Term] = []
    on_one_rank: dict[Any, list[tuple[Term, Layout]]] = {}
    for term in terms:
        layout = lies_on_one_rank(term)
        if layout is None:
            spread.append(term)
        else:
            stored: Any = term.views[0].parameter
            on_one_rank.setdefault((stored.device_mesh, stored.dtype), []).append((term, layout))

    units = Reader(spread).units()
    meshes = {id(term): unit.mesh for unit in units for term in unit.terms}
    for some, values in _by_strength(units):
        part = [_name(term) for term in some], strengths[some[0].strength] * values
        mesh = meshes[id(some[0])]
        if mesh is None:
            yield part
        else:
            sharded.setdefault(mesh, []).append(part)
    for (mesh, _), pairs in on_one_rank.items():
        sharded.setdefault(mesh, []).append(_held_part(pairs, strengths))

    for mesh, parts in sharded.items():
        values = torch.cat([values for _, values in parts])
        yield [name for names, _ in parts for name in names], mean_over_ranks(values, mesh)


def _name(term: Term) -> str:
    return f"{term.strength}.{term.label}"


def _by_strength(units: Sequence[Unit]) -> Iterator[tuple[list[Term], Tensor]]:
    """Yield terms of one strength, and how far each is from orthogonal."""
    for strength in dict.fromkeys(unit.terms[0].strength for unit in units):
        alike = [unit for unit in units if unit.terms[0].strength == strength]
        for some, values in _measured(alike[0].terms[0], alike):
            yield [term for unit in some for term in unit.terms], values


def _measured(like: Term, units: Sequence[Unit]) -> Iterator[tuple[list[Unit], Tensor]]:
    """Yield units, and one number for each of their terms."""
    if like.form not in ("gram_squared", "gram"):
        yield from ((unit_, value) for unit in units for unit_, value in _one_by_one(like, unit))
        return

    squared = like.form == "gram_squared"
    stacks = [unit for unit in units if not isinstance(unit.weights, Tensor)]
    experts = [unit for unit in units if isinstance(unit.weights, Tensor)]
    for measure, some in ((gram_penalties, stacks), (batched_gram_penalties, experts)):
        weights: list[Any] = [unit.weights for unit in some]
        for places, values in measure(
            weights, squared=squared, side=like.side, gram_dtype=like.gram_dtype
        ):
            yield [some[index] for index in places], values


def _one_by_one(like: Term, unit: Unit) -> Iterator[tuple[list[Unit], Tensor]]:
    """Yield the value of a form that takes one weight."""
    form = FORMS.get(like.form) if like.form != "qr" else None
    batch = unit.weights
    stacks = [[matrix] for matrix in batch.unbind()] if isinstance(batch, Tensor) else [batch]
    for term, weights in zip(unit.terms, stacks, strict=True):
        wholes = [gathered(weight) for weight in weights]
        stack = wholes[0] if len(wholes) == 1 else torch.cat(wholes)
        value = qr_penalty(stack, like.qr_method) if form is None else form(stack)
        yield [Unit([term], weights, unit.mesh)], value.reshape(1)


def _held_part(pairs: Sequence[tuple[Term, Layout]], strengths: Mapping[str, float]) -> Part:
    """Return the values of weights that lie whole on one rank each: one all-reduce for all."""
    first: Any = pairs[0][0].views[0].parameter
    cut = pairs[0][1].cut
    dtype = torch.promote_types(first.dtype, torch.float32)
    zeros = torch.zeros(len(pairs), dtype=dtype, device=first.to_local().device)
    numbers = dict(zip((id(term) for term, _ in pairs), zeros.unbind(), strict=True))
    here = [term for term, layout in pairs if layout.holder == cut.rank]
    for some, distances in _by_strength(Reader(here, on_one_rank=True).units()):
        scaled = (strengths[some[0].strength] * distances).to(dtype)
        numbers |= zip(map(id, some), scaled.unbind(), strict=True)

    # A rank without a weight of a stack gives it a gradient of zeros, as the others do theirs.
    stored: dict[int, Any] = {id(t.views[0].parameter): t.views[0].parameter for t, _ in pairs}
    for term in here:
        stored.pop(id(term.views[0].parameter), None)
    others = [parameter.to_local() for parameter in stored.values()]
    total = sum_over_ranks(torch.stack([*numbers.values()]), cut.groups, others)
    return [_name(term) for term, _ in pairs], total
