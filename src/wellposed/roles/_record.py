"""Record of one forward pass: products with parameters, attention calls, and their inputs."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from torch import Tensor, nn

from wellposed.roles._views import WeightView, spans_of

CutKind = TypeVar("CutKind", bound="Cut")


@dataclass(eq=False, kw_only=True)
class Cut:
    """A tensor at which the autograd graph was cut: its gradient ends in ``leaf``."""

    order: int
    leaf: Tensor
    source: Any = None
    """The only tensor it was computed from, if any."""


@dataclass(eq=False, kw_only=True)
class Product(Cut):
    """``output = input W^T``, with the view of W and the indices that it reads of a stack."""

    view: WeightView
    rows: range
    entries: tuple[int, ...]
    constant: bool = False
    """Whether its input does not depend on the model's, as in a table of positions."""

    @property
    def is_stack(self) -> bool:
        """Whether the product is of several matrices of a stack at once."""
        return len(self.entries) > 1

    @property
    def experts(self) -> Sequence[int | None]:
        """Indices of all matrices of the stack; of a single matrix, None alone."""
        return range(self.view.parameter.shape[0]) if self.entries else (None,)

    def view_of(self, rows: Sequence[int] | None = None, expert: int | None = None) -> WeightView:
        """Return the view of some of the product's own rows; default: all."""
        chosen = self.rows if rows is None else [self.rows[row] for row in rows]
        view = replace(self.view, expert=expert)
        if list(chosen) == list(range(view.shape[0])):
            return view
        return replace(view, spans=spans_of(sorted(chosen)))


@dataclass(eq=False, kw_only=True)
class Attention(Cut):
    """One attention call: query, key and value as (..., tokens, width)."""

    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool
    module: nn.Module | None = None
    """The innermost module that ran."""
    extra: Sequence[tuple[Tensor, Tensor]] = ()
    """Additional queries and keys, combined with these before they meet the value."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Query, key and value, and additional ones as ``query 2``, ``key 2``, ..."""
        named = {"query": self.query, "key": self.key, "value": self.value}
        for number, (query, key) in enumerate(self.extra, 2):
            named |= {f"query {number}": query, f"key {number}": key}
        return named


@dataclass
class Record:
    """Events of one pass, in order."""

    gates: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Autograd node of an elementwise product -> its factors."""
    cuts: dict[int, Cut] = field(default_factory=dict)
    """Identity of a leaf -> its cut."""
    used: set[int] = field(default_factory=set)
    """Storages that any function read."""
    summed: set[int] = field(default_factory=set)
    """Identity of a product whose result is added to another activation."""
    tables: dict[int, tuple[WeightView, Literal["token", "position"]]] = field(default_factory=dict)
    """Identity of a parameter -> its view, and whether it embeds tokens or positions."""
    inline_norms: list[nn.Module] = field(default_factory=list)
    """Modules that call a norm of torch in their own code."""
    statistics: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Input and output of each statistic or norm."""
    constants: list[Tensor] = field(default_factory=list)
    """Values computed with gradients switched off, in order."""
    residuals: dict[int, Tensor] = field(default_factory=dict)
    """Identity of a product -> the activation that its result is added to."""
    without_softmax: dict[nn.Module, None] = field(default_factory=dict)
    """Modules that multiply three activations without a softmax, as linear attention does."""
    alike: dict[nn.Module, Tensor] = field(default_factory=dict)
    """Modules that may be norms, with a tensor like their input."""
    scaled_views: set[Any] = field(default_factory=set)
    """Autograd nodes of products that were written in place into a view."""
    closed: set[tuple[Any, int]] = field(default_factory=set)
    """Autograd node and number of an input at which searches end, as it is a gate."""
    switched: bool = False
    """Whether the model switched gradients on or off."""

    def of_kind(self, kind: type[CutKind]) -> list[CutKind]:
        """Return the cuts of a kind, in the order of the pass."""
        return [cut for cut in self.cuts.values() if isinstance(cut, kind)]

    def above(self, *tensors: Any, limit: float = math.inf) -> list[Cut]:
        """Return the nearest cuts above tensors or nodes; the search ends after ``limit`` + 1."""
        cuts: dict[int, Cut] = {}
        for node in ancestors(tensors, self.closed):
            cut = self.cuts.get(id(getattr(node, "variable", None)))
            if cut is not None:
                cuts[id(cut)] = cut
                if len(cuts) > limit:
                    break
        return list(cuts.values())


def ancestors(tensors: Sequence[Any], closed: Container[tuple[Any, int]] = ()) -> Iterator[Any]:
    """Yield the autograd nodes above tensors or nodes, nearest first, except by closed inputs."""
    level: list[Any] = [getattr(item, "grad_fn", item) for item in tensors]
    visited: set[Any] = set()
    while level:
        above: list[Any] = []
        for node in level:
            if node is not None and node not in visited:
                visited.add(node)
                yield node
                parents = enumerate(node.next_functions)
                above += [parent for n, (parent, _) in parents if (node, n) not in closed]
        level = above
