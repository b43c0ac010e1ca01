"""The matrices that a parameter holds: all of it, parts of a fused weight, entries of a stack."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from wellposed.roles import ATTENTION, FEEDFORWARD, Roles, WeightView, block_of

HIDDEN = frozenset((*ATTENTION, *FEEDFORWARD, "latent"))


class Piece(NamedTuple):
    """One matrix inside a parameter."""

    expert: int | None = None
    """Entry of a stack."""
    rows: tuple[int, int, int] | None = None
    """Start, stop and step of its output rows in a fused weight."""
    transposed: bool = False
    """Whether the parameter is stored (in, out)."""

    @property
    def label(self) -> str:
        """The entry and the rows as an index; empty for a whole parameter."""
        expert = "" if self.expert is None else f"[{self.expert}]"
        if self.rows is None:
            return expert
        start, stop, step = self.rows
        return f"{expert}[{start}:{stop}{f':{step}' if step > 1 else ''}]"

    def matrix_in(self, tensor: Tensor) -> Tensor:
        """Return the matrix (out, in) inside a tensor of the parameter's shape: a view."""
        matrix = tensor if self.expert is None else tensor[self.expert]
        oriented = matrix.mT if self.transposed else matrix
        return oriented if self.rows is None else oriented[slice(*self.rows)]


WHOLE = (Piece(),)


def pieces_by_role(roles: Roles) -> dict[nn.Parameter, tuple[Piece, ...]]:
    """Return the matrices of each weight of attention and feed-forward networks.

    Query, key and value of a fused weight are apart if the rows of each are evenly spaced; a weight
    whose rows interleave by head is one matrix.
    """
    views: dict[nn.Parameter, list[WeightView]] = {}
    for weight in roles.weights():
        parameter = weight.view.parameter
        if weight.role in HIDDEN and isinstance(parameter, nn.Parameter):
            views.setdefault(parameter, []).append(weight.view)
    return {parameter: _pieces(parameter, several) for parameter, several in views.items()}


def _pieces(parameter: Tensor, views: Sequence[WeightView]) -> tuple[Piece, ...]:
    experts: dict[int | None, list[WeightView]] = {}
    for view in views:
        experts.setdefault(view.expert, []).append(view)
    if parameter.ndim == 3 and experts.keys() != set(range(len(parameter))):
        return ()  # not all of its matrices are known
    return tuple(piece for several in experts.values() for piece in _rows(parameter, several))


def _rows(parameter: Tensor, views: Sequence[WeightView]) -> Iterable[Piece]:
    """Yield the blocks of rows of one matrix, or the matrix if they do not part it."""
    first = views[0]
    matrix = Piece(first.expert, transposed=first.transposed)
    blocks = {view.spans: None if view.spans is None else block_of(view.spans) for view in views}
    ranges = [block for block in blocks.values() if block is not None]
    count = parameter.shape[-1 if first.transposed else -2]
    covered = sorted(row for block in ranges for row in block)
    if len(ranges) < len(blocks) or covered != [*range(count)]:
        return [matrix]
    return [matrix._replace(rows=(block.start, block.stop, block.step)) for block in ranges]
