"""Batches made from their examples, in this process or ahead of it in workers; the same bits in
either case."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from wellposed.errors import WellposedError
from wellposed.training.loop.signals import STOPPING

if TYPE_CHECKING:
    from wellposed.tasks import Task
    from wellposed.tasks.data.splits import Split

Batch = dict[str, torch.Tensor]
Members = Sequence[int]


def collated(
    task: Task, split: Split, members: Iterable[Members], *, workers: int
) -> Iterator[Batch]:
    """Yield the batch of each list of examples, in order; ``workers`` processes are two batches
    each ahead.

    Nothing of the random state of this process is used, and the workers end with the iterator.

    Raises:
        WellposedError: what the task raises about its examples.
    """
    batches = Collation(task, split)
    if workers == 0:
        return map(batches.make, members)
    return _from_workers(batches, members, workers)


class Collation(Dataset[Any]):
    """The batches of a split, by the numbers of their examples."""

    def __init__(self, task: Task, split: Split) -> None:
        self.task, self.examples = task, task.dataset(split)

    def make(self, members: Members) -> Batch:
        """Return the batch of these examples."""
        return self.task.collate([self.examples[member] for member in members])

    def __getitem__(self, members: Any) -> Batch | WellposedError:
        try:
            return self.make(members)
        except WellposedError as error:
            return error  # raised in the other process, without the text of a second traceback


class _Order(Sampler[Members]):
    def __init__(self, members: Iterable[Members]) -> None:
        self._members = members

    def __iter__(self) -> Iterator[Members]:
        return iter(self._members)


def _from_workers(batches: Collation, members: Iterable[Members], workers: int) -> Iterator[Batch]:
    loader = DataLoader(
        batches,
        batch_size=None,
        sampler=_Order(members),
        num_workers=workers,
        worker_init_fn=_leave_signals_to_the_run,
        generator=torch.Generator(),  # else the loader draws from the one that dropout uses
    )
    for batch in loader:
        if isinstance(batch, WellposedError):
            raise batch
        yield batch


def _leave_signals_to_the_run(worker: int) -> None:
    del worker
    for number in STOPPING:
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.SIG_IGN)
