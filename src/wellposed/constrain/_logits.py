"""Attention logits held below a bound: after a step, rows of the queries and keys of a head are scaled
(QK-clip)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wellposed.constrain._matrix import SETS, ConstrainedMatrix, MatrixSet
from wellposed.constrain._select import Candidate
from wellposed.errors import ConfigError, ConvergenceError, RoleNotFoundError, listed
from wellposed.linalg import Retraction, Workspace
from wellposed.roles import AttentionRole, WeightView, find_roles
from wellposed.watch import (
    AttentionCall,
    AttentionWatcher,
    MultiheadCall,
    call_model,
    largest_logits,
    own_batch,
    quiet_run,
)

_IN_PROJECTION = {"q_proj_weight": 0, "k_proj_weight": 1}
# The largest growth of a logit in one step, of those near the bound, is remembered: a part of it is
# forgotten at each step, and a power above 1 leaves room for one that is larger still.
_NEAR, _MOST, _MEMORY, _POWER = 0.5, 2.0, 0.995, 1.5
_NOTES = "wellposed_logits"
"""In the optimizer's state: the growth, and the largest logit that each head was left with."""


@dataclass(frozen=True)
class HeadRows:
    """Rows of a parameter, the head that each is of, and the power of that head's factor it takes."""

    view: WeightView
    heads: Tensor
    rows: Tensor
    powers: Tensor

    @property
    def place(self) -> Candidate:
        """The parameter, for the checks that every held weight passes."""
        view, parameter = self.view, self.view.parameter
        plain = parameter if isinstance(parameter, nn.Parameter) else None
        transposed = view.transposed
        return Candidate(view.owner_path, view.attribute, view.owner, plain, transposed=transposed)

    def scaled(self) -> Iterator[Tensor]:
        """Yield what is scaled: the matrix (out, in), and the bias where there is one."""
        owner, attribute = self.view.owner, self.view.attribute
        matrix = self.view.parameter.detach()
        yield matrix.t() if self.view.transposed else matrix
        bias = getattr(owner, "bias", None)
        if isinstance(owner, nn.MultiheadAttention):
            whole, part = owner.in_proj_bias, _IN_PROJECTION.get(attribute)
            bias = whole if whole is None or part is None else whole.chunk(3)[part]
        if isinstance(bias, Tensor):
            yield bias.detach()[:, None]

    def scale_(self, factors: Tensor) -> None:
        """Multiply the rows of each head by its factor, to their power."""
        for each in self.scaled():
            column = factors.new_ones(len(each), 1)
            column[self.rows, 0] = factors[self.heads] ** self.powers
            column = column.to(each.device, torch.promote_types(each.dtype, torch.float32))
            each.copy_(each * column)


@dataclass(frozen=True)
class Logits(MatrixSet):
    """Queries and keys of which no logit of a head is above ``size`` on what was seen."""

    num_heads: int = 1
    decays = True

    def error(self, matrix: Tensor) -> float:
        """Return 0: passes show what is above the bound, see `HeldAttention.error`."""
        del matrix
        return 0.0

    def nearest(self, matrix: Tensor) -> Tensor:
        """Return the matrix: a pass shows which heads are to be scaled."""
        return matrix

    def retract(self, matrices: Sequence[HeldAttention], work: Workspace) -> Retraction:
        """Scale the heads whose largest logit would be above the bound after another such step."""
        del work
        if not _in_ranks() and None in (each.largest for each in matrices):
            if len(matrices) > 1:  # each is looked at alone
                raise ConvergenceError("not all attention modules were called")
            return Retraction("unseen")
        none = torch.full((self.num_heads,), -torch.inf, device=matrices[0].value.device)
        found = torch.stack([none if m.largest is None else m.largest.float() for m in matrices])
        if _in_ranks():
            torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
        # a kernel's sums may hide a query that is not finite, and the step it leads to does not
        found += 0.0 * torch.stack([m.value.sum(dtype=torch.float32) for m in matrices])[:, None]
        numbers = found.double().tolist()
        if not all(each < torch.inf for largest in numbers for each in largest):
            if len(matrices) == 1:  # of several each is looked at alone
                matrices[0].largest = None
            raise ConvergenceError(f"its largest logit is {sum(numbers[0])}")
        pairs = list(zip(matrices, numbers, strict=True))
        growth = max(each.growth(largest) for each, largest in pairs)
        for each, largest in pairs:
            each.scale_heads_(largest, growth)
        return Retraction("logits")


SETS.register("logits")(Logits)


class HeldAttention(ConstrainedMatrix):
    """One attention module: rows of its query and of its key, and the logits that were seen in it."""

    def __init__(
        self, role: AttentionRole, model: nn.Module, owners: Mapping[Any, Optimizer], bound: float
    ) -> None:
        self.role, self.module = role, model.get_submodule(role.path)
        self.parts = head_rows(role)
        chosen = Logits(bound, num_heads=role.num_heads)
        super().__init__(self.parts[0].place, owners[role.query.parameter], chosen)
        self.largest: Tensor | None = None
        """The largest logit of each head in the passes since the last step."""
        self.excess = 0.0
        self.path = role.path or type(model).__name__
        self.slices = [part.place for part in self.parts]
        self.entries = role.num_heads
        self.notes = (_NOTES,)

    def error(self) -> float:
        """Return by what part the largest logit was above the bound before the last step's scaling."""
        return self.excess

    def watch(self) -> list[Any]:
        """Watch the forward passes that have gradients."""
        role, wanted = replace(self.role, path=""), lambda _: torch.is_grad_enabled()
        return [AttentionWatcher(self.module, [role], self._see, wanted=wanted)]

    @torch.no_grad()
    def _see(self, _role: Any, calls: Sequence[tuple[AttentionCall, Tensor]]) -> None:
        for call, output in calls:
            largest = largest_logits(call, output, above=_NEAR * self.set.size)
            self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)

    def growth(self, largest: Sequence[float]) -> float:
        """Return the largest factor by which a logit near the bound grew in one step; past growth decays."""
        notes = self.optimizer.state.get(self.parameter, {}).get(_NOTES)
        if notes is None:
            return 1.0
        growth = 1.0 + _MEMORY * (notes[0] - 1.0)
        for now, was in zip(largest, notes[1:], strict=True):
            if now >= _NEAR * self.set.size and was > 0.0:
                growth = max(growth, min(now / was, _MOST))
        return growth

    def scale_heads_(self, largest: Sequence[float], growth: float) -> None:
        """Scale down each head whose largest logit could exceed the bound after such a growth, and
        store the logits that remain."""
        self.largest = None
        self.excess = max(0.0, max(largest) / self.set.size - 1.0)
        goal = self.set.size / growth**_POWER
        factors = [goal / max(each, goal) for each in largest]
        for part in self.parts if min(factors) < 1.0 else ():
            part.scale_(torch.tensor(factors, dtype=torch.float64))
        # Other optimizers than SGD may mistake the note for their own initialised state.
        if self.optimizer.state.get(self.parameter) or type(self.optimizer) is torch.optim.SGD:
            left = [each * factor for each, factor in zip(largest, factors, strict=True)]
            self.optimizer.state[self.parameter][_NOTES] = [growth, *left]


def _in_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def check_not_compiled(model: nn.Module) -> None:
    """Raise `ConfigError` for a compiled model, inside of which no hook sees the logits."""
    kind = torch._dynamo.eval_frame.OptimizedModule
    for module in model.modules():
        if isinstance(module, kind) or getattr(module, "_compiled_call_impl", None):
            raise ConfigError(
                "constrain_: to='logits' watches attention by hooks, which a compiled model does not"
                " run; leave torch.compile out, or take to='spectral'"
            )


def attention_of(
    model: nn.Module, chosen: Collection[Candidate], batch: Any
) -> list[AttentionRole]:
    """Return the attention modules of which a query or key is chosen.

    Raises:
        RoleNotFoundError: none is a query or key of attention. ConfigError: heads are not known.
    """
    asked = {id(place.parameter) for place in chosen}
    roles = find_roles(model, batch).attention
    roles = [r for r in roles if {id(r.query.parameter), id(r.key.parameter)} & asked]
    if not roles:
        raise RoleNotFoundError(
            "constrain_: to='logits' holds the logits of attention modules, and none of these weights"
            f" is a query or key of one:\n{listed([place.label for place in chosen])}"
        )
    known = [r for r in roles if {"query", "key"} <= {*r.heads} and "query" not in dict(r.further)]
    if unknown := [role.path for role in roles if role not in known]:
        raise ConfigError(
            "constrain_: to='logits' scales rows by head, and which rows these have is not known, or"
            f" more than one weight makes a query:\n{listed(unknown)}"
        )
    return roles


def head_rows(role: AttentionRole) -> list[HeadRows]:
    """Return the rows of the query and of the key, with powers that add up to 1 for each product.

    A key that several heads read, as all of grouped-query attention and the rotary one of latent
    attention, is left alone, and what of the query it is multiplied with takes the whole factor.
    """
    grouped = len(role.heads["key"]) != len(role.heads["query"])
    result: list[HeadRows] = []
    for name in ("query",) if grouped else ("query", "key"):
        heads, rows, powers = [], [], []
        for head, spans in enumerate(role.heads[name]):
            own = [row for span in spans for row in range(*span)]
            half = 0 if grouped else len(own)
            if "key" in dict(role.further) and not grouped:
                half = sum(stop - start for start, stop in role.heads["key"][head])
            rows += own
            heads += [head] * len(own)
            powers += [0.5] * half + [1.0] * (len(own) - half)
        result.append(HeadRows(getattr(role, name), *map(torch.tensor, (heads, rows, powers))))
    return result


def held_logits(
    roles: Sequence[AttentionRole],
    model: nn.Module,
    owners: Mapping[Any, Optimizer],
    bound: float,
    batch: Any,
) -> list[HeldAttention]:
    """Return the held modules; the heads of each are scaled by 1/16 and 1/256 once to see that its
    logits follow, and put back.

    Raises:
        ConfigError: there is nothing to run, or logits do not follow: L2, cosine and capped ones,
            those with normalised queries or keys, a bias of position, adapters.
    """
    batch = own_batch(model) if batch is None else batch
    if batch is None:
        raise ConfigError(
            f"constrain_: to='logits' runs {type(model).__name__} once to see that logits follow the"
            " rows that are scaled; give batch=, what the model is called with"
        )
    weights = [HeldAttention(role, model, owners, bound) for role in roles]
    found: dict[str, Tensor] = {}

    def see(role: AttentionRole, calls: Sequence[tuple[AttentionCall, Tensor]]) -> None:
        # All calls, as another attention in the module would be one of them.
        every: list[Tensor] = []
        for call, _ in calls:
            if not isinstance(call, MultiheadCall) or call.readable:
                logits = call.logits().double()
                masked = logits < torch.finfo(torch.float32).min / 4
                every.append(logits.masked_fill(masked, 0.0).transpose(0, 1).flatten(1))
        if every:
            found.setdefault(role.path, torch.cat(every, 1))

    wrong: list[str] = []
    watcher = AttentionWatcher(model, roles, see)
    try:
        stored = tuple(model.parameters())  # they are scaled, and put back bit for bit
        with quiet_run(model), torch.autograd._unsafe_preserve_version_counter(stored):
            call_model(model, batch)
            before = found.copy()
            for weight in weights:
                factors = 16.0 ** -(1.0 + torch.arange(weight.role.num_heads) % 2).double()
                kept = [(each, each.clone()) for part in weight.parts for each in part.scaled()]
                # Not in halves: the term |k|^2 of L2 attention would follow.
                for part, power in zip(weight.parts, (0.75, 0.25), strict=False):
                    uneven = part.powers.where(part.powers != 0.5, power)
                    replace(part, powers=uneven).scale_(factors)
                found.clear()
                try:
                    call_model(model, batch)
                finally:
                    for each, value in kept:
                        each.copy_(value)
                path = weight.role.path
                if path not in found or before[path].shape[0] != len(factors):
                    wrong.append(f"{weight.path}: no logits of {len(factors)} heads were seen")
                    continue
                expected = before[path] * factors.to(before[path])[:, None]
                off = (found[path] - expected).abs().amax(1)
                if bool((off > 1e-3 * expected.abs().amax(1)).any()):
                    said = "scaling rows of its heads does not scale its logits"
                    wrong.append(f"{weight.path}: {said}")
    finally:
        watcher.remove()
    if wrong:
        raise ConfigError(
            "constrain_: to='logits' holds softmax(s q k^T) with q and k linear in their weights; L2,"
            " cosine and capped attention, normalised queries or keys, biases of position and adapters"
            f" are none; leave these modules out with where=, or merge adapters first:\n{listed(wrong)}"
        )
    return weights
