"""Factors that scale a query, key, value or the result of attention, found in the autograd graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from wellposed.roles._record import Attention, Cut, Product, Record, ancestors

_PRODUCTS = {"MulBackward0", "DivBackward0"}


def close_output_gates(record: Record, tensor: Tensor, call: Attention) -> list[Cut]:
    """Close the gates between a call and a tensor; return the cuts behind them.

    A gate is a factor without the call's result. Searches end at a closed gate, and no gradient
    passes it.
    """
    gates: list[Cut] = []
    for node in [*_elementwise_products(record, tensor)]:
        sides = [record.above(parent) for parent, _ in node.next_functions]
        scaled = [any(cut is call for cut in side) for side in sides]
        if all(sides) and sum(scaled) == 1:
            index = scaled.index(False)
            gates += sides[index]
            _close(record, node, index)
    return gates


def close_projection_gates(record: Record, tensor: Tensor) -> list[Cut]:
    """Close the gates of a query, key or value; return the cuts behind them.

    A gate is the factor that is not linear in its product, or has one number for several of the
    other's. The other factor is linear. If both could be the gate, none is closed.
    """
    gates: list[Cut] = []
    # an inner gate first: it may be part of what an outer one scales
    for node in reversed([*_elementwise_products(record, tensor)]):
        sides = [record.above(parent) for parent, _ in node.next_functions]
        index = _gate_among(node, sides)
        if index is not None:
            gates += sides[index]
            _close(record, node, index)
    return gates


def _elementwise_products(record: Record, tensor: Tensor) -> Iterator[Any]:
    for node in ancestors([tensor]):
        parents = [parent for parent, _ in node.next_functions]
        is_product = type(node).__name__ in _PRODUCTS or node in record.scaled_views
        if is_product and len(parents) == 2 and None not in parents:
            yield node


def _gate_among(node: Any, sides: list[list[Cut]]) -> int | None:
    """Return which factor of an elementwise product scales the other; None if neither does."""
    if not all(any(isinstance(cut, Product) for cut in side) for side in sides):
        return None
    rows = [_rows_of(edge, side) for edge, side in zip(node.next_functions, sides, strict=True)]
    if not rows[0].isdisjoint(rows[1]):
        return None  # an activation of one product, such as x * sigmoid(x)

    edges = node.next_functions
    linear = [_is_linear(edge, side) for edge, side in zip(edges, sides, strict=True)]
    if linear[0] != linear[1]:
        return linear.index(False)

    sizes = [_shape(edge).numel() for edge in edges]
    if all(linear) and sizes[0] != sizes[1]:
        return sizes.index(min(sizes))
    return None


def _shape(edge: tuple[Any, int]) -> torch.Size:
    node, number = edge
    return torch.Size(node._input_metadata[number].shape)


def _gradient(edge: tuple[Any, int], cut: Cut, *, twice: bool = False) -> Tensor | None:
    start = torch.randn(_shape(edge), dtype=cut.leaf.dtype, device=cut.leaf.device)
    (gradient,) = torch.autograd.grad(
        [GradientEdge(*edge)],
        [cut.leaf],
        [start],
        retain_graph=True,
        create_graph=twice,
        allow_unused=True,
    )
    return gradient


def _rows_of(edge: tuple[Any, int], cuts: list[Cut]) -> set[tuple[int, int]]:
    """Return the rows of all products that a factor depends on, with the identity of the product."""
    rows: set[tuple[int, int]] = set()
    for cut in cuts:
        gradient = _gradient(edge, cut)
        if gradient is not None:
            reached = gradient.reshape(-1, gradient.shape[-1]).ne(0).any(0).nonzero().flatten()
            rows |= {(id(cut), row) for row in reached.tolist()}
    return rows


def _is_linear(edge: tuple[Any, int], cuts: list[Cut]) -> bool:
    """Return whether no gradient of a factor depends on the product that it is taken of."""
    for cut in cuts:
        gradient = _gradient(edge, cut, twice=True)
        if gradient is None or not gradient.requires_grad:
            continue
        (second,) = torch.autograd.grad(
            gradient.sum(), cut.leaf, retain_graph=True, allow_unused=True
        )
        if second is not None:
            return False
    return True


def _close(record: Record, node: Any, index: int) -> None:
    """End searches at one factor of a product, and let no gradient through it."""
    if (node, index) in record.closed:
        return
    record.closed.add((node, index))

    def without(into: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...]:
        return tuple(None if number == index else part for number, part in enumerate(into))

    node.register_hook(without)
