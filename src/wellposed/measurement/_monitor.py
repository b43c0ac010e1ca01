"""Numbers to log while a model trains, and alarms, without an engine: one call per step, one flat
dictionary."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from wellposed.call_checks import checked_arguments
from wellposed.errors import ConfigError, unknown_name
from wellposed.measurement._condition import QUICK, StackedCondition
from wellposed.measurement._measure import identity
from wellposed.measurement._measurement import row_names
from wellposed.measurement._stacks import transferred
from wellposed.measurement._vitals import VitalSigns
from wellposed.options import Size
from wellposed.plan import Plan, counted_plan
from wellposed.roles import find_roles

LIMITS = {"logit_max": 50.0, "entropy": 0.1, "update": 0.1, "kurtosis": 20.0}
"""What a number may not exceed; the entropy may not fall below."""
_REASONS = {
    "logit_max": "attention logits this large leave one key all the weight, and grow on: lower the"
    " rate, warm up, or normalise queries and keys",
    "entropy": "a head that spread its attention now looks at one key: its logits have grown",
    "update": "one step moved a weight by more than a tenth of it: lower the rate, or warm up",
    "kurtosis": "a few activations are far larger than all others: low precision loses the rest",
    "finite": "the first module whose output held NaN, infinity or numbers whose square is infinite",
}
logger = logging.getLogger("wellposed.monitor")


def worst_vitals(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return the worst of each vital sign over heads, layers and weights, as ``vital/`` and its last
    name.

    >>> worst_vitals({"vital/encoder.0.head0/entropy": 0.5, "vital/encoder.0.head1/entropy": 0.9})
    {'vital/entropy': 0.5}
    """
    groups: dict[str, list[float]] = {}
    for name, value in numbers.items():
        groups.setdefault(f"vital/{name.rpartition('/')[2]}", []).append(value)
    worst = {name: min if name == "vital/entropy" else max for name in groups}
    return {name: worst[name](values) for name, values in groups.items()}


@dataclass(frozen=True)
class Alarm:
    """The number that is farthest beyond its limit at a step, how many others are beyond it, and
    what that means."""

    step: int
    name: str
    value: float
    limit: float
    others: int
    reason: str

    def __str__(self) -> str:
        number = "" if math.isnan(self.value) else f" is {self.value:.3g}, limit {self.limit:g}"
        others = f" (and {self.others} more)" if self.others else ""
        return f"step {self.step}: {self.name}{number}{others}: {self.reason}"


class Monitor:
    """Every k-th `step` gives the condition of every weight with a role, and the vital signs of the
    training step that it ends.

    Weights: ``cond/<stack>.<layer>.<role>/<number>``, as `measure` without
    spectra: both errors are exact to float32 rounding; ``sigma_max`` and ``stable_rank`` are
    empirical to 1 %, the first from below, by a few Lanczos steps for all weights at once from the
    last time's vectors. What ran since the last step, all
    micro-batches of it, forward passes with gradients alone: by head
    ``vital/<stack>.<layer>.head<h>/`` ``logit_max``, ``query_norm`` and ``key_norm``, the largest of
    all passes, and ``entropy``, the sum over all queries as a share of the sum of the logarithms of
    their open keys, on up to 64 queries of each sequence, never N x N; by layer
    ``vital/<stack>.<layer>/`` ``activation_max``, ``activation_rms``, ``kurtosis``, of the entries of
    all passes together; by weight that ``optimizer`` steps, ``vital/<stack>.<layer>.<role>/``
    ``grad_norm``, as the optimizer sees it, without the scale of a ``GradScaler``, and ``update``
    (the step's length over the weight's). A key is closed by a mask of False, -inf or -5,000 and
    less. The names are public; a number that does not exist is left out of that step, as are
    ``grad_norm`` and ``update`` of a step that a ``GradScaler`` skips.

    `alarms` lists, once for each time, a logit above 50, an entropy that fell below 0.1, an update
    above 0.1, a kurtosis above 20, and the first module whose output is not finite or has squares
    that are not; each is logged
    as a warning with its step, counted from 1; where a training goes on, set `steps` to those it
    has taken. Status: thresholds from practice (Kimi K2, 2025, clips logits at 100); an alarm
    proves nothing.

    Args:
        model: any model in which `find_roles` finds weights; hooks are put on it until `remove`.
        optimizer: what steps its weights; as Accelerate wraps it, too.
        every: measure the first step and every ``every``-th after it.
        batch: passed to `find_roles`.
        weights: the condition of the weights, too.
        vitals: what training steps show, too, for which hooks are put on the model.
        limits: other limits, such as ``{"logit_max": 100}``.
        dry_run: print what a measured step costs, keep it as ``plan`` (`wellposed.plan.Plan`), and
            put no hooks on. The weights may be on the meta device.

    Raises:
        RoleNotFoundError: no weight is recognised.
        ConfigError: ``every`` is not a positive whole number, an unknown limit, or an optimizer that
            runs no hooks, such as DeepSpeed's.
        ConvergenceError: from `step`, where weights hold NaN or infinity.

    Of a compiled model a step that is measured runs as it is written, not compiled: with hooks in it
    the graph would be compiled a second time. No graph is added or compiled anew.

    Under FSDP2 (after ``fully_shard``, on every process) each weight is put together on one process,
    which measures it: one exchange of weights and two all-reduces, of squared norms and of numbers,
    for each measured step. All processes get the same ``cond``, ``grad_norm`` and ``update``.
    Activations and logits are those of this process's batches, as under DDP. Weights that are cut
    along two dimensions (tensor parallel) are gathered for ``cond``; their ``grad_norm`` and
    ``update``, and those of adapters on shards, are left out and named once.

    Cost: two products a weight; fewer than 400 kernel launches for weights of up to two Gram sizes
    and 100 without ``weights``, at any depth of small models, and one transfer at the end of the step
    (``python -m benchmarks monitor``). Steps that are not measured have no hooks. A tensor that a
    later operation changes in place before the end of the forward pass is not measured, and named in
    a warning.

    >>> import torch
    >>> model = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    >>> monitor = Monitor(model, optimizer, every=2)
    >>> for _ in range(2):
    ...     model(torch.randn(2, 5, 16)).square().mean().backward()
    ...     optimizer.step()
    ...     numbers = monitor.step()
    ...     print(len(numbers), "vital/encoder.0.head3/logit_max" in numbers)
    55 True
    0 False
    >>> monitor.alarms
    []
    """

    @checked_arguments
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        every: Size = 100,
        *,
        batch: Any = None,
        weights: bool = True,
        vitals: bool = True,
        limits: Mapping[str, float] | None = None,
        dry_run: bool = False,
    ) -> None:
        for name in limits or {}:
            if name not in LIMITS:
                raise unknown_name("limit", name, LIMITS)
        self.every = every
        self.weights = weights
        self.limits = {**LIMITS, **(limits or {})}
        self.alarms: list[Alarm] = []
        model = getattr(model, "_orig_mod", model)
        roles = find_roles(model, batch)
        self._weights = list(roles.weights())
        self._condition = StackedCondition(self._weights)
        self.steps = 0
        self._beyond: set[str] = set()
        self._fine: set[str] = set()
        self._vitals = None
        if vitals and not dry_run:
            self._vitals = VitalSigns(model, roles, _hooked(optimizer), self.is_due)
            self._vitals.attach()
        self.plan: Plan | None = None
        if dry_run:
            note = f"one step of {every} is measured; vital signs are not planned"
            pairs = [(weight.role, weight.view) for weight in self._weights if weights]
            kinds = [(role, view.shape, view.parameter.dtype) for role, view in pairs]
            run = self._condition.measured if weights else list
            plan = counted_plan("Monitor", model, kinds, run, note)
            if shared := self._condition.groups:
                calls = Counter(plan.collectives) + Counter(all_reduce=shared)
                plan = replace(plan, collectives=dict(calls))
            self.plan = plan.show()

    def step(self) -> dict[str, float]:
        """Count one step; return the numbers when they are due, else an empty dictionary."""
        due = self.is_due()
        self.steps += 1
        shown = self._vitals.pending() if self._vitals and due else []
        condition = self._condition.measured() if self.weights and due else []
        numbers = transferred([*shown, *condition])
        seen = self._vitals.take(numbers[: len(shown)]) if self._vitals and due else ({}, None)
        vitals, broken = seen
        if self._vitals:
            self._vitals.attach() if self.is_due() else self._vitals.remove()
        if not due:
            return {}
        new: dict[str, dict[str, float]] = {"finite": {broken: math.nan}} if broken else {}
        for name, value in vitals.items():
            number = name.rpartition("/")[2]
            if self._is_beyond(name, value, self.limits.get(number)):
                new.setdefault(number, {})[name] = value
        for number, found in new.items():
            if not found.keys() <= self._beyond:
                worst = min if number == "entropy" else max
                name = worst(found, key=found.__getitem__)
                limit = self.limits.get(number, 0.0)
                others = len(found) - 1
                alarm = Alarm(self.steps, name, found[name], limit, others, _REASONS[number])
                self.alarms.append(alarm)
                logger.warning("%s", alarm)
        self._beyond = {name for found in new.values() for name in found}
        if not self.weights:
            return vitals
        rows = self._condition.rows(numbers[len(shown) :])
        pairs = zip(row_names([identity(weight) for weight in self._weights]), rows, strict=True)
        found = {f"cond/{name}/{n}": row[n] for name, row in pairs for n in QUICK}
        return {name: value for name, value in found.items() if value is not None} | vitals

    def remove(self) -> None:
        """Take the hooks off the model and the optimizer."""
        if self._vitals is not None:
            self._vitals.remove()
        self._vitals = None

    def is_due(self) -> bool:
        """Return whether the step under way is one that is measured."""
        return self.steps % self.every == 0

    def _is_beyond(self, name: str, value: float, limit: float | None) -> bool:
        if limit is None or math.isnan(value):
            return False
        if (value >= limit) if name.endswith("/entropy") else (value <= limit):
            self._fine.add(name)
            return False
        return not name.endswith("/entropy") or name in self._fine  # sharp from the start is fine


def _hooked(optimizer: Optimizer | None) -> Optimizer | None:
    """Return the optimizer that runs hooks, which Accelerate wraps in one that runs none."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    if optimizer is not None and not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        name = type(getattr(optimizer, "optimizer", optimizer)).__name__
        problem = f"Monitor: {name} runs no hooks around its step"
        raise ConfigError(f"{problem}; give a torch.optim.Optimizer, or none to leave out updates")
    return optimizer
