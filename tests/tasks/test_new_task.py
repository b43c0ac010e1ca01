"""A task from outside the package: one options class, one subclass, one registration line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
import torch

from wellposed.tasks import SPLITS, TASKS, TaskSpec, build_task
from wellposed.tasks.batches import Ragged
from wellposed.tasks.kinds.classification import ClassificationTask, LabelledExamples
from wellposed.tasks.text.tokenizers import ByteEncoder


@dataclass(frozen=True)
class ParityOptions:
    """Options of the task of this test."""

    bits: int = 5


class ParityTask(ClassificationTask):
    """Whether a row of bits holds an odd number of ones."""

    name: ClassVar[str] = "parity"

    def __init__(self, options: ParityOptions) -> None:
        rows = [
            [2 + (number >> bit) % 2 for bit in range(options.bits)]
            for number in range(2**options.bits)
        ]
        labels = np.array([sum(row) % 2 for row in rows])
        examples = LabelledExamples(Ragged.from_lists(rows), labels)
        super().__init__(
            encoder=ByteEncoder(),
            examples=dict.fromkeys(SPLITS, examples),
            labels=("even", "odd"),
            source={"source": "made"},
            details={},
        )


def test_a_new_task_is_one_class_and_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TASKS, "_entries", dict(TASKS._entries))
    TASKS.register("parity")(
        TaskSpec("parity", ParityOptions, ParityTask, "whether the ones are odd (accuracy)")
    )
    task = build_task("parity", {"bits": 3})
    members = task.batches("train", 8, seed=0, epoch=0)[0]
    batch = task.collate([task.dataset("train")[member] for member in members])
    logits = torch.zeros(8, 2)
    logits[:, 1] = 1.0
    assert task.target_count(batch) == int(task.loss_sum(logits, batch)[1]) == 8
    assert task.summarize(task.metric_sums(logits, batch)) == {"accuracy": 0.5}
    assert task.reference() == {"accuracy": 0.5}
    assert task.description()["source"] == "made"
    assert task.generate_metrics(torch.nn.Identity(), "test", batch_size=1) == {}
    assert (task.report_headline, task.describe_generation()) == (None, {})
