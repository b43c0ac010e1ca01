"""The weights of a penalty's terms: each parameter is read once, and the experts of a stack together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from wellposed.linalg import Layout, gathered, is_sharded, layout_of, mesh_of
from wellposed.penalize._terms import Term
from wellposed.roles import WeightView, block_of

Spans: TypeAlias = tuple[tuple[int, int], ...]
Key: TypeAlias = tuple[int, str]
"""A parameter: the id of its module, and its name there."""


@dataclass(frozen=True)
class Unit:
    """Terms whose weights are read and measured together."""

    terms: list[Term]
    weights: Sequence[Tensor] | Tensor
    """The weights of one term, stacked along outputs; or (experts, out, in), an expert a term."""
    mesh: Any = None
    """The ranks that hold the weights; None if each of them holds all."""


class Reader:
    """Reads the weights of terms, as a rank has them.

    A parameter whose parts ranks share is gathered once for all. One that is fused of the weights
    of several roles is split once, as each slice fills a gradient of the whole parameter. Experts
    of a stack stay one tensor, for the same reason.

    Args:
        terms: whose weights are read.
        on_one_rank: experts that lie whole on one rank are read from this rank's shard.
    """

    def __init__(self, terms: Sequence[Term], *, on_one_rank: bool = False) -> None:
        self._terms = terms
        self._is_local = on_one_rank
        self._sources: dict[Key, Tensor] = {}
        self._pieces: dict[tuple[Any, ...], Tensor] = {}
        self._spans: dict[tuple[Key, bool], set[Spans]] = {}
        for view in (view for term in terms for view in term.views):
            if view.spans is not None:
                self._spans.setdefault((_key(view), view.transposed), set()).add(view.spans)

    def units(self) -> list[Unit]:
        """Return all terms, each in one unit."""
        experts: dict[tuple[Any, ...], list[Term]] = {}
        units: list[Unit] = []
        for term in self._terms:
            view = term.views[0]
            if len(term.views) == 1 and self._is_of_stack(view):
                key = term.strength, _key(view), view.spans, view.transposed
                experts.setdefault(key, []).append(term)
            else:
                units.append(self._unit(term))
        for terms in experts.values():
            units += self._units_of_experts(terms)
        return units

    def _is_of_stack(self, view: WeightView) -> bool:
        """Whether a weight is a matrix of a tensor that this rank has as a whole, or holds."""
        if view.is_computed or view.expert is None or view.parameter.ndim != 3:
            return False
        return self._is_local or view.crosses_shards or not is_sharded(view.parameter)

    def _unit(self, term: Term) -> Unit:
        weights = [self._matrix(view) for view in term.views]
        gathered_over = (self._mesh(view) for view in term.views)
        mesh = mesh_of(weights) or next((m for m in gathered_over if m is not None), None)
        return Unit([term], weights, mesh)

    def _units_of_experts(self, terms: list[Term]) -> Iterable[Unit]:
        """Return one unit if the terms are all experts of a stack, else one for each."""
        view = terms[0].views[0]
        mesh = None if self._is_local else self._mesh(view)
        stack = self._piece(view)
        first = _first_here(view) if self._is_local else 0
        experts = [(term.views[0].expert or 0) - first for term in terms]
        if experts == list(range(len(stack))):
            return [Unit(terms, stack, mesh)]
        matrices = stack.unbind()
        pairs = zip(terms, experts, strict=True)
        return [Unit([term], [matrices[expert]], mesh) for term, expert in pairs]

    def _matrix(self, view: WeightView) -> Tensor:
        if view.is_computed:  # an adapter adds to it
            return view.tensor()
        if is_sharded(view.parameter) and not view.crosses_shards:
            return view.tensor()
        piece = self._piece(view)
        return piece[view.expert or 0] if piece.ndim == 3 else piece

    def _mesh(self, view: WeightView) -> Any:
        """Return the mesh over which a weight is gathered."""
        if not view.crosses_shards:
            return None
        stored: Any = view.owner._parameters[view.attribute]
        return stored.device_mesh

    def _source(self, view: WeightView) -> Tensor:
        """Return the parameter, whole or as this rank holds it."""
        key = _key(view)
        if key not in self._sources:
            stored: Any = view.parameter
            if self._is_local:
                stored = stored.to_local()
            elif view.crosses_shards:
                stored = gathered(stored)
            self._sources[key] = stored
        return self._sources[key]

    def _piece(self, view: WeightView) -> Tensor:
        """Return the rows of a view, (out, in) or (experts, out, in)."""
        key = _key(view), view.transposed
        piece = *key, view.spans
        if piece not in self._pieces:
            source = self._source(view)
            source = source.mT if view.transposed else source
            parts = _divided(source, sorted(self._spans.get(key, ())))
            self._pieces |= {(*key, spans): part for spans, part in parts.items()}
            if piece not in self._pieces:
                self._pieces[piece] = view.rows_in(source)
        return self._pieces[piece]


def _divided(source: Tensor, all_spans: Sequence[Spans]) -> dict[Spans, Tensor]:
    """Return the rows of each spans by one operation, if they are all rows, and else nothing.

    Spans are blocks one after the other, or rows that take turns, such as those of gate and up.
    """
    rows = [block_of(spans) for spans in all_spans]
    blocks = [block for block in rows if block is not None]
    if len(blocks) < max(2, len(rows)):
        return {}

    parts: Sequence[Tensor] = ()
    if all(block.step == 1 for block in blocks):
        starts = [block.start for block in blocks]
        stops = [block.stop for block in blocks]
        if [*starts, source.shape[-2]] == [0, *stops]:
            parts = source.split([len(block) for block in blocks], -2)
    else:
        count = len(blocks)
        turns = [range(source.shape[-2])[start::count] for start in range(count)]
        if blocks == turns and source.shape[-2] % count == 0:
            # (..., turns count, in) -> count of (..., turns, in)
            parts = source.unflatten(-2, (-1, count)).unbind(-2)

    return dict(zip(all_spans, parts, strict=False))


def lies_on_one_rank(term: Term) -> Layout | None:
    """Return how the term's only weight lies in a stack that is cut between its matrices."""
    view = term.views[0]
    if len(term.views) > 1 or view.is_computed or view.expert is None:
        return None
    stored = view.parameter
    layout = layout_of(stored, entry=view.expert) if stored.ndim == 3 else None
    return None if layout is None or layout.holder is None else layout


def _first_here(view: WeightView) -> int:
    """Return the index of the first expert that this rank holds."""
    layout = layout_of(view.parameter)
    assert layout is not None
    return layout.cut.span(layout.stored[0], layout.cut.rank)[0]


def _key(view: WeightView) -> Key:
    return id(view.owner), view.attribute
