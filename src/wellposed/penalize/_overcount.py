"""How often a Trainer counts the loss of a step that it accumulates, and whether the loss knows."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from wellposed import hooks
from wellposed.errors import ConfigError
from wellposed.roles import unwrapped

_NUMBERS = {Tensor.item, Tensor.tolist, Tensor.__float__, Tensor.__int__, Tensor.__index__}
"""Methods whose result is a Python number, which cannot be followed."""


class _Reads(TorchFunctionMode):
    """Notes whether a loss is computed from a tensor or a copy of it; metadata is no use of it."""

    def __init__(self, count: Tensor) -> None:
        super().__init__()
        self.is_used = False
        self._copies: dict[int, Tensor] = {id(count): count}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        operands = (*args, *(kwargs or {}).values())
        if any(id(operand) in self._copies for operand in operands):
            if func in _NUMBERS or (isinstance(result, Tensor) and result.requires_grad):
                self.is_used = True
            elif isinstance(result, Tensor):
                self._copies[id(result)] = result
        return result


class Overcount:
    """Finds how many times a step of a Trainer holds the mean loss of the task.

    transformers' Trainer passes ``num_items_in_batch``, the labels of a step, to models that take
    keywords, and adds up the losses of its micro-batches: each is taken as a part of the mean. A
    loss that is a mean already, as of BERT's classifiers, then counts once for each micro-batch and
    process. It is looked at in the first step in which that makes a difference.
    """

    def __init__(self, trainer: Any, computed: Callable[..., Any]) -> None:
        self.trainer = trainer
        # A method of a subclass that uses no count may divide by the micro-batches itself.
        self._is_plain = getattr(computed, "__module__", "") == "transformers.trainer"
        self.is_part: bool | None = None
        """Whether losses are parts of a mean; None if that was not looked at, or cannot be."""
        self._is_seen = False

    def adds_up(self, counted: Any) -> bool:
        """Return whether the trainer adds losses up; else it averages them itself."""
        adds_up = getattr(self.trainer, "loss_is_scaled_for_ga", None)
        if adds_up is None:  # as `Trainer.training_step` decides
            adds_up = self._counts(counted)
            adds_up = adds_up or getattr(self.trainer, "compute_loss_func", None) is not None
        return bool(adds_up)

    def micro_batches(self, counted: Any) -> int:
        """Return how many losses the trainer adds up to a step; 1 if it averages them itself."""
        if not self.adds_up(counted):
            return 1
        usual = self.trainer.args.gradient_accumulation_steps
        return getattr(self.trainer, "current_gradient_accumulation_steps", usual)

    def most(self, counted: Any) -> int:
        """Return how many times a mean loss is counted in this step."""
        return self.micro_batches(counted) * self._processes(counted)

    def times(self, counted: Any) -> int:
        """Return how many times the loss of this step is counted: once if it is a part of a mean."""
        return self.most(counted) if self.is_part is False else 1

    @contextlib.contextmanager
    def watching(self, counted: Any) -> Iterator[None]:
        """Look whether the loss that is computed in the block uses the number of labels."""
        if self._is_seen or self.most(counted) == 1:
            yield
            return
        if not self._can_tell(counted):
            yield
            self._is_seen = True
            return

        with contextlib.ExitStack() as stack:
            if "torch._dynamo" in sys.modules:  # a compiled model would hide what it does
                stack.enter_context(hooks.eager_calls())
            reads = stack.enter_context(_Reads(counted))
            yield

        self._is_seen = True
        if reads.is_used or self._is_plain:
            self.is_part = reads.is_used

    def check(self, counted: Any) -> None:
        """Raise for a step whose loss is counted an unknown number of times."""
        if self.most(counted) > 1 and self.is_part is None:
            raise ConfigError(
                f"attach: scale='task' cannot tell how {type(self.trainer).__name__} scales its loss"
                " over accumulated micro-batches; set its attribute loss_is_scaled_for_ga to True or"
                " False, or give scale='step' and multiply the strengths yourself"
            )

    def warning(self, counted: Any) -> str:
        """Return how much weaker one penalty a step is beside the loss, and what to type."""
        most = self.most(counted)
        name = type(unwrapped(self.trainer.model)).__name__
        return (
            f"attach: the loss of {name} is a mean without num_items_in_batch, and the Trainer adds up"
            f" {most} of them: a step has {most} times the task's gradient and one penalty, whose"
            f" relative strength is 1/{most}; penalty.attach(trainer, scale='task') keeps the ratio"
        )

    def _can_tell(self, counted: Any) -> bool:
        """Return whether the count is a tensor that reaches the loss as it is."""
        if getattr(self.trainer, "loss_is_scaled_for_ga", None) is not None:
            self.is_part = True  # as the trainer's class says
            return False
        return getattr(self.trainer.args, "n_gpu", 1) <= 1 and isinstance(counted, Tensor)

    def _counts(self, counted: Any) -> bool:
        return getattr(self.trainer, "model_accepts_loss_kwargs", False) and counted is not None

    def _processes(self, counted: Any) -> int:
        """Return by how many processes the trainer multiplies a loss, whose gradient DDP averages."""
        arguments = self.trainer.args
        averages = getattr(arguments, "average_tokens_across_devices", False)
        if not averages or counted is None or not self.adds_up(counted):
            return 1
        ranks = getattr(getattr(self.trainer, "accelerator", None), "num_processes", 1)
        tensor_parallel = getattr(self.trainer, "get_tp_size", lambda: 1)()
        return max(1, ranks // tensor_parallel)
