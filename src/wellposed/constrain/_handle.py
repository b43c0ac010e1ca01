"""The handle of constrained weights: its hooks around the optimizer's steps, until `remove`."""

from __future__ import annotations

import copyreg
import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from wellposed.call_checks import checked_arguments
from wellposed.constrain._constrained import Constrained
from wellposed.constrain._guard import guard_of
from wellposed.constrain._report import ConstraintErrors, ConstraintReport, ConstraintWarning
from wellposed.constrain._step_checks import (
    LIMIT,
    change_counter,
    check_gradients,
    check_still_stepped,
    check_still_there,
    is_inner,
)
from wellposed.constrain._weight_slice import WeightSlice, all_candidates
from wellposed.constrain._wholes import Wholes
from wellposed.errors import listed
from wellposed.interrupts import run_all, uninterrupted
from wellposed.linalg import ErrorNorm, is_sharded
from wellposed.plan import Plan
from wellposed.roles import CallWatch, WeightView

Args: TypeAlias = tuple[Any, ...]
Keywords: TypeAlias = dict[str, Any]
Call: TypeAlias = tuple[Args, Keywords]
Weight = TypeVar("Weight", bound=Constrained)
# Key among the hooks of an optimizer; torch's own keys are numbers.
_LOST = "wellposed_lost_constraint"


class Constraint(ABC):
    """Keeps plain parameters in their set; made by `constrain_`, ended by `remove`.

    It installs two hooks on each optimizer and wraps its ``step``: after an exception or a signal
    in it, each weight is that of before the step, or of after it. Until the first step a hook on
    one gradient warns if another optimizer steps instead. A `copyreg` entry for its class stays.
    Modules and their ``state_dict`` are unchanged. Copies of the optimizer (``copy.deepcopy``,
    pickle, ``torch.save``) are not constrained, and warn at their first step: call `constrain_` on
    them, or ``attach()`` on a handle that was copied in the same call.
    """

    def __init__(self, model: nn.Module, weights: Iterable[Constrained]) -> None:
        self.weights: tuple[Any, ...] = tuple(weights)
        parameters = {id(part.parameter) for weight in self.weights for part in weight.slices}
        names = [part for part in all_candidates(model) if id(part.parameter) in parameters]
        self._model = model
        self._names = names
        views = (WeightView(part.module_path, part.module, part.name) for part in names)
        self._calls = CallWatch(model, views)
        self.report = ConstraintReport(())
        self.plan: Plan | None = None
        """The costs of a step, after ``constrain_(..., dry_run=True)``."""
        self._pending: list[Any] = []
        """The weights of the step that began."""
        self._warned: set[str] = set()
        self._hooks: list[Any] = []
        self._is_attached = False
        # Parameters without a state before the step that began: an exception may leave half of one.
        self._stateless: list[Tensor] = []
        # By the id of each optimizer that has taken no step yet.
        self._idle: dict[int, RemovableHandle] = {}

    @property
    def active(self) -> bool:
        """Whether the hooks are in place."""
        return self._is_attached

    @property
    def paths(self) -> tuple[str, ...]:
        """The full names of the constrained parameters."""
        return tuple(weight.path for weight in self.weights)

    @checked_arguments
    def error(self, *, norm: ErrorNorm = "max") -> ConstraintErrors:
        """Measure how far every constrained weight, as stored, is from its set, in float64.

        Orthogonal: the largest entry of ``|W^T W / gain^2 - I|``; with ``norm="spectral"`` the
        largest ``|sigma / gain - 1|`` of its singular values. Spectral: ``max(0, |W|_2 / bound - 1)``,
        certified, in either norm. Columns: ``max_j | |W e_j| / bound - 1 |``, and logits:
        ``max(0, l / bound - 1)`` for the largest logit l of the passes before the last step; both
        refuse ``norm="spectral"``.

        Every rank must call it, since it gathers sharded weights, one at a time. `ConfigError` if the
        model has another parameter under a name of the report. A `ConstraintWarning` names a layer
        that computes something else than its weight since, by a hook or a replaced ``forward``.
        """
        check_still_there(self._model, self._names)
        for line in self._calls.changes():
            self._warn_once(
                line,
                f"{line}, so the layer computes something else than its constrained weight. Remove"
                " that, or count on the weight alone",
            )
        wholes = Wholes()
        errors = {weight.path: weight.error(wholes, norm=norm) for weight in self.weights}
        return ConstraintErrors(errors)

    def remove(self) -> None:
        """Remove the hooks; the weights stay unchanged.

        Moments of square weights restart from zero, because they are in Lie coordinates.
        """
        run_all(self.detach, self._abandon, self._release)

    def _release(self) -> None:
        for weight in self.weights:
            weight.release()

    def attach(self) -> None:
        """Install the hooks, as `constrain_` does, unless they are in place."""
        if self.active:
            return
        for weight in self.weights:
            weight.forget()
        try:
            self._install_hooks()
            self._is_attached = True
        except BaseException:
            run_all(self.detach)
            raise

    def _install_hooks(self) -> None:
        self._watch_idle_optimizers()
        with uninterrupted():
            for weight in self.weights:
                weight.watch(self._hooks)
        for optimizer in self._optimizers():
            cast(dict[object, Any], optimizer._optimizer_step_pre_hooks).pop(_LOST, None)
            guard_of(optimizer).undos.append(self._undo)
            optimizer.register_step_pre_hook(self._before_step)
            optimizer.register_step_post_hook(self._after_step)
            copyreg.dispatch_table.setdefault(type(optimizer), _reduced)

    def detach(self) -> None:
        """Remove the hooks, and nothing else: first of all they lose their effect together."""
        self._is_attached = False
        for optimizer in self._optimizers():
            # Looked for, as an interrupted attach may not have noted what it registered.
            tables: Any = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
            for table in tables:
                for key, hook in list(table.items()):
                    if getattr(hook, "__self__", None) is self:
                        table.pop(key, None)
            guard_of(optimizer).remove(self._undo)

        for hook in (*self._hooks, *self._idle.values()):
            hook.remove()
        self._hooks.clear()
        self._idle.clear()

    def _optimizers(self) -> list[Optimizer]:
        return list(dict.fromkeys(weight.optimizer for weight in self.weights))

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the hooks, which a copy does not have, and the state of one step."""
        fresh: dict[str, Any] = {"_hooks": [], "_pending": [], "_warned": set(), "_idle": {}}
        fresh |= {"_is_attached": False, "_stateless": []}
        return {**self.__dict__, **fresh}

    def __repr__(self) -> str:
        return f"Constraint({len(self.weights)} weights, {'' if self.active else 'in'}active)"

    @torch._disable_dynamo  # its decisions have no graph
    def _before_step(self, optimizer: Optimizer, args: Args, kwargs: Keywords) -> Call | None:
        if not self.active or is_inner(optimizer):
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            self._prepare(optimizer)
            return None

        # The closure computes the gradient, and it runs inside the step.
        def closed() -> Any:
            loss = closure()
            self._prepare(optimizer)
            return loss

        if "closure" in kwargs:
            return args, {**kwargs, "closure": closed}
        return (*args[:1], closed, *args[2:]), kwargs

    @torch.no_grad()
    @torch._disable_dynamo  # its decisions have no graph
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self.active and not is_inner(optimizer):
            self._finish(optimizer)

    @abstractmethod
    def _prepare(self, optimizer: Optimizer) -> None:
        """Before a step: check its weights, and keep what undoes it."""

    @abstractmethod
    def _finish(self, optimizer: Optimizer) -> None:
        """After a step: put its weights back into their sets."""

    # Parts of `_prepare` and `_finish`, in their order.

    def _weights_of_step(self, optimizer: Optimizer) -> list[Any]:
        """Leave an earlier step that did not end; return the weights of the one that begins."""
        self._abandon()
        if id(optimizer) in self._idle:
            self._idle.pop(id(optimizer)).remove()
        due = [weight for weight in self.weights if weight.optimizer is optimizer]
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        check_still_stepped(optimizer, due, stepped)
        return [weight for weight in due if weight.parameter.grad is not None]

    def _check_weights(self, ready: Sequence[Constrained]) -> None:
        check_still_there(self._model, self._names)
        check_gradients(ready)

    def _claim(self, optimizer: Optimizer, ready: list[Any]) -> list[str]:
        """Follow edits and loaded states; return the paths whose moments restarted."""
        restarted = [weight.path for weight in ready if weight.claim()]
        state = optimizer.state
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        self._stateless = [p for p in stepped if p.grad is not None and not state.get(p)]
        self._pending = ready
        return restarted

    def _say_before_step(self, optimizer: Optimizer, restarted: Sequence[str]) -> None:
        if not guard_of(optimizer).is_running:
            self._warn_once(
                "unguarded",
                f"the step of {type(optimizer).__name__} was compiled or bound to a name before"
                " constrain_: if an exception or Ctrl-C ends it, the weights are restored at the next"
                " step or by remove(), not at once. Compile or bind optimizer.step after constrain_",
            )
        if restarted:
            self._warn_once(
                "moments",
                "moments of these weights come from steps without this constraint;"
                f" they restart from zero:\n{listed(restarted)}",
            )

    def _late_weights(self, optimizer: Optimizer) -> list[Any]:
        """Return the weights whose gradients came after `_prepare`."""
        prepared = set(map(id, self._pending))
        due = [w for w in self.weights if w.optimizer is optimizer and w.parameter.grad is not None]
        return [weight for weight in due if id(weight) not in prepared]

    def _end_step(self) -> None:
        self._pending = []
        self._stateless = []

    def _say_late(self, late: Sequence[Constrained]) -> None:
        if late:
            self._warn_once(
                "late",
                "a step_pre_hook registered after constrain_ made the gradients of these weights."
                " Their steps were free, then projected to the nearest in the set; register it"
                f" before constrain_:\n{listed([weight.path for weight in late])}",
            )

    @torch.no_grad()
    @torch._disable_dynamo  # it runs inside the guard of a compiled step
    def _undo(self) -> None:
        """After a step that did not end: go back to the weights, gradients and states before it."""
        for weight in self._pending:
            if weight.is_in_step:
                weight.restore()
            weight.restore_gradient()
        for optimizer in self._optimizers():
            for parameter in self._stateless:
                optimizer.state.pop(parameter, None)
        self._end_step()

    @torch.no_grad()
    def _abandon(self) -> None:
        """End a step that did not end and was not guarded: compiled, or bound to a name, before."""
        for weight in self._pending:
            weight.restore_gradient()
            weight.abandon()
        self._end_step()

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, ConstraintWarning, stacklevel=2)

    def holds(self, weight_slice: WeightSlice) -> bool:
        """Whether this matrix, or a part of it, is constrained."""
        return any(weight_slice.overlaps(part) for weight in self.weights for part in weight.slices)

    def _watch_idle_optimizers(self) -> None:
        """Warn if a weight changes between backward passes while its optimizer takes no step."""

        def say() -> None:
            self._warn_once(
                "idle",
                f"constrained weights changed {LIMIT} times, but the optimizer given to constrain_"
                " took no step: another optimizer trains them, and they leave their set. Call"
                " constrain_ with the one that steps; to a Trainer, which makes its own, pass"
                f" optimizers=(optimizer, scheduler):\n{listed(self.paths)}",
            )

        for weight in self.weights:
            hear = weight.parameter.register_post_accumulate_grad_hook
            if id(weight.optimizer) not in self._idle and not is_sharded(weight.parameter):
                self._idle[id(weight.optimizer)] = hear(change_counter(say))


def _say_lost(paths: list[str], optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Warn once, in a copy of a constrained optimizer, that its weights are not constrained."""
    if paths:
        kind = type(optimizer).__name__
        lines = listed(paths)
        paths.clear()
        warnings.warn(
            f"this {kind} is a copy (deepcopy, pickle, torch.load) of one whose weights are"
            " constrained, and the constraint is lost from this step on. Before its first step, call"
            " wellposed.constrain_(model, optimizer, where=...) on the copied pair, or attach() on a"
            " handle copied with it. To train the weights freely, build a new optimizer: moments of"
            f" square weights are in other coordinates. Constrained were:\n{lines}",
            ConstraintWarning,
            stacklevel=4,
        )


def _reduced(optimizer: Optimizer) -> Any:
    """Reduce an optimizer for copy and pickle, with a hook that warns in place of constraints."""
    reduced: Any = optimizer.__reduce_ex__(4)
    paths = [path for handle in handles_of(optimizer) for path in handle.paths]
    if not paths:
        return reduced
    make, arguments, state, *others = reduced
    hooks = OrderedDict([(_LOST, partial(_say_lost, paths))])
    return make, arguments, {**state, "_optimizer_step_pre_hooks": hooks}, *others


def handles_of(optimizer: Optimizer) -> list[Constraint]:
    """Return the constraints that are attached to an optimizer."""
    hooks: Iterable[Callable[..., Any]] = optimizer._optimizer_step_pre_hooks.values()
    owners = [getattr(hook, "__self__", None) for hook in hooks]
    return [owner for owner in owners if isinstance(owner, Constraint) and owner.active]
