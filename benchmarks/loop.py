"""Time of one step of `wellposed.training.train` against a bare PyTorch loop of the same model on the same batches.

    python benchmarks/loop.py [--steps 200] [--threads 1]

Both sides run in one process, turn by turn. The ratio is 1 + (median over rounds of loop - bare) / (median of bare),
with a 95 % bootstrap interval: rounds are paired, since on a busy machine medians of separate sides drift apart by
several percent. One thread is timed in processor time, several by the clock, which other work on the machine disturbs.
Our step has everything in it: taking and collating the batch, the loss, clipping, the guard against values that are
not finite, AdamW, counting, and a row of metrics.jsonl every ten steps. The bare loop is given the same collation, or
(the harder comparison, printed beside it) batches made beforehand.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy

from wellposed.tasks import Task, build_task
from wellposed.training import ModelOptions, RunConfig, TrainOptions
from wellposed.training.batches import Batch, MicroBatches
from wellposed.training.build import build_run_model
from wellposed.training.loop import take_step
from wellposed.training.metrics import MetricsFile
from wellposed.training.optimizer import build_optimizer, set_learning_rate
from wellposed.training.progress import Progress
from wellposed.training.run import Run

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


Rounds = list[tuple[float, ...]]


def ratio(rounds: Rounds, against: int) -> str:
    """Return how many times a step of side ``against`` ours takes, and the 95 % interval."""
    bare = statistics.median(times[against] for times in rounds)
    extra = [times[0] - times[against] for times in rounds]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(extra, k=len(extra))) for _ in range(1000))
    middle, low, high = (1 + value / bare for value in (statistics.median(extra), medians[25], medians[975]))
    return f"{middle:.3f} [{low:.3f}, {high:.3f}]"


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


def measure(
    config: RunConfig, task: Task, steps: int, clock: Callable[[], float], folder: Path
) -> tuple[Rounds, float]:
    """Return the seconds of each round (ours, bare, bare on ready batches), and how far the weights end up apart."""
    torch.manual_seed(0)
    first = build_run_model(config, task)
    copies = [copy.deepcopy(first) for _ in range(3)]
    size, seed = config.train.batch_size, config.train.seed
    run = Run(config, folder, task, copies[0], Accelerator(mixed_precision="no", cpu=True))
    run.progress = Progress(enabled=False, steps=steps, description="")
    run.metrics = MetricsFile(folder)
    run.begin(None)
    collated = MicroBatches(task, size, seed)
    ready = iter(MicroBatches(task, size, seed).take(steps + WARMUP))
    optimizers = [build_optimizer(model, config.train) for model in copies[1:]]
    kind = task.kind
    sides: list[Callable[[], None]] = [
        lambda: take_step(run),
        lambda: bare_step(copies[1], optimizers[0], lambda: collated.take(1)[0], config, kind),
        lambda: bare_step(copies[2], optimizers[1], lambda: next(ready), config, kind),
    ]
    rounds: Rounds = []
    for step in range(steps + WARMUP):
        times = [0.0] * len(sides)
        for side in ((step + shift) % len(sides) for shift in range(len(sides))):
            began = clock()
            sides[side]()
            times[side] = clock() - began
        rounds.append(tuple(times))
    pairs = zip(copies[0].parameters(), copies[1].parameters(), strict=True)
    difference = max(float((ours - bare).detach().abs().max()) for ours, bare in pairs)
    return rounds[WARMUP:], difference


def main() -> None:
    """Print one row per case, and the row for RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    clock, unit = (time.process_time, "processor") if arguments.threads == 1 else (time.perf_counter, "clock")
    for name, config in CASES.items():
        task = build_task(config.task, config.task_options)
        with tempfile.TemporaryDirectory() as folder:
            rounds, difference = measure(config, task, arguments.steps, clock, Path(folder))
        medians = ", ".join(f"{statistics.median(side) * 1e3:.2f}" for side in zip(*rounds, strict=True))
        print(f"{name}: {medians} ms ({unit}; loop, bare, bare on ready batches); weights differ by {difference:.1e}")
        print(
            f"| train step / bare PyTorch loop, {name} | fp32, CPU threads: {arguments.threads}, torch "
            f"{torch.__version__}, {unit} time | {ratio(rounds, 1)}; ready batches {ratio(rounds, 2)} | <= 1.05 |\n",
            flush=True,
        )


if __name__ == "__main__":
    main()
