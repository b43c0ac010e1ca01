"""Time of one step of `wellposed.training.train` against a bare PyTorch loop of the same model on the same batches.

    python benchmarks/loop.py [--steps 60] [--threads 2]

Both sides run in one process, turn by turn, so that a busy machine slows both; medians are compared, of processor time
with one thread (other work on the machine does not count) and of the clock otherwise. The loop's step
has everything in it: taking and collating the batch, the loss, clipping, the guard against values that are not finite,
AdamW, counting, and a row of metrics.jsonl every ten steps. The bare loop is given the same collation, or (the harder
comparison, printed beside it) batches made beforehand.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy

from wellposed.tasks import Task, build_task
from wellposed.training import ModelOptions, RunConfig, TrainOptions
from wellposed.training._batches import Batch, MicroBatches
from wellposed.training._build import build_run_model
from wellposed.training._loop import Run
from wellposed.training._metrics import MetricsFile
from wellposed.training._optimizer import build_optimizer, set_learning_rate
from wellposed.training._progress import Progress

WARMUP = 5
CASES = {
    "char_lm, 3 layers, D=128, 32 x 128 tokens": RunConfig(
        "char_lm",
        {"limit_chars": 200_000, "seq_len": 128},
        model=ModelOptions(hidden_size=128, num_hidden_layers=3),
        train=TrainOptions(batch_size=32, schedule="constant"),
    ),
    "listops, 2 layers, D=128, 32 x 6..49 tokens": RunConfig(
        "listops", model=ModelOptions(hidden_size=128), train=TrainOptions(batch_size=32, schedule="constant")
    ),
}


@dataclass(frozen=True)
class Timing:
    """Median seconds of a step, by the clock and of the processor: our loop, a bare one, one on ready batches."""

    clock: tuple[float, ...]
    processor: tuple[float, ...]
    difference: float


def bare_step(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    next_batch: Callable[[], Batch],
    config: RunConfig,
    kind: str,
) -> None:
    """Take a step as a tutorial would write it."""
    set_learning_rate(optimizer, config.train.learning_rate)
    batch = next_batch()
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    labels = batch["labels"]
    if kind == "causal_lm":
        logits, labels = logits[:, :-1], labels[:, 1:]
    loss = cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=-100)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.train.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def measure(config: RunConfig, task: Task, steps: int, folder: Path) -> Timing:
    """Time both loops turn by turn; `difference` is the largest one between their weights afterwards."""
    torch.manual_seed(0)
    first = build_run_model(config, task)
    copies = [copy.deepcopy(first) for _ in range(3)]
    size, seed = config.train.batch_size, config.train.seed
    run = Run(config, folder, task, copies[0], Accelerator(mixed_precision="no", cpu=True))
    run.batches = MicroBatches(task, size, seed)
    run.progress = Progress(enabled=False, steps=steps, description="")
    run.metrics = MetricsFile(folder)
    run._began = time.monotonic()
    collated = MicroBatches(task, size, seed)
    ready = iter(MicroBatches(task, size, seed).take(steps + WARMUP))
    optimizers = [build_optimizer(model, config.train) for model in copies[1:]]
    kind = task.kind
    sides: list[Callable[[], None]] = [
        run._step,
        lambda: bare_step(copies[1], optimizers[0], lambda: collated.take(1)[0], config, kind),
        lambda: bare_step(copies[2], optimizers[1], lambda: next(ready), config, kind),
    ]
    clock: list[list[float]] = [[] for _ in sides]
    processor: list[list[float]] = [[] for _ in sides]
    for step in range(steps + WARMUP):
        for side in ((step + shift) % len(sides) for shift in range(len(sides))):
            began, spent = time.perf_counter(), time.process_time()
            sides[side]()
            if step >= WARMUP:
                clock[side].append(time.perf_counter() - began)
                processor[side].append(time.process_time() - spent)
    pairs = zip(copies[0].parameters(), copies[1].parameters(), strict=True)
    difference = max(float((ours - bare).detach().abs().max()) for ours, bare in pairs)
    return Timing(tuple(map(statistics.median, clock)), tuple(map(statistics.median, processor)), difference)


def main() -> None:
    """Print one row per case, and the row for RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for name, config in CASES.items():
        task = build_task(config.task, config.task_options)
        with tempfile.TemporaryDirectory() as folder:
            timing = measure(config, task, arguments.steps, Path(folder))
        for unit, (ours, bare, ready) in (("clock", timing.clock), ("processor", timing.processor)):
            print(
                f"{name}, {unit}: loop {ours * 1e3:.2f} ms, bare {bare * 1e3:.2f} ms ({ours / bare:.3f}), "
                f"bare on ready batches {ready * 1e3:.2f} ms ({ours / ready:.3f})"
            )
        print(f"weights differ by at most {timing.difference:.1e}")
        ours, bare, ready = timing.processor if arguments.threads == 1 else timing.clock
        print(
            f"| train step / bare PyTorch loop, {name} | fp32, CPU threads: {arguments.threads}, "
            f"torch {torch.__version__} | {ours / bare:.3f} (ready batches: {ours / ready:.3f}) | <= 1.05 |\n"
        )


if __name__ == "__main__":
    main()
