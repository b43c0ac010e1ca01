"""Whether a trained model needs its blocks; a model that does not is never judged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from wellposed.nn import Block
from wellposed.nn.transject import TransJectBlock
from wellposed_lab.compare.runs import task_of
from wellposed_lab.training.config import RunConfig
from wellposed_lab.training.loop.batches import forward
from wellposed_lab.training.loop.build import load_run_model
from wellposed_lab.training.loop.step import scaled

BLOCKS = (Block, TransJectBlock, GradientCheckpointingLayer, nn.LSTM)
"""Classes of blocks: ours, TransJect's, those of transformers and the LSTM, which is a single one."""
_BATCHES = 8
"""Batches of train that are read, at most."""
_TASKS: dict[str, Any] = {}
"""The task that was read last: runs of one task follow each other."""


@contextmanager
def skipped_blocks(model: nn.Module) -> Iterator[None]:
    """Let every block of `BLOCKS` return its input while the context is open.

    >>> with skipped_blocks(lstm := nn.LSTM(2, 2)):
    ...     lstm(torch.ones(1, 2))[0].tolist()
    [[1.0, 1.0]]
    """

    def unchanged(_: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> Any:
        return (inputs[0], *output[1:]) if isinstance(output, tuple) else inputs[0]

    blocks = (module for module in model.modules() if isinstance(module, BLOCKS))
    handles = [block.register_forward_hook(unchanged) for block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def needs_blocks(config: RunConfig, folder: Path) -> bool:
    """Return whether a finished run's loss on *train* rises if its blocks return their inputs.

    On *valid* an overfitted model gains by any change that makes it less certain. A model without
    blocks does not need them. The weights are read twice, as frozen windows remember their states.
    Cost: two passes over at most 8 batches.
    """
    task = task_of(config, _TASKS, others=False)
    examples = task.dataset("train")
    order = islice(task.batches("train", config.train.batch_size, seed=0, epoch=0), _BATCHES)
    batches = [task.collate([examples[member] for member in members]) for members in order]

    @torch.no_grad()
    def loss(model: nn.Module) -> float:
        logits = [scaled(forward(model, batch), config.train) for batch in batches]
        return sum(float(task.loss_sum(*pair)[0]) for pair in zip(logits, batches, strict=True))

    trained = loss(load_run_model(folder)[0])
    skipping = load_run_model(folder)[0]
    with skipped_blocks(skipping):
        return not loss(skipping) <= trained
