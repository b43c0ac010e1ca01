"""The stream of micro-batches of a run, a function of task, batch size and seed alone."""

from __future__ import annotations

import inspect
import signal
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from wellposed.errors import ConfigError, DataError, WellposedError
from wellposed_lab.tasks.batches import IGNORED_LABEL
from wellposed_lab.tasks.data.splits import Split
from wellposed_lab.tasks.task import TARGETS, Task
from wellposed_lab.training.loop.processes import STOPPING

Batch = dict[str, Tensor]
Rows = Sequence[int]


def collated(task: Task, split: Split, order: Iterable[Rows], *, workers: int) -> Iterator[Batch]:
    """Yield the batch of each list of examples, in order; ``workers`` processes are two batches
    each ahead.

    Nothing of the random state of this process is used, and the workers end with the iterator.

    Raises:
        WellposedError: what the task raises about its examples.
    """
    loader = DataLoader(
        Collation(task, split),
        batch_size=None,
        sampler=order,
        num_workers=workers,
        worker_init_fn=_leave_signals_to_the_run,
        generator=torch.Generator(),  # else the loader draws from the one that dropout uses
    )
    for batch in loader:
        if isinstance(batch, WellposedError):
            raise batch
        yield batch


class Collation(Dataset[Any]):
    """The batches of a split, by the numbers of their examples."""

    def __init__(self, task: Task, split: Split) -> None:
        self.task, self.examples = task, task.dataset(split)

    def __getitem__(self, members: Any) -> Batch | WellposedError:
        try:
            return self.task.collate([self.examples[member] for member in members])
        except WellposedError as error:
            return error  # handed on, so that a worker adds no second traceback


def _leave_signals_to_the_run(worker: int) -> None:
    del worker
    for number in STOPPING:
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)


TOKEN_TYPES = "token_type_ids"


class MicroBatches:
    """Endless micro-batches of the train split: epoch after epoch, each in the order that
    ``task.batches`` gives.

    The stream depends on ``(task, batch_size, seed)`` and on nothing of the model, so that every
    variant of a seed sees the same batches in the same order. The position ``(epoch, index)`` is
    all the state there is: ``start`` is that of the first. Of several processes, ``process`` = (r, W)
    takes the micro-batches r, r + W, ...
    """

    def __init__(
        self,
        task: Task,
        batch_size: int,
        seed: int,
        *,
        start: tuple[int, int] = (0, 0),
        process: tuple[int, int] = (0, 1),
        workers: int = 0,
    ) -> None:
        self._task, self._batch_size, self._seed = task, batch_size, seed
        self._rank, self._world = process
        self.epoch, self.index = start
        self._ahead: deque[tuple[int, int]] = deque()
        members = self._members(self._order(self.epoch), *start)
        self._batches = collated(task, "train", members, workers=workers)

    def take(self, count: int) -> list[Batch]:
        """Return the next ``count`` micro-batches of this process and step over those of the
        others."""
        mine = []
        for _ in range(count):
            mine.append(next(self._batches))
            self.epoch, self.index = self._ahead.popleft()
        return mine

    def close(self) -> None:
        """End the worker processes; nothing can be taken any more."""
        self._batches = iter(())

    def _members(self, order: list[list[int]], epoch: int, index: int) -> Iterator[Sequence[int]]:
        """Yield the examples of each micro-batch of this process, and note the position after those
        of all."""
        while True:
            mine: Sequence[int] = ()
            for process in range(self._world):
                if index >= len(order):
                    epoch, index = epoch + 1, 0
                    order = self._order(epoch)
                if process == self._rank:
                    mine = order[index]
                index += 1
            self._ahead.append((epoch, index))
            yield mine

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
    """Return how many tokens of ``batch`` are not padding: of the second text of a pair and of
    targets as well.

    An image counts as one.
    """
    masks = [batch[name] for name in ("attention_mask", "attention_mask_pair") if name in batch]
    count = sum(int(mask.sum()) for mask in masks)
    if "attention_mask" not in batch:
        count += batch["input_ids"].numel() if "input_ids" in batch else sequence_count(batch)
    if "decoder_input_ids" in batch:
        count += int((batch["labels"] != IGNORED_LABEL).sum())
    return count


def check_target_count(task: Task, counted: int, summed: float) -> None:
    """Refuse a task whose loss sums over another number of targets than its labels say."""
    if counted != int(summed):
        raise ConfigError(
            f"task {task.name!r}: loss_sum reports {int(summed)} targets, but the labels hold"
            f" {counted}; define target_count(batch) on the task so that gradient accumulation"
            " stays exact"
        )


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return ``batch`` on ``device``."""
    return {name: value.to(device, non_blocking=True) for name, value in batch.items()}


def sequence_count(batch: Batch) -> int:
    """Return how many sequences ``batch`` holds: the rows of its first tensor."""
    return len(next(iter(batch.values())))


def model_inputs(model: nn.Module, batch: Batch) -> Batch:
    """Return what of ``batch`` a model reads: all but the targets, and token types only where it
    has them."""
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
    """Return the logits of ``model``, a loss of its own where it has one, a mean over the sequences
    of ``batch``, and all that it gave.

    The loss is read from ``output.auxiliary_loss``.
    """
    output: Any = model(**model_inputs(model, batch))
    if isinstance(output, Tensor):
        return output, None, output
    return output.logits, getattr(output, "auxiliary_loss", None), output
