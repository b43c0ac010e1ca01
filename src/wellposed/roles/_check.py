"""Check the result of a pass: change some rows at some tokens, run again, compare what moved."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.roles._record import Attention, Cut, Product, Record
from wellposed.roles._trace import Call, Tracer

_MIX = (-7046029254386353131, -4417276706812531889, -49064778989728563)
"""Odd constants of SplitMix64 and xxHash."""


@dataclass(frozen=True)
class Moves:
    """Moves of a cut by feature code (-1: none); the first ``alike`` axes move independently."""

    codes: Tensor
    axis: int = -1
    alike: int = 0


@dataclass(eq=False)
class Claim:
    """Proposed role of one attention call or feed-forward network, in the products of a pass.

    ``groups`` maps a name (query, up, ...) to a product and its rows, by head or hidden unit. Unit
    i of the gate multiplies unit i of ``up``.
    """

    parts: Sequence[Any]
    last: Product
    groups: Mapping[str, tuple[Product, Sequence[Sequence[int]]]]
    call: Attention | None = None


class Replay(Tracer):
    """Repeat the pass of ``base`` with about half of the numbers in ``moves`` moved.

    Each product, attention call and embedding returns its recorded value, so no move reaches a
    later layer. Statistics over features (a norm couples all heads) and values without gradients
    are reused.
    """

    def __init__(
        self, model: nn.Module, base: Record, moves: dict[int, Moves], *, odd: bool, forced: bool
    ) -> None:
        super().__init__(model, forced=forced)
        self._moves = moves
        self._odd = odd
        self._cuts = iter([*base.cuts.values()])
        self._statistics = iter(base.statistics)
        self._constants = iter(base.constants)
        self.diverged = False

    def _constant(self, output: Tensor) -> Tensor:
        before = next(self._constants, output)
        self.diverged |= before.shape != output.shape
        return super()._constant(before)

    def _cut(
        self, output: Tensor, kind: type[Cut] = Cut, source: Tensor | None = None, **details: Any
    ) -> Tensor:
        before = next(self._cuts, None)
        if before is None or type(before) is not kind or before.leaf.shape != output.shape:
            self.diverged = True
            return super()._cut(output, kind, source, **details)
        moved = before.leaf.detach()
        if id(before) in self._moves:
            moved = _with_some_moved(moved, self._moves[id(before)], odd=self._odd)
        return super()._cut(moved, kind, source, **details)

    def _statistic(self, call: Call) -> Tensor:
        source, output = self._before(call)
        free = super()._statistic(call)
        return output if _over_features(call) and source.shape == call.inputs[0].shape else free

    def _norm(self, call: Call) -> Tensor:
        source, output = self._before(call)
        free = super()._norm(call)
        same = source.shape == call.inputs[0].shape == output.shape and output.dtype == source.dtype
        return output + (call.inputs[0] - source) if same and _over_features(call) else free

    def _before(self, call: Call) -> tuple[Tensor, Tensor]:
        before = next(self._statistics, (call.inputs[0], call.output))
        self.diverged |= before[1].shape != call.output.shape
        return before


def moves_of(record: Record, claims: Sequence[Claim]) -> dict[int, Moves]:
    """Return the moves by identity of a cut: by head or unit in claims, else by token."""
    codes: dict[int, Tensor] = {}
    moves: dict[int, Moves] = {}
    for number, claim in enumerate(claims, 1):
        for index, (product, groups) in enumerate(claim.groups.values()):
            marks = codes.setdefault(id(product), torch.full((product.leaf.shape[-1],), -1))
            # the unit of a gate moves with that of `up`
            _mark(marks, groups, (64 * number + (index if claim.call else 0)) << 32)
            moves[id(product)] = Moves(marks)
        if claim.call:
            shape = claim.call.leaf.shape
            moves[id(claim.call)] = Moves(torch.zeros(shape[-1]).long(), alike=len(shape) - 2)

    starts = True
    for cut in record.cuts.values():
        starts &= not isinstance(cut, (Product, Attention))
        convolved = cut.source is not None
        if type(cut) is Cut and cut.leaf.ndim > 2 and (starts or not convolved):
            axis = 1 if convolved else -1
            several = cut.leaf.movedim(axis, -1).shape[1:-1].numel() > 1
            moves[id(cut)] = Moves(torch.zeros(cut.leaf.shape[axis]).long(), axis, int(several))

    return moves


def _mark(marks: Tensor, groups: Sequence[Sequence[int]], first: int) -> None:
    """Write the codes of groups of rows; groups that share rows get one code."""
    rows = torch.tensor([row for group in groups for row in group], dtype=torch.long)
    labels = torch.tensor([first + i for i, group in enumerate(groups) for _ in group])
    if bool((marks[rows] < 0).all()):
        marks[rows] = labels
        return
    for i, group in enumerate(groups):
        inside = torch.tensor(group)
        shared = marks[inside].unique()
        shared = shared[shared >= 0]
        code = int(shared[0]) if len(shared) else first + i
        marks[torch.isin(marks, shared)] = code
        marks[inside] = code


def _with_some_moved(values: Tensor, moves: Moves, *, odd: bool) -> Tensor:
    """Return values with those moved whose hash of place and code is odd, or even."""
    # (..., features, ...) -> (..., features)
    by_feature = values.movedim(moves.axis, -1)
    places = by_feature.shape[:-1]
    codes = moves.codes
    index = torch.arange(places[moves.alike :].numel()).reshape(places[moves.alike :])[..., None]
    if moves.alike:  # of two neighbours, one moves
        chosen = (_hash_bit(index // 2, codes) + index) % 2 == int(odd)
    else:
        chosen = _hash_bit(index, codes) == int(odd)
    size = values.abs().mean().nan_to_num(0.0, 0.0, 0.0) + 0.1
    steps = size * (1 + 0.5 * torch.cos(torch.arange(len(codes), device=values.device)))
    moved = by_feature + (steps * (chosen & (codes >= 0)).to(values.device)).to(values.dtype)
    return moved.movedim(-1, moves.axis)


def _hash_bit(index: Tensor, code: Tensor) -> Tensor:
    mixed = index * _MIX[0] + code * _MIX[1]
    return (((mixed ^ (mixed >> 29)) * _MIX[2]) >> 32) & 1


def contradictions(claim: Claim, base: Record, replays: Sequence[Record]) -> Iterator[str]:
    """Yield how a claim fails: a number that moves in both replays has several sources."""
    # each row of each token moves in one replay only
    orders = {cut: index for index, cut in enumerate(base.cuts.values())}
    cuts = [[*replay.cuts.values()] for replay in replays]

    def moved(cut: Any, read: Callable[[Any, Record], Tensor | None]) -> list[Tensor]:
        """Return for each replay which numbers of a tensor moved; nothing if it is missing."""
        pairs = [
            (read(cut, base), read(replayed[orders[cut]], replay))
            for replayed, replay in zip(cuts, replays, strict=True)
        ]
        return [_moved(one, two) for one, two in pairs if one is not None and two is not None]

    last = claim.last
    call = claim.call
    for name, tensor in call.tensors.items() if call is not None else ():
        first, second = (
            f.any(-1) for f in moved(call, lambda cut, _, name=name: cut.tensors[name])
        )
        if (first & second).any():
            yield _witness(f"its {name}", tensor, first & second, [claim.groups[name][0]])
        elif not (first | second).any() and tensor.isfinite().all():
            yield f"its {name} does not move with {claim.groups[name][0].view.label}"
    first, second = moved(last, lambda cut, _: cut.source)
    if (first & second).any():
        sources = [claim.call] if claim.call else [product for product, _ in claim.groups.values()]
        yield _witness(f"what {last.view.label} reads", last.source, first & second, sources)
    if claim.call is None:
        up, _ = claim.groups["up"]
        first, second = (f.any(-1) for f in moved(up, lambda cut, _: cut.source))
        sums = [f.any(-1) for f in moved(last, lambda cut, rec: rec.residuals.get(id(cut)))]
        if len(sums) == 2 and (first & second).any() and not (sums[0] & sums[1]).any():
            yield f"what {up.view.label} reads at one place moves with several tokens"


def _witness(what: str, tensor: Tensor, mixed: Tensor, sources: Sequence[Cut]) -> str:
    """Return an example of a number that depends on several tokens or units."""
    index = tuple(mixed.nonzero()[0].tolist())
    labels = [cut.view.label for cut in sources if isinstance(cut, Product)]
    text = f"{what} at place {list(index)} moves"
    for source in sources if tensor.requires_grad else ():
        (gradient,) = torch.autograd.grad(
            tensor[index].sum(), source.leaf, retain_graph=True, allow_unused=True
        )
        changed = [] if gradient is None else gradient.ne(0).any(-1).nonzero().tolist()
        if len(changed) > 1:
            places = ", ".join(map(str, [*changed[:3], *(["..."] if len(changed) > 3 else [])]))
            return f"{text} when places {places} of {labels[0] if labels else 'attention'} do"
    return f"{text} with several tokens, heads or units of {' and '.join(labels) or 'attention'}"


def _moved(before: Tensor, after: Tensor) -> Tensor:
    size = before.abs().nan_to_num(0.0, 0.0, 0.0).amax() if before.numel() else 0.0
    # moved by more than rounding
    return (before - after).abs().detach() > torch.finfo(before.dtype).eps * size


def _over_features(call: Call) -> bool:
    """Return whether a statistic or norm is over features only, so it couples no tokens."""
    source = call.inputs[0]
    last = call.inputs[0].ndim - 1
    if call.name == "group_norm":
        return source.ndim == 2
    if call.name in {"sqrt", "rsqrt"}:
        return source.ndim > 1 and source.shape[-1] == 1

    values = [
        *call.args[1:],
        *(call.kwargs.get(name) for name in ("normalized_shape", "dim", "axis")),
    ]
    values = [value for value in values if type(value) in (int, tuple, list, torch.Size)]
    axes = values[-1] if values else ()
    if call.name in {"layer_norm", "rms_norm"}:
        return len(values[0]) == 1

    return (axes if type(axes) is int else axes[0] if len(axes) == 1 else None) in (-1, last)
