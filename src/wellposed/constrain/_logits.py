"""Attention logits held below a bound: after a step, rows of the queries and keys of a head are scaled
(QK-clip)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from wellposed.constrain._select import Candidate
from wellposed.constrain._weight import Weight
from wellposed.errors import ConfigError, ConvergenceError, RoleNotFoundError, listed
from wellposed.linalg import Retraction, Workspace
from wellposed.roles import AttentionRole, WeightView, find_roles, own_batch
from wellposed.watch import (
    AttentionCall,
    AttentionWatcher,
    MultiheadCall,
    call_model,
    largest_logits,
    quiet_run,
)

_IN_PROJECTION = {"q_proj_weight": 0, "k_proj_weight": 1}


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
        return Candidate(view.owner_path, view.attribute, view.owner, plain, None, view.transposed)

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
        factors = factors[self.heads] ** self.powers
        rows, factors = self.rows[factors != 1], factors[factors != 1, None]
        for each in self.scaled():
            own = each[rows.to(each.device)]
            wide = torch.promote_types(own.dtype, torch.float32)
            each[rows.to(each.device)] = (own.to(wide) * factors.to(own.device, wide)).to(own.dtype)


class HeadLogits(Weight):
    """The largest logit of each head of one attention module, at most ``gain`` on what it saw."""

    decays = True

    def __init__(
        self, role: AttentionRole, module: nn.Module, optimizer: Optimizer, bound: float
    ) -> None:
        self.role, self.module = role, module
        self.parts = tuple(_parts(role))
        super().__init__(self.parts[0].place, optimizer, bound)
        self.path = role.path or type(module).__name__
        self.held = tuple((part.view.parameter, None) for part in self.parts)
        self._seen: Tensor | None = None
        self._excess = 0.0

    @property
    def batch_key(self) -> None:
        """Each module is worked on by itself."""

    def error_of(self, matrix: Tensor) -> float:
        """Return by what part the largest logit was above the bound before the last step's scaling."""
        del matrix
        return self._excess

    def hooks(self) -> list[Any]:
        """Watch the forward passes that have gradients."""
        role = replace(self.role, path="")
        return [
            AttentionWatcher(
                self.module, [role], self._see, wanted=lambda _: torch.is_grad_enabled()
            )
        ]

    @torch.no_grad()
    def _see(self, _role: Any, calls: Sequence[tuple[AttentionCall, Tensor]]) -> None:
        for call, output in calls:
            found = largest_logits(call, output, above=self.gain)
            self._seen = found if self._seen is None else torch.maximum(self._seen, found)

    @classmethod
    def retract_(cls, weights: Sequence[Self], _work: Workspace, /) -> Retraction:
        """Scale the heads whose largest logit since the last step was above the bound."""
        (weight,) = weights
        largest, weight._seen = weight._seen, None
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            if largest is None:
                largest = weight.parameter.new_full((weight.role.num_heads,), -torch.inf).float()
            torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
        if largest is None:
            return Retraction("unseen")
        largest = largest.double().cpu()
        if not bool((largest < torch.inf).all()):
            raise ConvergenceError(f"its largest logit is {float(largest.amax())}")
        weight._excess = max(0.0, float(largest.amax()) / weight.gain - 1.0)
        if weight._excess:
            for part in weight.parts:
                part.scale_(weight.gain / largest.clamp_min(weight.gain))
        return Retraction("logits")


def head_logits(
    model: nn.Module, chosen: Collection[Candidate], batch: Any
) -> list[tuple[AttentionRole, list[HeadRows]]]:
    """Return the attention modules of which a query or key is chosen, and the rows that are scaled.

    Raises:
        RoleNotFoundError: none is a query or key of attention. ConfigError: heads are not known.
    """
    asked = {id(place.parameter) for place in chosen}
    roles = [
        role
        for role in find_roles(model, batch).attention
        if {id(role.query.parameter), id(role.key.parameter)} & asked
    ]
    if not roles:
        raise RoleNotFoundError(
            "constrain_: to='logits' holds the logits of attention modules, and none of these weights"
            f" is a query or key of one:\n{listed([place.label for place in chosen])}"
        )
    unknown = [role.path for role in roles if any(name == "query" for name, _ in role.further)]
    unknown += [role.path for role in roles if not {"query", "key"} <= set(role.heads)]
    if unknown:
        raise ConfigError(
            "constrain_: to='logits' scales rows by head, and in these modules which rows a head has"
            f" is not known, or more than one weight makes its query:\n{listed(unknown)}"
        )
    return [(role, list(_parts(role))) for role in roles]


def _parts(role: AttentionRole) -> Iterator[HeadRows]:
    """Yield the rows of the query and of the key, with powers that add up to 1 for each product.

    A key that several heads read, as all of grouped-query attention and the rotary one of latent
    attention, is left alone, and what of the query it is multiplied with takes the whole factor.
    """
    shared = any(name == "key" for name, _ in role.further)
    grouped = len(role.heads["key"]) != len(role.heads["query"])
    for name in ("query", "key"):
        if name == "key" and grouped:
            return
        heads, rows, powers = [], [], []
        for head, spans in enumerate(role.heads[name]):
            own = [row for start, stop in spans for row in range(start, stop)]
            half = 0 if grouped else len(own)
            if name == "query" and shared and not grouped:
                half = sum(stop - start for start, stop in role.heads["key"][head])
            rows += own
            heads += [head] * len(own)
            powers += [0.5] * half + [1.0] * (len(own) - half)
        view = getattr(role, name)
        yield HeadRows(view, *map(torch.tensor, (heads, rows, powers)))


def check_scaling(model: nn.Module, weights: Sequence[HeadLogits], batch: Any) -> None:
    """Scale the heads of each module by 1/16 and 1/256 in turn and see that its logits follow; the
    weights are put back.

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
    wrong: list[str] = []
    with quiet_run(model):
        before = _logits(model, weights, batch)
        for weight in weights:
            factors = 16.0 ** -(1.0 + torch.arange(weight.role.num_heads, dtype=torch.float64) % 2)
            kept = [(each, each.clone()) for part in weight.parts for each in part.scaled()]
            try:
                # Not in halves: the term |k|^2 of L2 attention would follow.
                for part, power in zip(weight.parts, (0.75, 0.25), strict=False):
                    uneven = part.powers.where(part.powers != 0.5, power)
                    replace(part, powers=uneven).scale_(factors)
                after = _logits(model, [weight], batch).get(weight.role.path)
            finally:
                for each, value in kept:
                    each.copy_(value)
            own = before.get(weight.role.path)
            if own is None or after is None or own.shape[1] != len(factors):
                wrong.append(f"{weight.path}: no logits of {len(factors)} heads were seen")
                continue
            expected = own * factors.to(own)[:, None, None]
            worst, largest = ((each).abs().amax((0, 2, 3)) for each in (after - expected, expected))
            if not bool((worst <= 1e-3 * largest).all()):
                wrong.append(
                    f"{weight.path}: scaling the rows of its heads does not scale its logits"
                )
    if wrong:
        raise ConfigError(
            "constrain_: to='logits' holds softmax(s q k^T) with q and k linear in their weights; L2,"
            " cosine and capped attention, normalised queries or keys, biases of position and adapters"
            f" are none; leave these modules out with where=, or merge adapters first:\n{listed(wrong)}"
        )


def _logits(model: nn.Module, weights: Sequence[HeadLogits], batch: Any) -> dict[str, Tensor]:
    """Return the logits of the first call of each module, with 0 where a key is masked."""
    found: dict[str, Tensor] = {}

    def see(role: AttentionRole, calls: Sequence[tuple[AttentionCall, Tensor]]) -> None:
        for call, _ in calls[:1]:
            if isinstance(call, MultiheadCall) and not call.readable:
                continue
            logits = call.logits().double()
            masked = logits < torch.finfo(torch.float32).min / 4
            found.setdefault(role.path, logits.masked_fill(masked, 0.0))

    watcher = AttentionWatcher(model, [weight.role for weight in weights], see)
    try:
        call_model(model, batch)
    finally:
        watcher.remove()
    return found
