"""Numbers and alarms to log while a model trains, in any loop: one call a step."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from torch import Tensor, nn
from torch.optim import Optimizer

from wellposed import hooks
from wellposed.call_checks import checked_arguments
from wellposed.errors import ConfigError, unknown_name
from wellposed.measurement._condition import QUICK, StackedCondition
from wellposed.measurement._history import History
from wellposed.measurement._measure import identity
from wellposed.measurement._measurement import row_names
from wellposed.measurement._stacks import transferred
from wellposed.measurement._vitals import VitalSigns
from wellposed.options import Size
from wellposed.plan import Plan, counted_plan
from wellposed.roles import CallWatch, Verb, find_roles_for
from wellposed.trackers import TrackerLog
from wellposed.zero_weights import check_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LIMITS = {"logit_max": 50.0, "entropy": 0.1, "update": 0.1, "kurtosis": 20.0}
"""Upper limits of the numbers; the entropy has a lower limit."""
_REASONS = {
    "logit_max": "attention logits this large give one key all the weight, and keep growing: lower"
    " the rate, warm up, or normalise queries and keys",
    "entropy": "a head that spread its attention now looks at one key: its logits have grown",
    "update": "one step moved a weight by more than a tenth of it: lower the rate, or warm up",
    "kurtosis": "a few activations are far larger than all others: low precision loses the rest",
    "finite": "the first module whose output held NaN, infinity or numbers whose square is infinite",
}
logger = logging.getLogger("wellposed.monitor")


def worst_vitals(numbers: Mapping[str, float]) -> dict[str, float]:
    """Return the worst of each vital sign over heads, layers and weights, as ``vital/<number>``.

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
    """The number farthest beyond its limit at a step, how many others are, and what it means."""

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
    """Measure all weights with a role and the vital signs of a training, at every k-th `step`.

    - ``cond/<stack>.<layer>.<role>/<number>``: as `measure` without spectra. Both errors are exact
      to float32 rounding; ``sigma_max``, from below, and ``stable_rank`` are empirical to 1 %.
    - ``vital/<stack>.<layer>.head<h>/``: ``logit_max``, ``query_norm``, ``key_norm``, and
      ``entropy`` as a share of the largest possible, on up to 64 queries a sequence, never N x N.
    - ``vital/<stack>.<layer>/``: ``activation_max``, ``activation_rms``, ``kurtosis``.
    - ``vital/<stack>.<layer>.<role>/``: ``grad_norm``, without the scale of a ``GradScaler``, and
      ``update``, the length of the optimizer's step over that of the weight.

    Vital signs cover all forward passes with gradients since the last step; docs/howto/monitor.md
    defines them. The names are public. A number that does not exist is left out. `alarms` lists,
    once for each time, a logit above 50, an entropy that fell below 0.1, an update above 0.1 and a
    kurtosis above 20. It also lists the first module whose output or its square is not finite.
    Each is logged as a warning with its step, counted from 1; in a resumed run set `steps`.

    Status: thresholds from practice (Kimi K2, 2025, clips logits at 100); an alarm proves nothing.

    Args:
        model: any model in which `find_roles` finds weights; it has hooks until `remove`.
        optimizer: the optimizer of its weights, plain or wrapped by Accelerate.
        every: measure the first step and every ``every``-th after it.
        batch: as in `find_roles`.
        where: as in `find_roles`.
        weights: measure the condition of the weights.
        vitals: measure vital signs, with hooks.
        softmax_sensitivity: also measure, for each head, the mean of ``p1 (1 - p1 + p2)``, a bound on
            the norm of the softmax Jacobian, over queries that see two keys or more.
        limits: other limits, such as ``{"logit_max": 100}``.
        log_to: tracker, or list of trackers, that gets the numbers of each measured step, at its
            step: ``wandb``, ``mlflow``, a SummaryWriter, a Trainer, a logger of Lightning, a
            function of (numbers, step) (docs/howto/track.md).
        dry_run: print what a measured step costs, keep it as ``plan`` (`wellposed.plan.Plan`), and
            add no hooks. Weights may be on the meta device.

    Raises:
        RoleNotFoundError: no weight is recognised.
        ConfigError: a bad ``every``, an unknown limit or tracker, or an optimizer without hooks.
        ConvergenceError: from `step`, if weights hold NaN or infinity.

    DeepSpeed's ZeRO-1 and 2 leave out ``grad_norm`` and ``update``; ZeRO-3 is refused.

    Under FSDP2 make it on every process after ``fully_shard``: one exchange of weights and two
    all-reduces a measured step. docs/howto/monitor.md lists what is read of shards and of DDP.

    Cost: two products a weight, fewer than 400 kernel launches for up to two Gram sizes (100
    without ``weights``) at any depth of small models, one transfer (``python -m benchmarks
    monitor``). Other steps have no hooks. A compiled model runs uncompiled in a measured step.
    When not to use: for tensors changed in place in the forward pass; a warning names them.

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

    _verb: ClassVar[Verb] = Verb.by_role("Monitor", "model, optimizer")

    @checked_arguments
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        every: Size = 100,
        *,
        batch: Any = None,
        where: Mapping[str, str | Sequence[str]] | None = None,
        weights: bool = True,
        vitals: bool = True,
        softmax_sensitivity: bool = False,
        limits: Mapping[str, float] | None = None,
        log_to: Any = None,
        dry_run: bool = False,
    ) -> None:
        self._log = TrackerLog(log_to, self._verb.name, "monitor/step")
        self._history = History()
        for name in limits or {}:
            if name not in LIMITS:
                raise unknown_name("limit", name, LIMITS)

        self.every = every
        self.weights = weights
        self.limits = {**LIMITS, **(limits or {})}
        self.alarms: list[Alarm] = []
        model = getattr(model, "_orig_mod", model)
        self._model = model
        roles = find_roles_for(self._verb, model, batch, where=where)
        self._weights = list(roles.weights())
        views = [weight.view for weight in self._weights]
        for line in dict.fromkeys(view.deviation for view in views if view.deviation):
            self._say_deviation(line)

        self._calls = CallWatch(model, (view for view in views if not view.is_computed))
        self._deviating: set[str] = set()
        self._condition = StackedCondition(self._weights)
        self.steps = 0
        self._beyond: set[str] = set()
        self._fine: set[str] = set()
        self._vitals = None

        if vitals and not dry_run:
            due = hooks.WhileAlive(self.is_due)
            self._vitals = VitalSigns(
                model, roles, _hooked(optimizer), due, sensitivity=softmax_sensitivity
            )
            hooks.end_with(self, self._vitals.remove)
            self._vitals.attach()

        self.plan: Plan | None = None
        if dry_run:
            note = f"one step of {every} is measured; vital signs are not planned"
            pairs = [(weight.role, weight.view) for weight in self._weights if weights]
            kinds = [(role, view.shape, view.parameter.dtype) for role, view in pairs]
            run = self._condition.measured if weights else list
            plan = counted_plan("Monitor", model, kinds, run, note)
            shared = self._condition.groups
            if shared:
                calls = Counter(plan.collectives) + Counter(all_reduce=shared)
                plan = replace(plan, collectives=dict(calls))
            self.plan = plan.show()

    def step(self) -> dict[str, float]:
        """Count one step; return the numbers when they are due, else an empty dictionary."""
        due = self.is_due()
        if due:
            check_whole(self._verb.name, self._model)

        self.steps += 1
        signs = self._vitals.pending() if self._vitals and due else []
        for line in set(self._calls.changes() if due else ()) - self._deviating:
            self._deviating.add(line)
            self._say_deviation(line)

        condition = self._condition.measured() if self.weights and due else []
        numbers = transferred([*signs, *condition])
        taken = self._vitals.take(numbers[: len(signs)]) if self._vitals and due else ({}, None)
        vitals, broken = taken
        if self._vitals:
            self._vitals.attach() if self.is_due() else self._vitals.remove()
        if not due:
            return {}

        new: dict[str, dict[str, float]] = {"finite": {broken: math.nan}} if broken else {}
        for name, value in vitals.items():
            number = name.rpartition("/")[2]
            if self._is_beyond(name, value, self.limits.get(number)):
                new.setdefault(number, {})[name] = value

        for number, values in new.items():
            if not values.keys() <= self._beyond:
                worst = min if number == "entropy" else max
                name = worst(values, key=values.__getitem__)
                limit = self.limits.get(number, 0.0)
                others = len(values) - 1
                alarm = Alarm(self.steps, name, values[name], limit, others, _REASONS[number])
                self.alarms.append(alarm)
                logger.warning("%s", alarm)

        self._beyond = {name for values in new.values() for name in values}
        measured = self._with_condition(vitals, numbers[len(signs) :])
        self._keep(measured)
        self._log.write(measured, self.steps)
        return measured

    def _keep(self, measured: Mapping[str, float]) -> None:
        was_thinned = self._history.is_thinned
        self._history.add(self.steps, measured)
        if self._history.is_thinned and not was_thinned:
            logger.warning(
                "Monitor: history() and plot() have every second of the older steps from here on, to"
                " bound their memory; a tracker (log_to) gets all"
            )

    def _with_condition(
        self, vitals: dict[str, float], numbers: Sequence[Tensor]
    ) -> dict[str, float]:
        """Return the numbers of the weights, then the vital signs."""
        if not self.weights:
            return vitals
        rows = self._condition.rows(numbers)
        pairs = zip(row_names([identity(weight) for weight in self._weights]), rows, strict=True)
        cond = {f"cond/{name}/{n}": row[n] for name, row in pairs for n in QUICK}
        return {name: value for name, value in cond.items() if value is not None} | vitals

    def history(self) -> list[dict[str, float]]:
        """Return the numbers of every measured step, with its ``"step"``; 8 bytes a number.

        Above 8 million numbers every second step is dropped, time and again, as a warning says once;
        ``log_to`` gets all.
        """
        return self._history.rows()

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw all measured steps: norms, conditioning, logits, entropy, updates, activations.

        A curve is a role and layer, or the worst head of a layer; dashed lines are limits of alarms.
        In a notebook the result is shown if it is the last line of a cell.

        Args:
            path: an .svg or .png file to write as well.

        Raises:
            ConfigError: nothing was measured yet, matplotlib is not installed, another suffix.
        """
        from wellposed.measurement._panels import monitor_figure

        return monitor_figure(self.history(), self.limits, None if path is None else Path(path))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _say_deviation(self, line: str) -> None:
        logger.warning("%s: its layer computes something else than the weight", line)

    def remove(self) -> None:
        """Take the hooks off the model and the optimizer; a deleted monitor does so, too."""
        if self._vitals is not None:
            self._vitals.remove()
        self._vitals = None

    def is_due(self) -> bool:
        """Return whether the current step is measured."""
        return self.steps % self.every == 0

    def _is_beyond(self, name: str, value: float, limit: float | None) -> bool:
        if limit is None or math.isnan(value):
            return False
        if (value >= limit) if name.endswith("/entropy") else (value <= limit):
            self._fine.add(name)
            return False
        return not name.endswith("/entropy") or name in self._fine  # sharp from the start is fine


def _hooked(optimizer: Optimizer | None) -> Optimizer | None:
    """Return the optimizer that runs hooks, unwrapping those of Accelerate and DeepSpeed."""
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        if not isinstance(inner, Optimizer) and hasattr(optimizer, "_optimizer_step_pre_hooks"):
            break
        optimizer = inner
    if optimizer is not None and not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        name = type(optimizer).__name__
        problem = f"Monitor: {name} runs no hooks around its step"
        raise ConfigError(f"{problem}; give a torch.optim.Optimizer, or none to leave out updates")
    return optimizer
