"""Why a total is of no use: which kind of part makes it so, what it would be without them, and what
to change."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from wellposed.certification._blocks import NORM_FORM
from wellposed.certification._certificate import CertifiedLayer, leaves

USELESS = 1e3
"""From this total on a margin of 1 is certified against moves of a thousandth of a token's norm at
most."""
_KINDS = 3
_ADVICE = {
    NORM_FORM: (
        "a norm divides by sqrt(eps) where a token is constant: raise eps, or train without norms,"
        " see the variant lipschitz"
    ),
    "(B5": (
        "dot-product attention grows with the square of its ball: see L2SelfAttention,"
        " BallAttention and the variant lipschitz"
    ),
    "gated": (
        "a gated feed-forward grows with its ball: MaxMinFeedForward has slope |W_1||W_2|"
        " everywhere"
    ),
    "singular value": (
        "hold the weights at norm 1: wellposed.constrain_(model, optimizer, to='spectral')"
    ),
}


def explain(
    total: float, rows: Sequence[CertifiedLayer], without: Callable[[frozenset[str]], float]
) -> str:
    """Return one line on a total above `USELESS`, else nothing.

    ``without(classes)`` is the total of the same certificate in which every part of these classes
    counts as 1 at most.
    """
    if not USELESS < total < math.inf:
        return ""
    groups: dict[str, list[CertifiedLayer]] = {}
    for row in leaves(rows):
        if row.lipschitz > 1:
            groups.setdefault(row.module, []).append(row)
    calm: list[str] = []
    told: list[str] = []
    left = total
    while left > USELESS and len(calm) < _KINDS and groups.keys() - calm:
        found = {kind: without(frozenset([*calm, kind])) for kind in groups if kind not in calm}
        kind = min(found, key=lambda name: found[name])
        if not found[kind] < 0.99 * left:
            break
        left = found[kind]
        calm.append(kind)
        told.append(_contribution(kind, groups[kind], left, first=len(calm) == 1))
    if not calm:
        return (
            f"of no use at {total:.3g}: no kind of part alone makes it so, each layer adds its own;"
            " fewer layers or smaller branches make it smaller, see ConvexResidual"
        )
    return f"of no use at {total:.3g}: {', '.join(told)}; {_advice(groups[calm[0]])}"


def _contribution(kind: str, rows: Sequence[CertifiedLayer], left: float, *, first: bool) -> str:
    low, high = min(row.lipschitz for row in rows), max(row.lipschitz for row in rows)
    each = f"{high:.3g}" if high < 1.05 * low else f"{low:.3g} to {high:.3g}"
    count = (
        f"{len(rows)} {kind} contribute {each} each"
        if len(rows) > 1
        else f"{kind} contributes {each}"
    )
    return f"{count} (without {'them' if first else 'these too'} {left:.3g})"


def _advice(rows: Sequence[CertifiedLayer]) -> str:
    form = max(rows, key=lambda row: row.lipschitz).form
    return next(
        (text for mark, text in _ADVICE.items() if mark in form), "smaller weights make it smaller"
    )
