"""Fine-tuning a given encoder: cost per step of the loop, a penalty, a constraint, L2 attention.

All sides take steps on the same batches, each with its own copy of the model. The Transformers
Trainer cannot stop between two steps, so it and ``train`` alternate in blocks of steps. Making
batches counts; evaluation, checkpoints and start do not.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from torch import nn
from torch.utils.data import DataLoader

import wellposed as wp
from benchmarks.rows import Benchmark, Call, Goal, Row, Setup, Times, ratio_row
from benchmarks.start import begun
from wellposed.integrations import register_attention
from wellposed_lab.tasks.task import Task, build_task
from wellposed_lab.training.config import (
    ConstrainOptions,
    PenaltyOptions,
    RunConfig,
    StartOptions,
    TrainOptions,
)
from wellposed_lab.training.loop.batches import Batch, MicroBatches
from wellposed_lab.training.loop.build import build_run_model
from wellposed_lab.training.loop.train import take_step

PRODUCTS = (
    "Three products of d^3 for each constrained query and two for each penalised key, in a step of few"
    " tokens: a larger batch or `every=` lowers it."
)
SHORT = (
    "At 64 tokens the fused kernel is so fast that making its input shows: a column of norms in a"
    " copy of queries and keys, or their normalisation."
)
Step = Callable[[Batch], None]


class StepTimes(hf.TrainerCallback):
    """Seconds from the beginning of one step to that of the next, with its batch."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.moments: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.moments.append(self.setup.clock())

    def seconds(self) -> list[float]:
        return [
            after - before for before, after in zip(self.moments, self.moments[1:], strict=False)
        ]


class Ordered(hf.Trainer):
    """A Trainer that keeps the order of the rows, as the other side does."""

    def get_train_dataloader(self) -> Any:
        rows: Any = self.train_dataset
        return DataLoader(
            rows, batch_size=self.args.per_device_train_batch_size, collate_fn=self.data_collator
        )


def rows_of(batches: list[Batch]) -> list[dict[str, Any]]:
    """Return single rows without padding, as in a tokenized data set."""
    rows = []
    for batch in batches:
        for row, mask in enumerate(batch["attention_mask"].bool()):
            columns = {
                name: batch[name][row][mask].tolist() for name in batch if batch[name].ndim == 2
            }
            rows.append({**columns, "labels": int(batch["labels"][row])})
    return rows


def of_trainer(
    setup: Setup,
    model: nn.Module,
    rows: list[dict[str, Any]],
    tokenizer: Any,
    options: TrainOptions,
) -> list[float]:
    """Return times of the steps of a Trainer over ``rows``."""
    times = StepTimes(setup)
    with tempfile.TemporaryDirectory() as folder:
        arguments = hf.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=options.batch_size,
            max_steps=len(rows) // options.batch_size,
            learning_rate=options.learning_rate,
            weight_decay=options.weight_decay,
            logging_steps=options.log_every,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        collate = hf.DataCollatorWithPadding(tokenizer)
        Ordered(
            model, arguments, data_collator=collate, train_dataset=rows, callbacks=[times]
        ).train()
    return times.seconds()


def of_train(
    setup: Setup, model: nn.Module, config: RunConfig, task: Task, steps: int
) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        run = begun(config, Path(folder), task, model)
        return [setup.seconds(partial(take_step, run)) for _ in range(steps)][1:]


def plain_step(model: nn.Module) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5, weight_decay=0.0)

    def step(batch: Batch) -> None:
        loss: Any = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def extras(model: nn.Module, batch: Batch) -> dict[str, Call]:
    """Return a step, its parts that a constraint extends, and the extra part of a penalty."""
    copies = [copy.deepcopy(model).train() for _ in range(3)]
    optimizers = [torch.optim.AdamW(one.parameters(), lr=3e-5, weight_decay=0.0) for one in copies]
    wp.constrain_(copies[1], optimizers[1], where=("query", "key"))
    for one in copies[:2]:
        one(**batch).loss.backward()

    def of_penalty(**roles: bool) -> Callable[[], None]:
        penalty = wp.OrthogonalityPenalty(
            copies[2], **wp.presets.mcgrath2024(**roles, strength=1e-2)
        )
        return lambda: penalty().backward()

    step = plain_step(copy.deepcopy(model).train())
    return {
        "a whole step": lambda: step(batch),
        "AdamW": optimizers[0].step,
        "AdamW, query and key held orthogonal": optimizers[1].step,
        "penalty on the key": of_penalty(key=True),
        "penalty on key and query": of_penalty(key=True, query=True),
    }


def attention_alone(model: Any, shape: tuple[int, int]) -> dict[str, Call]:
    """Return one layer's attention, forward and backward, for each implementation."""
    heads, width = (
        model.config.num_attention_heads,
        model.config.hidden_size // model.config.num_attention_heads,
    )
    leaves = [torch.randn(shape[0], shape[1], heads, width, requires_grad=True) for _ in range(3)]

    def call(name: str) -> Call:
        def run() -> None:
            query, key, value = (leaf.transpose(1, 2) for leaf in leaves)
            module = nn.Module()
            module.is_causal = False
            joined, _ = hf.AttentionInterface()[name](
                module, query, key, value, None, scaling=width**-0.5, dropout=0.0
            )
            joined.sum().backward()

        return run

    return {name: call(name) for name in ("sdpa", *register_attention())}


def loop_row(
    setup: Setup, first: Any, config: RunConfig, task: Task, tokenizer: Any, name: str
) -> Row:
    """A step of `train` over one of the Trainer, in blocks of steps."""
    models, steps = (copy.deepcopy(first), copy.deepcopy(first)), 8
    rows = rows_of(MicroBatches(task, config.train.batch_size, 0).take(steps))
    times: Times = {"Trainer": [], "train": []}
    for _ in range(setup.rounds_of(4)):
        times["Trainer"].append(
            statistics.median(of_trainer(setup, models[0], rows, tokenizer, config.train))
        )
        times["train"].append(statistics.median(of_train(setup, models[1], config, task, steps)))
    size = first.config
    label = f"a step of {name} / one of the Trainer, {size.num_hidden_layers} x {size.hidden_size}"
    return ratio_row(label, times, "train", "Trainer")


def rows(setup: Setup) -> Iterator[Row]:
    """Yield the loop, the parts of a step, and attention within a step and by itself."""
    hf.logging.set_verbosity_error()
    data = {"data": setup.data, "tokenizer": f"hf:{setup.model}", "max_length": 64}
    train = TrainOptions(
        steps=10_000, batch_size=setup.size(16, 2), learning_rate=3e-5, schedule="linear"
    )
    config = RunConfig("text_classification", data, train=train, start=StartOptions(setup.model))
    task = build_task(config.task, config.task_options)
    first: Any = build_run_model(config, task)
    penalty, constrain = PenaltyOptions(key=1e-2), ConstrainOptions("query")
    watched = replace(train, monitor=10)
    added: dict[str, dict[str, Any]] = {
        "train": {},
        "train with key penalty": {"penalty": penalty},
        "train with orthogonal queries": {"constrain": constrain},
        "train with monitor": {"train": watched},
        "train with key penalty, orthogonal queries and monitor": {
            "penalty": penalty, "constrain": constrain, "train": watched,
        },
    }  # fmt: skip
    tokenizer = hf.AutoTokenizer.from_pretrained(str(setup.model))
    for name, options in added.items():
        yield loop_row(setup, first, replace(config, **options), task, tokenizer, name)

    rounds = setup.rounds_of(12)
    batches = MicroBatches(task, train.batch_size, 0).take(rounds + 1)
    columns = ("input_ids", "attention_mask", "labels")
    batches = [{name: batch[name] for name in columns} for batch in batches]
    sides = extras(first, batches[0])
    times = setup.interleave(sides, rounds)
    for name in list(sides)[1:]:
        yield ratio_row(f"{name}, share of a step", times, name, "a whole step")

    copies = {name: copy.deepcopy(first).train() for name in ("sdpa", *register_attention())}
    for name, model in copies.items():
        model.set_attn_implementation(name)
    taken = {name: plain_step(model) for name, model in copies.items()}
    queues = {name: iter(batches) for name in copies}
    of_steps = setup.interleave(
        {name: lambda name=name: taken[name](next(queues[name])) for name in copies}, rounds
    )
    alone = setup.interleave(attention_alone(first, (train.batch_size, 64)), 3 * rounds)
    for part, times in (("a whole step", of_steps), ("attention alone", alone)):
        for name in list(copies)[1:]:
            yield ratio_row(f"{name} / sdpa, {part}", times, name, "sdpa")


BENCHMARK = Benchmark(
    "fine-tuning an encoder: train over the Trainer, penalties, constraints, attention; --model M --data TABLE",
    "loop <= 1.05, with options and attention <= 1.10", 18, rows, needs=("model", "data"),
    goals=(
        Goal("a step of train / one of the Trainer*", "<= 1.05"),
        Goal("a step of train with *", "<= 1.1", PRODUCTS),
        Goal("wellposed_l2 / sdpa*", "<= 1.1", SHORT),
        Goal("wellposed_cosine / sdpa*", "<= 1.1", SHORT),
    ),
)  # fmt: skip
