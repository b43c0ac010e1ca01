"""The handle of constrained matrices: each step is prepared, and its result retracted."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from wellposed.constrain._batches import batches_of
from wellposed.constrain._copies import copy_before, copy_for_undo
from wellposed.constrain._handle import Constraint
from wellposed.constrain._matrix import ConstrainedMatrix
from wellposed.constrain._shares import Outcome, assign_owners, finish, prepare
from wellposed.constrain._step_checks import check_dtypes
from wellposed.constrain._trial import reads_weight_size
from wellposed.errors import ConfigError, ConvergenceError, listed
from wellposed.linalg import (
    QUADRATIC_LIMIT,
    Retraction,
    Workspace,
    full_precision,
    is_sharded,
)

logger = logging.getLogger(__name__)
# Entries of results that wait for one read.
_WAITING = 2**27


class MatrixConstraint(Constraint):
    """Keeps matrices in their sets."""

    def __init__(
        self, model: nn.Module, weights: Iterable[ConstrainedMatrix], *, batched: bool | None
    ) -> None:
        super().__init__(model, weights)
        self._is_sharded = any(is_sharded(weight.parameter) for weight in self.weights)
        if self._is_sharded:
            assign_owners(self.weights)
        self.batched = batched
        """As ``batched=`` of `constrain_`; it may change between steps."""
        self._work = Workspace()
        self._grouped: list[list[ConstrainedMatrix]] = []
        """The batches whose gradients were put into coordinates, until their retraction."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the buffers of one step as well."""
        return {**super().__getstate__(), "_work": Workspace(), "_grouped": []}

    @torch.no_grad()
    def _prepare(self, optimizer: Optimizer) -> None:
        ready = self._weights_of_step(optimizer)
        decay = self.check_decay([optimizer])
        self._check_weights(ready)
        check_dtypes(ready)
        restarted = self._claim(optimizer, ready)

        with full_precision(*{weight.parameter.device.type for weight in ready}):
            self._steer(ready)
        for weight in ready:
            weight.remember(decayed=decay.get(id(weight.parameter), 0) != 0)
        copy_for_undo([weight for weight in ready if not weight.is_saved])
        self._say_before_step(optimizer, restarted)

    def _steer(self, ready: list[ConstrainedMatrix]) -> None:
        """Put the gradients into the coordinates of the step."""
        if not self._is_sharded:
            self._state(ready)
            return
        for weight in ready:
            if weight.owner is not None and weight.set.is_steered:
                weight.gradient_is = "changing"
        prepare(ready, self._state)

    def check_decay(self, optimizers: Iterable[Optimizer]) -> dict[int, Any]:
        """Return each parameter's weight decay by id; log or refuse it for fixed-size weights."""
        groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        decay = {id(p): group.get("weight_decay", 0) for group in groups for p in group["params"]}
        pairs = [(w, decay.get(id(w.parameter), 0)) for w in self.weights if not w.set.decays]
        decayed = {
            f"{w.path}: weight_decay={value} of {type(w.optimizer).__name__}": w.optimizer
            for w, value in pairs
            if value != 0
        }
        refused = [line for line, by in decayed.items() if reads_weight_size(by)]
        if refused:
            raise ConfigError(
                "constrain_: these weights may not decay: their optimizer computes steps from them,"
                " so decay cannot be left out exactly. Put them in a group with weight_decay=0, as"
                " wellposed.parameter_groups(model, weight_decay, where=...)"
                f" does:\n{listed(refused)}"
            )

        if decayed and "decay" not in self._warned:
            self._warned.add("decay")
            logger.warning(
                "constrain_: weight decay is left out of the steps of %d weights: the constraint"
                " sets their size",
                len(decayed),
            )

        return decay

    def _finish(self, optimizer: Optimizer) -> None:
        late = self._late_weights(optimizer)
        for weight in late:
            weight.accept_free_step()
        pending = self._pending + late
        with full_precision(*{weight.parameter.device.type for weight in pending}):
            retract = partial(finish, work_on=self._retract) if self._is_sharded else self._retract
            outcomes = retract(pending)

        broken = [f"{weight.path}: {why}" for weight, why in outcomes if isinstance(why, str)]
        for weight, why in outcomes:
            if isinstance(why, str):
                weight.restore()
        self._end_step()

        # Warnings come last, as a filter may make exceptions of them.
        if broken:
            raise ConvergenceError(
                "constrain_: the optimizer made steps that are not finite, so these weights could not"
                " be retracted and were restored. Check the loss and the gradients, clip them, or lower"
                f" the learning rate:\n{listed(broken)}"
            )
        self._say_large(outcomes)
        self._say_late(late)

    @torch.no_grad()
    @torch._disable_dynamo  # it runs inside the guard of a compiled step
    def _undo(self) -> None:
        self._work.forget()
        self._grouped = []
        super()._undo()

    @torch.no_grad()
    def _abandon(self) -> None:
        self._work.forget()
        self._grouped = []
        super()._abandon()

    def _is_ahead(self, group: list[ConstrainedMatrix]) -> bool:
        """Whether to guess numbers instead of reading them: an accelerator waits for each read."""
        return bool(self.batched) or group[0].parameter.device.type != "cpu"

    def _state(self, matrices: list[ConstrainedMatrix]) -> None:
        self._grouped = batches_of(matrices, self.batched)
        for group in self._grouped:
            is_steered = group[0].set.is_steered
            for weight in group if is_steered else ():
                weight.gradient_is = "changing"
            with self._work.task(_key(group), is_ahead=self._is_ahead(group)):
                group[0].set.state(group, self._work)
            for weight in group if is_steered else ():
                weight.gradient_is = "steered"

    def _retract(self, matrices: list[ConstrainedMatrix]) -> list[Outcome]:
        grouped = self._grouped
        self._grouped = []
        # Shards travel in parts, and a gradient may come late: then these are not the same matrices.
        is_same = set(chain.from_iterable(grouped)) == set(matrices)
        if not is_same or any(weight.is_displaced for weight in matrices):
            grouped = batches_of(matrices, self.batched)

        pairs = self._guessed(grouped)
        return [outcome for group, taken in pairs for outcome in self._retract_group(group, taken)]

    def _guessed(
        self, groups: list[list[ConstrainedMatrix]]
    ) -> Iterator[tuple[list[ConstrainedMatrix], Retraction | None]]:
        """Retract groups by guesses; yield each, with None if on a CPU or if a guess was wrong."""
        waiting: list[tuple[list[ConstrainedMatrix], Retraction | None]] = []
        entries = 0
        for index, group in enumerate(groups):
            if self._is_ahead(group):
                taken = None
                with self._work.task(_key(group), is_ahead=True), suppress(ConvergenceError):
                    taken = group[0].set.retract(group, self._work)
                waiting.append((group, taken))
                entries += len(group) * group[0].entries
            else:
                yield group, None
            if waiting and (entries > _WAITING or index == len(groups) - 1):
                wrong = self._work.finish()
                for ahead, taken in waiting:
                    if taken is None or not wrong.isdisjoint(_key(ahead)):
                        taken = None
                        for weight in ahead:
                            weight.drift = math.inf
                    yield ahead, taken
                waiting = []
                entries = 0

    def _retract_group(
        self, group: list[ConstrainedMatrix], taken: Retraction | None = None
    ) -> list[Outcome]:
        if taken is None:
            task = _key(group) if self._is_ahead(group) else ()
            try:
                with self._work.task(task, is_ahead=False):
                    taken = group[0].set.retract(group, self._work)
            except ConvergenceError as error:
                if len(group) == 1:
                    return [(group[0], str(error))]
                return [outcome for weight in group for outcome in self._retract_group([weight])]

        for weight in group:
            weight.is_in_step = False  # its result is written, and its copy may change
        copy_before([weight for weight in group if weight.keeps_copy])
        for weight in group:
            weight.settle(taken.drift)
        return [(weight, taken) for weight in group]

    def _say_large(self, outcomes: Sequence[Outcome]) -> None:
        """Warn of a step that was too long for the quick retraction."""
        for weight, taken in outcomes:
            if isinstance(taken, Retraction) and taken.method in ("exponential", "svd"):
                self._warn_once(
                    "large",
                    f"{weight.path}: one step or edit moved this orthogonal weight by up to"
                    f" {taken.size:.2g} (spectral norm; {QUADRATIC_LIMIT:g} is a radian), so the slower"
                    " exact retraction was used; lower the learning rate or warm it up."
                    " Silence with warnings.filterwarnings('ignore', category="
                    "wellposed.constrain.ConstraintWarning)",
                )


def _key(group: list[ConstrainedMatrix]) -> tuple[int, ...]:
    return tuple(map(id, group))
