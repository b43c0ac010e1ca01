"""How far weights are from orthogonal, all of one shape at once, also if they lie in shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from wellposed.functional import gram_penalties, qr_penalty
from wellposed.linalg import (
    Layout,
    gathered,
    layout_of,
    mean_over_ranks,
    mesh_of,
    sum_over_ranks,
)
from wellposed.penalize._terms import FORMS, Part, Term
from wellposed.roles import WeightView


def weight_parts(terms: Sequence[Term], strengths: Mapping[str, float]) -> Iterator[Part]:
    """Yield distances to orthogonality times strengths, for all weights of one shape at once.

    Weights in shards come together: one all-reduce for their gradients. A weight that lies whole
    on one rank, such as an expert of a stack, is measured there.
    """
    sharded: dict[Any, list[Part]] = {}
    spread: list[Term] = []
    on_one_rank: dict[Any, list[tuple[Term, Layout]]] = {}
    for term in terms:
        layout = _layout_on_one_rank(term)
        if layout is None:
            spread.append(term)
        else:
            stored: Any = term.views[0].parameter
            on_one_rank.setdefault((stored.device_mesh, stored.dtype), []).append((term, layout))

    reader = _Reader()
    for some, values in _by_strength(spread, [reader.weights(term) for term in spread]):
        part = (
            [f"{term.strength}.{term.label}" for term in some],
            strengths[some[0].strength] * values,
        )
        mesh = reader.meshes[id(some[0])]
        if mesh is None:
            yield part
        else:
            sharded.setdefault(mesh, []).append(part)
    for (mesh, _), pairs in on_one_rank.items():
        sharded.setdefault(mesh, []).append(_held_part(pairs, strengths))

    for mesh, parts in sharded.items():
        values = torch.cat([values for _, values in parts])
        yield [name for names, _ in parts for name in names], mean_over_ranks(values, mesh)


def _by_strength(
    terms: Sequence[Term], stacks: Sequence[Sequence[Tensor]]
) -> Iterator[tuple[list[Term], Tensor]]:
    """Yield terms of one strength and shape, and how far they are from orthogonal."""
    for strength in dict.fromkeys(term.strength for term in terms):
        places = [place for place, term in enumerate(terms) if term.strength == strength]
        some = [terms[place] for place in places]
        for indices, values in _measured(some[0], [stacks[place] for place in places]):
            yield [some[place] for place in indices], values


def _measured(
    like: Term, stacks: Sequence[Sequence[Tensor]]
) -> Iterator[tuple[Sequence[int], Tensor]]:
    if like.form in ("gram_squared", "gram"):
        # The side that should be orthonormal.
        side = "columns" if like.strength in ("attention", "feedforward") else "rows"
        squared = like.form == "gram_squared"
        yield from gram_penalties(stacks, squared=squared, side=side, gram_dtype=like.gram_dtype)
        return
    for place, weights in enumerate(stacks):
        wholes = [gathered(weight) for weight in weights]
        stack = wholes[0] if len(wholes) == 1 else torch.cat(wholes)
        form = FORMS.get(like.form) if like.form != "qr" else None
        value = qr_penalty(stack, like.qr_method) if form is None else form(stack)
        yield [place], value.reshape(1)


class _Reader:
    """Reads the weights of terms; a parameter whose parts ranks share is gathered once for all."""

    def __init__(self) -> None:
        self._wholes: dict[int, Tensor] = {}
        self.meshes: dict[int, Any] = {}
        """By the id of a term: the mesh of the ranks that hold its weights; None if each holds all."""

    def weights(self, term: Term) -> list[Tensor]:
        """Return the weights of a term."""
        read = [self._read(view) for view in term.views]
        mesh = mesh_of(weight for weight, _ in read)
        self.meshes[id(term)] = mesh or next((m for _, m in read if m is not None), None)
        return [weight for weight, _ in read]

    def _read(self, view: WeightView) -> tuple[Tensor, Any]:
        """Return a weight, and the mesh over which it was gathered."""
        if not view.crosses_shards:
            return view.tensor(), None
        stored: Any = view.owner._parameters[view.attribute]
        if view.is_computed:  # an adapter adds to it
            return view.tensor(), stored.device_mesh
        if id(stored) not in self._wholes:
            self._wholes[id(stored)] = gathered(stored)
        return view.seen(self._wholes[id(stored)]), stored.device_mesh


def _layout_on_one_rank(term: Term) -> Layout | None:
    """Return how the term's only weight lies in a stack that is cut between its matrices."""
    view = term.views[0]
    if len(term.views) > 1 or view.is_computed or view.expert is None:
        return None
    stored = view.parameter
    layout = layout_of(stored, entry=view.expert) if stored.ndim == 3 else None
    return None if layout is None or layout.holder is None else layout


def _held_part(pairs: Sequence[tuple[Term, Layout]], strengths: Mapping[str, float]) -> Part:
    """Return the values of weights that lie whole on one rank each: one all-reduce for all."""
    first: Any = pairs[0][0].views[0].parameter
    cut = pairs[0][1].cut
    dtype = torch.promote_types(first.dtype, torch.float32)
    zeros = torch.zeros(len(pairs), dtype=dtype, device=first.to_local().device)
    numbers = dict(zip((id(term) for term, _ in pairs), zeros.unbind(), strict=True))
    here = [(term, layout) for term, layout in pairs if layout.holder == cut.rank]
    weights = [[_local(term, layout)] for term, layout in here]
    for some, distances in _by_strength([term for term, _ in here], weights):
        scaled = (strengths[some[0].strength] * distances).to(dtype)
        numbers |= zip(map(id, some), scaled.unbind(), strict=True)

    # A rank without a weight of a stack gives it a gradient of zeros, as the others do theirs.
    stored: dict[int, Any] = {id(t.views[0].parameter): t.views[0].parameter for t, _ in pairs}
    for term, _ in here:
        stored.pop(id(term.views[0].parameter), None)
    others = [parameter.to_local() for parameter in stored.values()]
    total = sum_over_ranks(torch.stack([*numbers.values()]), cut.groups, others)
    return [f"{term.strength}.{term.label}" for term, _ in pairs], total


def _local(term: Term, layout: Layout) -> Tensor:
    stored: Any = term.views[0].parameter
    matrix = layout.part(stored.to_local())
    return replace(term.views[0], expert=None).seen(matrix)
