"""The stream of micro-batches of a run, determined by task, batch size and seed."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from wellposed.errors import ConfigError, DataError
from wellposed_lab.tasks.batches import IGNORED_LABEL
from wellposed_lab.tasks.task import TARGETS, Task

Batch = dict[str, Tensor]
Rows = Sequence[int]


TOKEN_TYPES = "token_type_ids"


class MicroBatches:
    """Endless micro-batches of train, epoch after epoch, each in the order of ``task.batches``.

    They depend only on ``(task, batch_size, seed)``, so every variant sees the same ones. The state
    is the position ``(epoch, index)``; ``start`` is the first one. Of several processes,
    ``process`` = (r, W) takes r, r + W, ...
    """

    def __init__(
        self,
        task: Task,
        batch_size: int,
        seed: int,
        *,
        start: tuple[int, int] = (0, 0),
        process: tuple[int, int] = (0, 1),
    ) -> None:
        self._task = task
        self._batch_size = batch_size
        self._seed = seed
        self._rank, self._world = process
        self.epoch, self.index = start
        self._examples = task.dataset("train")
        self._members = self._order(start[0])

    def take(self, count: int) -> list[Batch]:
        """Return the next ``count`` micro-batches of this process, skipping those of the others."""
        return [self._next() for _ in range(count)]

    def _next(self) -> Batch:
        mine: Rows = ()
        for process in range(self._world):
            if self.index >= len(self._members):
                self.epoch = self.epoch + 1
                self.index = 0
                self._members = self._order(self.epoch)
            if process == self._rank:
                mine = self._members[self.index]
            self.index += 1
        return self._task.collate([self._examples[member] for member in mine])

    def _order(self, epoch: int) -> list[list[int]]:
        order = self._task.batches("train", self._batch_size, seed=self._seed, epoch=epoch)
        if not order:
            raise DataError(
                f"{self._task.name}: the train split has {len(self._task.dataset('train'))}"
                f" examples and gives no batch of {self._batch_size}; use more data or a smaller"
                " batch_size"
            )
        return order


def token_count(batch: Batch) -> int:
    """Return the number of tokens in ``batch`` without padding, in all texts; images count as 1."""
    masks = [batch[name] for name in ("attention_mask", "attention_mask_pair") if name in batch]
    count = sum(int(mask.sum()) for mask in masks)
    if "attention_mask" not in batch:
        count += batch["input_ids"].numel() if "input_ids" in batch else sequence_count(batch)
    if "decoder_input_ids" in batch:
        count += int((batch["labels"] != IGNORED_LABEL).sum())
    return count


def check_target_count(task: Task, counted: int, summed: float) -> None:
    """Refuse a task whose loss sums over another number of targets than its labels have."""
    if counted != int(summed):
        raise ConfigError(
            f"task {task.name!r}: loss_sum reports {int(summed)} targets, but the labels hold"
            f" {counted}; define target_count(batch) on the task so that gradient accumulation"
            " stays exact"
        )


def to_device(batch: Batch, device: torch.device) -> Batch:
    return {name: value.to(device, non_blocking=True) for name, value in batch.items()}


def sequence_count(batch: Batch) -> int:
    """Return the number of sequences in ``batch``: the rows of its first tensor."""
    return len(next(iter(batch.values())))


def model_inputs(model: nn.Module, batch: Batch) -> Batch:
    """Return the inputs of a model: no targets, and token types only if the model has them."""
    inputs = {name: value for name, value in batch.items() if name not in TARGETS}
    if TOKEN_TYPES in inputs:
        model = getattr(model, "module", model)
        kinds = getattr(getattr(model, "config", None), "type_vocab_size", 2)
        if kinds <= 1 or TOKEN_TYPES not in inspect.signature(model.forward).parameters:
            del inputs[TOKEN_TYPES]
    return inputs


def forward(model: nn.Module, batch: Batch) -> Tensor:
    """Return the logits of ``model`` on everything in ``batch`` but the labels."""
    return forward_with_auxiliary(model, batch)[0]


def forward_with_auxiliary(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | None, Any]:
    """Return logits, ``output.auxiliary_loss`` (a mean over sequences, or None) and output."""
    output: Any = model(**model_inputs(model, batch))
    if isinstance(output, Tensor):
        return output, None, output
    return output.logits, getattr(output, "auxiliary_loss", None), output
