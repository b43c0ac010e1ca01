"""Time of one step of `wellposed_lab.training.loop.train.train` over a bare PyTorch loop.

Both train the same model on the same batches and must end at the same weights. Our step includes
batches, loss, clipping, the guard against non-finite values, AdamW, counting, and a row of
metrics.jsonl every ten steps. The bare loop has the same collation, or (harder) ready batches.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from benchmarks.rows import Benchmark, Call, Goal, Row, Setup, ratio_row, single
from benchmarks.start import begun
from wellposed.model_options import ModelOptions
from wellposed_lab.tasks.task import Task, build_task
from wellposed_lab.training.config import RunConfig, TrainOptions
from wellposed_lab.training.loop.batches import Batch, MicroBatches
from wellposed_lab.training.loop.build import build_optimizer, build_run_model, set_learning_rate
from wellposed_lab.training.loop.train import take_step

GUARDS = (
    "The step also takes and collates its batch, counts, and tests whether the loss is finite."
    " These tenths of a millisecond show in a step of 17 ms on ready batches."
)
CASES = {
    "char_lm, 3 layers, D = 128, 32 x 128 tokens": RunConfig(
        "char_lm",
        {"limit_chars": 200_000, "seq_len": 128},
        model=ModelOptions(hidden_size=128, num_hidden_layers=3),
        train=TrainOptions(batch_size=32, schedule="constant"),
    ),
    "listops, 2 layers, D = 128, 32 x 6..49 tokens": RunConfig(
        "listops",
        model=ModelOptions(hidden_size=128),
        train=TrainOptions(batch_size=32, schedule="constant"),
    ),
}


def bare_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    next_batch: Callable[[], Batch],
    config: RunConfig,
    kind: str,
) -> None:
    set_learning_rate(optimizer, config.train.learning_rate)
    batch = next_batch()
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = batch["labels"]
    if kind == "causal_lm":
        logits, labels = logits[:, :-1], labels[:, 1:]
    loss = cross_entropy(
        logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=-100
    )
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def sides_of(
    config: RunConfig, task: Task, models: list[torch.nn.Module], steps: int, folder: Path
) -> dict[str, Call]:
    """Return a step of ours, of the bare loop, and of the bare loop on ready batches."""
    size, seed = config.train.batch_size, config.train.seed
    run = begun(config, folder, task, models[0])
    collated = MicroBatches(task, size, seed)
    ready = iter(MicroBatches(task, size, seed).take(steps))
    first, second = (build_optimizer(model, config.train) for model in models[1:])
    return {
        "train": lambda: take_step(run),
        "bare loop": lambda: bare_step(
            models[1], first, lambda: collated.take(1)[0], config, task.kind
        ),
        "bare loop, ready batches": lambda: bare_step(
            models[2], second, lambda: next(ready), config, task.kind
        ),
    }


def rows(setup: Setup) -> Iterator[Row]:
    rounds = setup.rounds_of(200)
    for name, config in list(CASES.items())[setup.size(0, 1) :]:
        task = build_task(config.task, config.task_options)
        torch.manual_seed(0)
        first = build_run_model(config, task)
        models = [copy.deepcopy(first) for _ in range(3)]
        with tempfile.TemporaryDirectory() as folder:
            sides = sides_of(config, task, models, rounds + 1, Path(folder))
            times = setup.interleave(sides, rounds)
        for other in list(sides)[1:]:
            yield ratio_row(f"a step of train / {other}, {name}", times, "train", other)
        pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
        apart = max(float((ours - bare).detach().abs().max()) for ours, bare in pairs)
        yield single(f"largest difference of the weights after {rounds + 1} steps, {name}", apart)


BENCHMARK = Benchmark(
    "a step of train over a bare PyTorch loop of the same model on the same batches",
    "<= 1.05",
    4,
    rows,
    goals=(Goal("a step of train*", "<= 1.05", GUARDS),),
)
