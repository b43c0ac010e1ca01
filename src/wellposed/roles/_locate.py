"""Locate a tensor inside a known weight: which rows, and which matrices of a stack."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from wellposed.roles._views import WeightView

LocatedWeight = tuple[WeightView, Tensor]
"""A weight, and a tensor with its layout that locates parts of it."""


def located(
    weight_place: LocatedWeight, weight: Tensor
) -> tuple[WeightView, range, tuple[int, ...]] | None:
    """Return the view, rows and stack indices that ``weight`` (..., out, in) covers, or None."""
    view, whole_weight = weight_place
    if whole_weight.ndim not in (2, 3) or weight.ndim not in (2, 3):
        return None

    start = int(weight.storage_offset() - whole_weight.storage_offset())
    step = whole_weight.stride(0) if whole_weight.ndim == 3 else 0
    entry, start = divmod(start, step) if step else (0, start)
    count = weight.shape[0] if weight.ndim == 3 else 1
    if count > 1 and weight.stride(0) != step:
        return None

    entries = tuple(range(entry, entry + count)) if step else ()
    if view.expert is not None:
        entries = (view.expert,)

    outs, ins = weight.shape[-2:]
    jump, across = weight.stride()[-2:]
    for transposed, part in ((False, whole_weight), (True, whole_weight.mT)):
        by_row, by_column = part.stride()[-2:]
        if ins == part.shape[-1] and (across == by_column or ins == 1) and jump % by_row == 0:
            first, left = divmod(start, by_row)
            pace = max(jump // by_row, 1)
            if not left and first + (outs - 1) * pace < part.shape[-2]:
                rows = range(first, first + outs * pace, pace)
                return replace(view, transposed=transposed, expert=None), rows, entries

    return None
