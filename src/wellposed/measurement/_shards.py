"""Weights that FSDP2 shards: local parts, and whole weights on one process each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from wellposed.linalg import Cut, Layout, cost_of, cut_of, is_sharded, shares_of, wholes_of
from wellposed.roles import WeightView, block_of


def cut_of_view(view: WeightView) -> Cut | None:
    """Return how a parameter is cut; None if whole, computed, a partial sum or cut twice."""
    return None if view.is_computed else cut_of(view.parameter)


def has_local_part(view: WeightView) -> bool:
    """Return whether this process knows which entries of a weight it holds."""
    parameters = (*getattr(view, "layer", view.owner).parameters(), view.parameter)
    is_whole = not any(map(is_sharded, parameters if view.is_computed else parameters[-1:]))
    return is_whole or cut_of_view(view) is not None


def local_part(view: WeightView, tensor: Tensor | None = None) -> Tensor:
    """Return the entries of a weight on this process, of its values or a gradient."""
    stored = view.parameter if tensor is None else tensor
    if not is_sharded(stored) or (cut := cut_of_view(view)) is None:
        return view.tensor() if tensor is None else view.matrix_in(tensor)
    entry = (view.expert or 0) if stored.ndim == 3 else None
    axis = -1 if view.transposed else -2
    block = None if view.spans is None else block_of(view.spans)
    spans = () if block is not None else view.spans or ()
    pieces = [block] if not spans else [range(start, stop) for start, stop in spans]

    layouts = [Layout(cut, tuple(stored.shape), entry, rows, axis) for rows in pieces]
    parts = [layout.part(stored.to_local()) for layout in layouts]
    part = parts[0] if len(parts) == 1 else torch.cat(parts, axis)
    return part.mT if view.transposed else part


def owned_ones(views: Sequence[WeightView]) -> tuple[dict[int, Cut], dict[int, Tensor]]:
    """Return how parameters are cut, and whole ones that this process works on, by one exchange."""
    parameters = {id(view.parameter): view.parameter for view in views}
    cuts = {id(view.parameter): cut for view in views if (cut := cut_of_view(view)) is not None}
    costs = dict.fromkeys(cuts, 0)
    for view in views if cuts else ():
        if id(view.parameter) in cuts:
            costs[id(view.parameter)] += cost_of(view.shape)
    keys = [*cuts]
    layouts = [Layout(cut, tuple(parameters[key].shape)) for key, cut in cuts.items()]
    owners = shares_of(layouts, [*costs.values()])
    wholes = wholes_of([parameters[key] for key in keys], layouts, owners)
    return cuts, {keys[index]: tensor for index, tensor in wholes.items()}


def _groups(cuts: Sequence[Cut | None]) -> dict[Any, list[int]]:
    """Return the places of the parameters of each group of processes."""
    groups = dict.fromkeys(cut.groups for cut in cuts if cut)
    return {g[0]: [i for i, c in enumerate(cuts) if c and c.groups == g] for g in groups}


def whole_norms(lengths: Sequence[Tensor], cuts: Sequence[Cut | None]) -> list[Tensor]:
    """Return the norms of whole weights from those of local parts, by one all-reduce a group."""
    lengths = [*lengths]
    for group, places in _groups(cuts).items():
        squares = torch.stack([lengths[i] for i in places]).double().square()
        dist.all_reduce(squares, group=group)
        for i, square in zip(places, squares, strict=True):
            lengths[i] = square.sqrt()
    return lengths


def shared(
    lines: Sequence[Sequence[float]], cuts: Sequence[Cut | None], device: torch.device
) -> list[Sequence[float]]:
    """Return the numbers of all weights; of a sharded one only its owner has others than zeros."""
    lines = [*lines]
    for group, places in _groups(cuts).items():
        flat = [number for i in places for number in lines[i]]
        total = torch.tensor(flat, dtype=torch.float64, device=device)
        dist.all_reduce(total, group=group)
        numbers = iter(total.tolist())
        for i in places:
            lines[i] = [next(numbers) for _ in lines[i]]
    return lines
