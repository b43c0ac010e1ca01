"""QK-clip: after a step, scale query and key rows of heads whose attention logits are too large."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wellposed.constrain._matrix import ConstrainedMatrix
from wellposed.constrain._select import WeightSlice
from wellposed.constrain._set import MatrixSet
from wellposed.constrain._wholes import Wholes
from wellposed.errors import (
    ConfigError,
    ConvergenceError,
    RoleNotFoundError,
    WellposedError,
    listed,
)
from wellposed.hooks import (
    AttentionCall,
    AttentionWatcher,
    largest_logits,
)
from wellposed.linalg import ErrorNorm, Retraction, Workspace, cut_of, is_sharded
from wellposed.roles import AttentionRole, Roles, WeightView

_IN_PROJECTION = {"q_proj_weight": 0, "k_proj_weight": 1}
# The largest growth in one step of a logit near the bound is remembered. It decays with each step;
# a power above 1 leaves room for a larger one.
_NEAR = 0.5
_MOST = 2.0
_MEMORY = 0.995
_POWER = 1.5
_NOTES = "wellposed_logits"
"""Key in the optimizer's state: the growth, and each head's last largest logit."""


@dataclass(frozen=True)
class HeadRows:
    """Rows of a parameter, the head of each, and the power of that head's factor it takes."""

    view: WeightView
    heads: Tensor
    rows: Tensor
    powers: Tensor

    @property
    def place(self) -> WeightSlice:
        """The parameter, for the checks that every constrained weight passes."""
        view = self.view
        parameter = self.view.parameter
        plain = parameter if isinstance(parameter, nn.Parameter) else None
        transposed = view.transposed
        return WeightSlice(
            view.owner_path, view.attribute, view.owner, plain, transposed=transposed
        )

    def stored(self) -> Iterator[tuple[Tensor, int, int]]:
        """Yield weight, and bias if there is one, with their output dimension and first row."""
        owner = self.view.owner
        attribute = self.view.attribute
        yield self.view.parameter, int(self.view.transposed), 0
        bias = getattr(owner, "bias", None)
        start = 0
        if isinstance(owner, nn.MultiheadAttention):
            bias = owner.in_proj_bias
            start = _IN_PROJECTION.get(attribute, 0) * owner.embed_dim
        if isinstance(bias, Tensor):
            yield bias, 0, start


@dataclass(frozen=True, eq=False)
class ScaledParameter:
    """A parameter; for each local row its head (one past the last if none) and power."""

    parameter: Tensor
    outputs: int
    """The dimension of its outputs."""
    heads: Tensor
    powers: Tensor

    @property
    def local(self) -> Tensor:
        """This process's part of the parameter, as (rows, inputs): a view."""
        values = self.parameter.detach()
        values = values.to_local() if is_sharded(values) else values
        return values[:, None] if values.ndim == 1 else values.mT if self.outputs else values


def scaled_parameters(parts: Sequence[HeadRows], num_heads: int) -> list[ScaledParameter]:
    """Return the parameters of all ``parts``, each once."""
    result: dict[int, ScaledParameter] = {}
    for part in parts:
        for parameter, outputs, start in part.stored():
            count = parameter.shape[outputs]
            fresh = torch.full((count,), num_heads), torch.zeros(count)
            scaled = ScaledParameter(parameter, outputs, *fresh)
            scaled = result.setdefault(id(parameter), scaled)
            scaled.heads[start + part.rows] = part.heads
            scaled.powers[start + part.rows] += part.powers
    return [_cut(scaled) for scaled in result.values()]


def _cut(scaled: ScaledParameter) -> ScaledParameter:
    """Restrict the rows of a parameter to those of this process."""
    parameter: Any = scaled.parameter
    cut = cut_of(parameter)
    placements = getattr(parameter, "placements", ())
    if cut is None and not all(placement.is_replicate() for placement in placements):
        raise ConfigError(
            "constrain_: to='logits' scales rows of weights that are cut once, as by fully_shard;"
            f" received placements {placements}. Leave it out with where=, or shard it on one mesh"
        )
    mine = slice(None)
    if cut is not None and cut.dim == scaled.outputs:
        mine = slice(*cut.span(len(scaled.heads), cut.rank))
    heads = scaled.heads.to(parameter.device)
    powers = scaled.powers.to(parameter.device)
    return replace(scaled, heads=heads[mine], powers=powers[mine])


Modules: TypeAlias = Sequence[Sequence[ScaledParameter]]


def places_of(modules: Modules, num_heads: int) -> tuple[Tensor, Tensor]:
    """Return the head, counted over all modules, and the power of every scaled row."""
    pairs = [(n * (num_heads + 1), part) for n, parts in enumerate(modules) for part in parts]
    device = pairs[0][1].parameter.device
    heads = torch.cat([start + part.heads.to(device) for start, part in pairs])
    return heads, torch.cat([part.powers.to(device) for _, part in pairs])


def scale_(modules: Modules, rows: tuple[Tensor, Tensor], factors: Tensor) -> None:
    """Multiply rows by the factors (modules, heads) of their heads, to their powers."""
    scaled = [part for parts in modules for part in parts]
    heads, powers = rows
    columns = nn.functional.pad(factors, (0, 1), value=1.0).flatten()[heads] ** powers
    pieces = columns[:, None].split([len(part.heads) for part in scaled])
    torch._foreach_mul_([part.local for part in scaled], list(pieces))


class LateNumbers:
    """Numbers on their way from a device to the host, which does not wait for them."""

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
    """Queries and keys for which no logit of a head was above ``size`` in the passes seen."""

    num_heads: int = 1
    decays = True
    is_oriented = False
    default_where = "query"

    def error(self, matrix: Tensor) -> float:
        """Return 0: only passes show logits, see `HeldAttention.error`."""
        del matrix
        return 0.0

    def nearest(self, matrix: Tensor) -> Tensor:
        """Return the matrix unchanged: only passes show which heads to scale."""
        return matrix

    def state(self, matrices: Sequence[HeldAttention], work: Workspace) -> None:
        """Raise if the logits or the weights of the last step were not finite."""
        del work
        broken: list[str] = []
        for module in matrices:
            late = module.late
            module.late = None
            if late is not None and late[0].values[late[1]] == torch.inf:
                broken.append(module.path)
        if broken:
            raise ConvergenceError(
                "constrain_: the largest logit of these modules, or the optimizer's last step, was not"
                " finite, so none of their heads was scaled. Check the loss and the gradients, clip"
                f" them, or lower the learning rate:\n{listed(broken)}"
            )

    def retract(self, matrices: Sequence[HeldAttention], work: Workspace) -> Retraction:
        """Scale heads whose largest logit would be above the bound after another such step."""
        del work
        size = self.size
        first = matrices[0]
        if first.is_unseen:  # then all are, by their batch_key
            return Retraction("unseen")
        none = torch.full((self.num_heads,), -torch.inf, device=first.parameter.device)
        rows = [none if m.largest is None else m.largest.to(none) for m in matrices]
        largest = torch.stack(rows)
        # A kernel's sums may hide a query that is not finite; the weights after the step show it.
        norms = torch._foreach_norm([module.scaled[0].local for module in matrices])
        is_finite = (largest < torch.inf) & (torch.stack(norms) < torch.inf)[:, None]
        largest = largest.where(is_finite, torch.inf)
        _maximum_over_ranks_(largest, first.parameter)
        growth, was = torch.stack([module.note() for module in matrices]).tensor_split([1], 1)
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
        for row, module in enumerate(matrices):
            module.largest = None
            module.peak = peaks[row]
            module.late = (late, row)
            module.keep(notes[row])
        modules = [module.scaled for module in matrices]
        if first.places is None or first.places[0] != (modules, none.device):
            first.places = (modules, none.device), places_of(modules, self.num_heads)
        scale_(modules, first.places[1], factors)
        return Retraction("logits")


class HeldAttention(ConstrainedMatrix):
    """One attention module: rows of its query and key, and the largest logits seen in it."""

    def __init__(
        self, role: AttentionRole, model: nn.Module, owners: Mapping[Any, Optimizer], bound: float
    ) -> None:
        self.role = role
        self.module = model.get_submodule(role.path)
        self.parts = head_rows(role)
        self.scaled = scaled_parameters(self.parts, role.num_heads)
        chosen = Logits(bound, num_heads=role.num_heads)
        super().__init__(self.parts[0].place, owners[role.query.parameter], chosen)
        self.largest: Tensor | None = None
        """The largest logit of each head in the passes since the last step."""
        self.peak: Tensor | float = -torch.inf
        """The largest logit of all heads before the last step."""
        self.late: tuple[LateNumbers, int] | None = None
        """Until the next step: the numbers on their way to the host, and the index of `peak`."""
        self.path = role.path or type(model).__name__
        self.slices = [part.place for part in self.parts]
        self.entries = role.num_heads
        self.notes = (_NOTES,)
        self.places: tuple[Any, tuple[Tensor, Tensor]] | None = None
        """`places_of` the modules that are scaled with this one first."""

    @property
    def is_unseen(self) -> bool:
        """Whether no pass was seen since the last step; False if other processes may have one."""
        return self.largest is None and not _in_ranks()

    @property
    def batch_key(self) -> tuple[object, ...]:
        """Key of modules that are scaled together: equal number of heads, of any width."""
        mesh = getattr(self.parameter, "device_mesh", None)
        return self.set, self.parameter.device, mesh, self.is_unseen

    def error(self, wholes: Wholes | None = None, *, norm: ErrorNorm = "max") -> float:
        """Return by what part the largest logit was above the bound before the last scaling."""
        del wholes
        if norm != "max":
            return self.set.spectral_error(self.parameter)
        return max(0.0, float(self.peak) / self.set.size - 1.0)

    def stepped(self) -> list[Tensor]:
        """Return the local parts of all parameters whose rows are scaled."""
        return [part.local for part in self.scaled]

    def watch(self, handles: list[Any]) -> None:
        """Watch the forward passes that have gradients."""
        role = replace(self.role, path="")
        # In one line, so that no interrupt comes between the two.
        handles.append(AttentionWatcher(self.module, [role], self._see, wanted=_with_gradients))

    @torch.no_grad()
    def _see(self, _role: Any, calls: Sequence[tuple[AttentionCall, Tensor]]) -> None:
        for call, output in calls:
            largest = largest_logits(call, output, above=_NEAR * self.set.size).float()
            self.largest = largest if self.largest is None else torch.maximum(self.largest, largest)

    def note(self) -> Tensor:
        """Return the largest growth of a logit near the bound, and each head's last logit."""
        state = self.optimizer.state.get(self.parameter, {})
        device = self.parameter.device
        saved = state.get(_NOTES)
        if saved is None:
            return nn.functional.pad(torch.ones(1, device=device), (0, self.entries))
        # Optimizers cast loaded state to the dtype of the parameter; all dtypes represent bytes.
        is_bytes = isinstance(saved, Tensor)
        saved = saved.to(torch.uint8).view(torch.float32) if is_bytes else torch.tensor(saved)
        return saved.to(device)

    def keep(self, note: Tensor) -> None:
        """Store the next result of `note`."""
        # Other optimizers than SGD may mistake the note for their own initialised state.
        if self.optimizer.state.get(self.parameter) or type(self.optimizer) is torch.optim.SGD:
            self.optimizer.state[self.parameter][_NOTES] = note.view(torch.uint8)


def _with_gradients(_: AttentionRole) -> bool:
    return torch.is_grad_enabled()


def _in_ranks() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _maximum_over_ranks_(largest: Tensor, parameter: Tensor) -> None:
    """Take the maxima over the processes of a sharded parameter, or over all."""
    mesh = getattr(parameter, "device_mesh", None)
    groups = [None] if mesh is None else [mesh.get_group(dim) for dim in range(mesh.ndim)]
    for group in groups if _in_ranks() else ():
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group=group)


def check_not_compiled(model: nn.Module) -> None:
    """Raise `ConfigError` for a compiled model, in which hooks do not see the logits."""
    kind = torch._dynamo.eval_frame.OptimizedModule
    for module in model.modules():
        if isinstance(module, kind) or getattr(module, "_compiled_call_impl", None):
            raise ConfigError(
                "constrain_: to='logits' uses hooks, which a compiled model does not run; leave"
                " torch.compile out, or use to='spectral'"
            )


def attention_of(
    model_roles: Roles | WellposedError, chosen: Collection[WeightSlice]
) -> list[AttentionRole]:
    """Return the attention modules with a chosen query or key; raise if heads are not known."""
    if isinstance(model_roles, WellposedError):
        raise model_roles
    asked = {id(part.parameter) for part in chosen}
    roles = model_roles.attention
    roles = [r for r in roles if {id(r.query.parameter), id(r.key.parameter)} & asked]
    if not roles:
        raise RoleNotFoundError(
            "constrain_: to='logits' needs a query or key of attention, and none of these weights is"
            f" one; leave where= out for all queries:\n{listed([part.label for part in chosen])}"
        )
    known = [
        r
        for r in roles
        if {"query", "key"} <= {*r.heads} and "query" not in dict(r.extra_projections)
    ]
    unknown = [role.path for role in roles if role not in known]
    if unknown:
        raise ConfigError(
            "constrain_: to='logits' scales rows by head, and the rows of these heads are unknown, or"
            f" several weights make a query:\n{listed(unknown)}"
        )
    return roles


def head_rows(role: AttentionRole) -> list[HeadRows]:
    """Return the rows of query and key, with powers that add up to 1 for each product.

    A key that several heads read is not scaled (grouped-query attention, the rotary key of latent
    attention); the query rows that meet it take the whole factor.
    """
    grouped = len(role.heads["key"]) != len(role.heads["query"])
    result: list[HeadRows] = []
    for name in ("query",) if grouped else ("query", "key"):
        heads = []
        rows = []
        powers = []
        for head, spans in enumerate(role.heads[name]):
            indices = [row for span in spans for row in range(*span)]
            half = 0 if grouped else len(indices)
            if "key" in dict(role.extra_projections) and not grouped:
                half = sum(stop - start for start, stop in role.heads["key"][head])
            rows += indices
            heads += [head] * len(indices)
            powers += [0.5] * half + [1.0] * (len(indices) - half)
        result.append(HeadRows(getattr(role, name), *map(torch.tensor, (heads, rows, powers))))
    return result
