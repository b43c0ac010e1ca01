"""The loss of a user's trainer, with a penalty added to it."""

from __future__ import annotations

import functools
import logging
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from wellposed.errors import ConfigError
from wellposed.half_weights import lost_steps_warning
from wellposed.penalize._overcount import Overcount
from wellposed.roles import module_at, unwrapped

logger = logging.getLogger(__name__)

Scale: TypeAlias = Literal["step", "task"]
"""One penalty a step, or as many as the trainer counts losses of the task."""

_LARGE = 10.0
"""A first penalty above this multiple of the task loss is logged."""


class PenalisedLoss:
    """Replaces the ``compute_loss`` of a `transformers.Trainer`; adds a penalty in training."""

    def __init__(self, penalty: Any, trainer: Any, scale: Scale = "step") -> None:
        computed = getattr(trainer, "compute_loss", None)
        if not (callable(computed) and hasattr(trainer, "args")):
            raise ConfigError(
                f"attach: received {type(trainer).__name__}, expected a transformers.Trainer; in a"
                " loop of your own, or in training_step of Lightning, write loss + penalty()"
            )
        if isinstance(computed, PenalisedLoss) and not computed.penalty.removed:
            raise ConfigError(
                "attach: this trainer has a penalty already; call remove() on that one first, or give"
                " one penalty all strengths"
            )
        if penalty._capture is not None and getattr(trainer.args, "n_gpu", 1) > 1:
            raise ConfigError(
                "attach: affinities cannot be seen under torch.nn.DataParallel, which this trainer"
                " uses; run one process for each device (torchrun)"
            )

        self.penalty = penalty
        self.trainer = trainer
        self._scale = scale
        self._overcount = Overcount(trainer, computed)
        self._computed = computed
        self._replaced = vars(trainer).get("compute_loss")
        self._path = self._path_in(unwrapped(trainer.model))
        self._step: int | None = None
        self._is_first = True
        self._is_told = False
        functools.update_wrapper(self, computed, updated=())
        trainer.compute_loss = self

        # DeepSpeed keeps float32 copies.
        if not getattr(trainer, "is_deepspeed_enabled", False):
            parameters = trainer.model.parameters()
            warning = lost_steps_warning("attach", parameters, "the optimizer")
            if warning:
                logger.warning("%s", warning)

    def __call__(self, model: nn.Module, *args: Any, **named: Any) -> Any:
        """Return the result of the trainer's own method, with the penalty in the loss."""
        if self.penalty.removed or not (torch.is_grad_enabled() and model.training):
            return self._computed(model, *args, **named)
        self._follow(model)
        counted = named.get("num_items_in_batch", args[2] if len(args) > 2 else None)
        with self._overcount.watching(counted):
            result = self._computed(model, *args, **named)
        loss: Any = result[0] if isinstance(result, tuple) else result
        loss = self._penalised(loss, counted)
        return (loss, *result[1:]) if isinstance(result, tuple) else loss

    @property
    def optimizer_step(self) -> int:
        """The optimizer's step of the trainer, from 0."""
        return self.trainer.state.global_step

    def remove(self) -> None:
        """Restore the trainer's own method, unless another one replaced this one."""
        if vars(self.trainer).get("compute_loss") is not self:
            return
        if self._replaced is None:
            del self.trainer.compute_loss
        else:
            self.trainer.compute_loss = self._replaced

    def _penalised(self, loss: Tensor, counted: Any) -> Tensor:
        added = self.penalty()
        if not added.requires_grad:  # strength 0, or a step that ``every`` leaves out
            return loss
        times = self._times(counted)
        added = (added * times / self._overcount.micro_batches(counted)).to(loss.device)
        if self._is_first and (large := large_penalty(added.item(), loss.detach().mean().item())):
            logger.warning("%s", large)
        self._is_first = False
        return loss + added

    def _times(self, counted: Any) -> int:
        """Return how many penalties a step has: one, or as many as losses of the task."""
        times = self._overcount.times(counted)
        if self._scale == "task":
            self._overcount.check(counted)
            return times
        if times > 1 and not self._is_told:
            self._is_told = True
            logger.warning("%s", self._overcount.warning(counted))
        return 1

    def _follow(self, model: nn.Module) -> None:
        """Bind the penalty to the model that is trained, and its step to the trainer's."""
        inside = module_at(model, self._path)
        if inside is None:
            inside = module_at(model, self._path_in(unwrapped(model)))
        if inside is not None and unwrapped(inside) is not unwrapped(self.penalty._live.model):
            self.penalty.rebind(unwrapped(inside))
        at = self.trainer.state.global_step
        if at not in ((0,) if self._step is None else (self._step, self._step + 1)):
            self.penalty.step = at * self.trainer.args.gradient_accumulation_steps
        self._step = at

    def _path_in(self, model: nn.Module) -> str:
        """Return the path of the penalised model in ``model``, or of the one module of its class."""
        part = unwrapped(self.penalty._live.model)
        paths = {module: path for path, module in model.named_modules()}
        alike = [path for module, path in paths.items() if type(module) is type(part)]
        if part not in paths and len(alike) != 1:
            raise ConfigError(
                f"the trainer's {type(model).__name__} does not hold the {type(part).__name__} that the"
                " penalty was made for; make a penalty of trainer.model and attach that"
            )
        return paths.get(part, alike[0])


def large_penalty(penalty: float, task_loss: float) -> str | None:
    """Return a warning if a first penalty is above ten times the task loss, else None.

    >>> large_penalty(40.0, 2.0)
    'the first penalty, 40, is above ten times the task loss, 2; training will follow the penalty:
    multiply its strengths by 0.05 to begin with equal parts'
    """
    if not penalty > _LARGE * abs(task_loss):
        return None
    return (
        f"the first penalty, {penalty:.4g}, is above ten times the task loss, {task_loss:.4g};"
        " training will follow the penalty: multiply its strengths by"
        f" {abs(task_loss) / penalty:.2g} to begin with equal parts"
    )
