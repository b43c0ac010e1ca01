"""Small classifiers of texts, trained for a few seconds, whose certified radii are measured."""

from __future__ import annotations

import argparse
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import set_seed
from torch import Tensor

from wellposed.model_options import ModelOptions
from wellposed.models import input_vectors
from wellposed_lab.compare.variants import apply_variant
from wellposed_lab.tasks.task import Task, build_task
from wellposed_lab.training.config import (
    NO_PENALTY,
    PenaltyOptions,
    RunConfig,
    TrainOptions,
)
from wellposed_lab.training.loop.batches import MicroBatches
from wellposed_lab.training.loop.build import build_run_model, set_learning_rate
from wellposed_lab.training.loop.machine import build_accelerator
from wellposed_lab.training.loop.run import Parts
from wellposed_lab.training.loop.schedules import learning_rate
from wellposed_lab.training.loop.step import compute_gradients

SEEDS = 3
TOKENS = 48
WIDTH = 32


@dataclass(frozen=True)
class Example:
    """An embedded text of *test*, without padding, and its class."""

    tokens: Tensor
    """(1, tokens, width), float64."""
    label: Tensor


def parser_of(
    description: str | None, *, variants: str, examples: int, steps: int
) -> argparse.ArgumentParser:
    """Return the options of a benchmark of such classifiers, with its own defaults."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, help="a folder of texts, such as AG News")
    parser.add_argument("--variants", default=variants)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--examples", type=int, default=examples)
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--layers", type=int, default=1)
    return parser


def texts_of(data: str) -> Task:
    return build_task("text_classification", {"data": data, "max_length": TOKENS})


def trained(
    variant: str,
    seed: int,
    task: Task,
    *,
    steps: int,
    layers: int = 1,
    penalty: PenaltyOptions = NO_PENALTY,
    **options_of_train: Any,
) -> Any:
    """Return a model of width 32 after some steps of 32 texts, by the loop of `wellposed train` with
    its default schedule; that of the bound is added to the loss of every ``penalty.bound_every``-th step."""
    sizes = ModelOptions(hidden_size=WIDTH, num_attention_heads=2, num_hidden_layers=layers)
    options = TrainOptions(steps=steps, batch_size=32, seed=seed, device="cpu", **options_of_train)
    base = RunConfig("text_classification", model=sizes, penalty=penalty, train=options)
    config = apply_variant(variant, base)
    options = config.train
    set_seed(seed)
    parts = Parts(config, task, build_run_model(config, task), build_accelerator(options))
    batches = MicroBatches(task, options.batch_size, seed)
    penalties = parts.penalty
    with closing(parts):
        for step in range(1, steps + 1):
            set_learning_rate(parts.optimizer, learning_rate(step, options, WIDTH))
            due = None if penalties is None else penalties.of_step(step).of_weights
            compute_gradients(
                parts.accelerator,
                parts.prepared,
                task,
                batches.take(1),
                options,
                weights_penalty=due,
            )
            parts.optimizer.step()
            parts.optimizer.zero_grad(set_to_none=True)
    return parts.model.double().eval().requires_grad_(False)


def examples_of(model: Any, task: Task, count: int) -> list[Example]:
    dataset = task.dataset("test")
    examples: list[Example] = []
    for index in range(count):
        row = task.collate([dataset[index]])
        tokens = row["input_ids"][:, : int(row["attention_mask"].sum())]
        examples.append(Example(input_vectors(model, tokens).double(), row["labels"]))
    return examples


@torch.no_grad()
def accuracy(model: Any, task: Task) -> float:
    """Return the share of right answers on *test*."""
    dataset = task.dataset("test")
    right = 0
    for start in range(0, len(dataset), 100):
        rows = task.collate([dataset[n] for n in range(start, min(start + 100, len(dataset)))])
        labels = rows.pop("labels")
        right += int((model(**rows).logits.argmax(-1) == labels).sum())
    return right / len(dataset)
