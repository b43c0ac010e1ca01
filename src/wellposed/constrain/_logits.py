"""Attention logits held below a bound: after a step, rows of the queries and keys of a head are scaled
(QK-clip)."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wellposed.constrain._matrix import SETS, ConstrainedMatrix, MatrixSet
from wellposed.constrain._select import Candidate
from wellposed.errors import ConfigError, ConvergenceError, RoleNotFoundError, listed
from wellposed.linalg import Retraction, Workspace, cut_of, is_sharded
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

    def stored(self) -> Iterator[tuple[Tensor, int, int]]:
        """Yield what is scaled: the weight, and the bias where there is one; each with its dimension of
        outputs, and where in it the rows begin."""
        owner, attribute = self.view.owner, self.view.attribute
        yield self.view.parameter, int(self.view.transposed), 0
        bias, start = getattr(owner, "bias", None), 0
        if isinstance(owner, nn.MultiheadAttention):
            bias = owner.in_proj_bias
            start = _IN_PROJECTION.get(attribute, 0) * owner.embed_dim
        if isinstance(bias, Tensor):
            yield bias, 0, start


@dataclass(frozen=True, eq=False)
class ScaledParameter:
    """A parameter, and for each row that this process has of it the head whose factor it takes (one
    past the last if none), and to what power."""

    parameter: Tensor
    outputs: int
    """The dimension of its outputs."""
    heads: Tensor
    powers: Tensor

    @property
    def local(self) -> Tensor:
        """What this process has of the parameter, as (rows, inputs): a view."""
        values = self.parameter.detach()
        values = values.to_local() if is_sharded(values) else values
        return values[:, None] if values.ndim == 1 else values.mT if self.outputs else values


def scaled_parameters(parts: Sequence[HeadRows], num_heads: int) -> list[ScaledParameter]:
    """Return the parameters that rows of ``parts`` lie in, each once."""
    result: dict[int, ScaledParameter] = {}
    for part in parts:
        for parameter, outputs, start in part.stored():
            count = parameter.shape[outputs]
            fresh = torch.full((count,), num_heads), torch.zeros(count)
            each = ScaledParameter(parameter, outputs, *fresh)
            each = result.setdefault(id(parameter), each)
            each.heads[start + part.rows] = part.heads
            each.powers[start + part.rows] += part.powers
    return [_cut(each) for each in result.values()]


def _cut(scaled: ScaledParameter) -> ScaledParameter:
    """Return the parameter with the rows of it that this process has."""
    parameter: Any = scaled.parameter
    cut, placements = cut_of(parameter), getattr(parameter, "placements", ())
    if cut is None and not all(each.is_replicate() for each in placements):
        raise ConfigError(
            "constrain_: to='logits' scales rows of weights that are cut once, as by fully_shard; received"
            f" one that is placed as {placements}: leave it out with where=, or shard it on one mesh"
        )
    mine = slice(None)
    if cut is not None and cut.dim == scaled.outputs:
        mine = slice(*cut.span(len(scaled.heads), cut.rank))
    heads, powers = scaled.heads.to(parameter.device), scaled.powers.to(parameter.device)
    return replace(scaled, heads=heads[mine], powers=powers[mine])


Modules: TypeAlias = Sequence[Sequence[ScaledParameter]]


def places_of(modules: Modules, num_heads: int) -> tuple[Tensor, Tensor]:
    """Return the head among those of all modules, and the power, of every row that is scaled."""
    pairs = [(n * (num_heads + 1), each) for n, parts in enumerate(modules) for each in parts]
    device = pairs[0][1].parameter.device
    heads = torch.cat([start + each.heads.to(device) for start, each in pairs])
    return heads, torch.cat([each.powers.to(device) for _, each in pairs])


def scale_(modules: Modules, places: tuple[Tensor, Tensor], factors: Tensor) -> None:
    """Multiply rows by the factors (modules, heads) of their heads, to their powers."""
    scaled = [each for parts in modules for each in parts]
    columns = nn.functional.pad(factors, (0, 1), value=1.0).flatten()[places[0]] ** places[1]
    pieces = columns[:, None].split([len(each.heads) for each in scaled])
    torch._foreach_mul_([each.local for each in scaled], list(pieces))


class LateNumbers:
    """Numbers on their way from a device to the host, which need not wait for them."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers.to("cpu", non_blocking=True)
        self._arrival = None if numbers.device.type == "cpu" else torch.Event(numbers.device)
        if self._arrival is not None:
            self._arrival.record()

    @cached_property
    def values(self) -> list[float]:
        """The numbers."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._numbers.tolist()

    def __getstate__(self) -> dict[str, Any]:
        return {"values": self.values}


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

    def state(self, matrices: Sequence[HeldAttention], work: Workspace) -> None:
        """Raise if the logits or the weights of the step before were not finite."""
        del work
        broken: list[str] = []
        for each in matrices:
            late, each.late = each.late, None
            if late is not None and late[0].values[late[1]] == torch.inf:
                broken.append(each.path)
        if broken:
            raise ConvergenceError(
                "constrain_: the largest logit of these modules was not finite at the optimizer's last"
                " step, or that step was not, so none of their heads was scaled; look at the loss and"
                f" the gradients, clip them, or lower the learning rate:\n{listed(broken)}"
            )

    def retract(self, matrices: Sequence[HeldAttention], work: Workspace) -> Retraction:
        """Scale the heads whose largest logit would be above the bound after another such step."""
        del work
        size, first = self.size, matrices[0]
        if first.is_unseen:  # then all are, by their key
            return Retraction("unseen")
        none = torch.full((self.num_heads,), -torch.inf, device=first.parameter.device)
        seen = [none if each.largest is None else each.largest.to(none) for each in matrices]
        largest = torch.stack(seen)
        # A kernel's sums may hide a query that is not finite, and the step it leads to does not.
        norms = torch._foreach_norm([each.scaled[0].local for each in matrices])
        is_finite = (largest < torch.inf) & (torch.stack(norms) < torch.inf)[:, None]
        largest = largest.where(is_finite, torch.inf)
        _maximum_over_ranks_(largest, first.parameter)
        growth, was = torch.stack([each.note() for each in matrices]).tensor_split([1], 1)
        peaks = largest.amax(1, keepdim=True)
        is_finite = peaks < torch.inf
        is_near = (largest >= _NEAR * size) & is_finite & (was > 0.0)
        factors = (largest / was).clamp_max(_MOST).where(is_near, 1.0)
        growth = torch.maximum(growth.amax() * _MEMORY + (1.0 - _MEMORY), factors.amax())
        goal = size * growth**-_POWER
        factors = (goal / torch.maximum(largest, goal)).where(is_finite, 1.0)
        left = (largest * factors).where(is_finite, was)
        notes = torch.cat((growth.expand(len(left), 1), left), 1).unbind()
        peaks = peaks[:, 0]
        late = LateNumbers(peaks)
        for row, each in enumerate(matrices):
            each.largest, each.peak, each.late = None, peaks[row], (late, row)
            each.keep(notes[row])
        modules = [each.scaled for each in matrices]
        if first.places is None or first.places[0] != (modules, none.device):
            first.places = (modules, none.device), places_of(modules, self.num_heads)
        scale_(modules, first.places[1], factors)
        return Retraction("logits")


SETS.register("logits")(Logits)


class HeldAttention(ConstrainedMatrix):
    """One attention module: rows of its query and of its key, and the logits that were seen in it."""

    def __init__(
        self, role: AttentionRole, model: nn.Module, owners: Mapping[Any, Optimizer], bound: float
    ) -> None:
        self.role, self.module = role, model.get_submodule(role.path)
        self.parts = head_rows(role)
        self.scaled = scaled_parameters(self.parts, role.num_heads)
        chosen = Logits(bound, num_heads=role.num_heads)
        super().__init__(self.parts[0].place, owners[role.query.parameter], chosen)
        self.largest: Tensor | None = None
        """The largest logit of each head in the passes since the last step."""
        self.peak: Tensor | float = -torch.inf
        """The largest logit of all heads before the last step."""
        self.late: tuple[LateNumbers, int] | None = None
        """Until the next step, the numbers among which that comes to the host, and which it is."""
        self.path = role.path or type(model).__name__
        self.slices = [part.place for part in self.parts]
        self.entries = role.num_heads
        self.notes = (_NOTES,)
        self.places: tuple[Any, tuple[Tensor, Tensor]] | None = None
        """Of the modules that are scaled with this one as the first, `places_of` them."""

    @property
    def is_unseen(self) -> bool:
        """Whether it is known that no pass was seen since the last step: other processes may have one."""
        return self.largest is None and not _in_ranks()

    @property
    def batch_key(self) -> tuple[object, ...]:
        """Key of modules that are scaled together: they have as many heads, of any width."""
        mesh = getattr(self.parameter, "device_mesh", None)
        return self.set, self.parameter.device, mesh, self.is_unseen

    def error(self) -> float:
        """Return by what part the largest logit was above the bound before the last step's scaling."""
        return max(0.0, float(self.peak) / self.set.size - 1.0)

    def watch(self) -> list[Any]:
        """Watch the forward passes that have gradients."""
        role, wanted = replace(self.role, path=""), lambda _: torch.is_grad_enabled()
        return [AttentionWatcher(self.module, [role], self._see, wanted=wanted)]

    @torch.no_grad()
    def _see(self, _role: Any, calls: Sequence[tuple[AttentionCall, Tensor]]) -> None:
        for call, output in calls:
            largest = largest_logits(call, output, above=_NEAR * self.set.size).float()
            self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)

    def note(self) -> Tensor:
        """Return the largest factor by which a logit near the bound grew in one step, and the logit that
        each head was left with."""
        state, device = self.optimizer.state.get(self.parameter, {}), self.parameter.device
        saved = state.get(_NOTES)
        if saved is None:
            return nn.functional.pad(torch.ones(1, device=device), (0, self.entries))
        # Optimizers cast what they load to the dtype of the parameter; every one holds a byte.
        is_bytes = isinstance(saved, Tensor)
        saved = saved.to(torch.uint8).view(torch.float32) if is_bytes else torch.tensor(saved)
        return saved.to(device)

    def keep(self, note: Tensor) -> None:
        """Store what `note` is to return after the next pass."""
        # Other optimizers than SGD may mistake the note for their own initialised state.
        if self.optimizer.state.get(self.parameter) or type(self.optimizer) is torch.optim.SGD:
            self.optimizer.state[self.parameter][_NOTES] = note.view(torch.uint8)


def _in_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _maximum_over_ranks_(largest: Tensor, parameter: Tensor) -> None:
    """Take the maxima over the processes that a parameter is sharded over, or over all."""
    mesh = getattr(parameter, "device_mesh", None)
    groups = [None] if mesh is None else [mesh.get_group(each) for each in range(mesh.ndim)]
    for group in groups if _in_ranks() else ():
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)


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


def _call_sharded(model: nn.Module, batch: Any) -> None:
    """Call the model, and drop the whole weights that the outermost `fully_shard` keeps after it, as they
    would not follow their shards."""
    call_model(model, batch)
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    each: Any
    for each in model.modules():
        if isinstance(each, kind):
            each.reshard()


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
            _call_sharded(model, batch)
            before = found.copy()
            for weight in weights:
                heads = torch.arange(weight.entries, device=weight.parameter.device)
                factors = 16.0 ** -(1.0 + heads % 2)
                kept = [(each.local, each.local.clone()) for each in weight.scaled]
                # Not in halves: the term |k|^2 of L2 attention would follow.
                parts = [
                    replace(part, powers=part.powers.where(part.powers != 0.5, power))
                    for part, power in zip(weight.parts, (0.75, 0.25), strict=False)
                ]
                scaled = scaled_parameters(parts, len(factors))
                scale_([scaled], places_of([scaled], len(factors)), factors[None])
                found.clear()
                try:
                    _call_sharded(model, batch)
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
