"""Fine-tuning an encoder of somebody else's: what the loop, a penalty, a constraint and L2 attention cost a step.

    python benchmarks/fine_tuning.py --from MODEL --data TABLE [--rounds 12] [--batch-size 16] [--max-length 64]

MODEL is a folder with weights and tokenizer, TABLE what ``wellposed compare text_classification --data`` takes. All
sides take steps of the same batches in one process, turn by turn on one thread in processor time, each with its own
copy of the model; a ratio is the median over rounds of a side over the plain step of the same round, with quartiles.
The Transformers Trainer cannot be stopped between two steps, so it and ``train`` alternate in blocks of steps. Batches
are made within the steps of both; evaluation, checkpoints and start are left out.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

import wellposed as wp
from wellposed.integrations import register_attention
from wellposed.tasks import Task, build_task
from wellposed.training import RunConfig, TrainOptions
from wellposed.training.batches import Batch, MicroBatches
from wellposed.training.build import build_run_model
from wellposed.training.config import StartOptions
from wellposed.training.loop import take_step
from wellposed.training.metrics import MetricsFile
from wellposed.training.progress import Progress
from wellposed.training.run import Run

Step = Callable[[Batch], None]


def timed(call: Callable[[], Any]) -> float:
    """Seconds of processor time of one call."""
    began = time.process_time()
    call()
    return time.process_time() - began


class StepTimes(hf.TrainerCallback):
    """Seconds from the beginning of one step to that of the next, taking its batch included."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Note the moment."""
        self.moments.append(time.process_time())

    def seconds(self) -> list[float]:
        """One number a step but the last."""
        return [after - before for before, after in zip(self.moments, self.moments[1:], strict=False)]


class Ordered(hf.Trainer):
    """A Trainer that takes the rows in the order given, as the other side does."""

    def get_train_dataloader(self) -> Any:
        """Batches without a shuffle."""
        rows: Any = self.train_dataset
        return DataLoader(rows, batch_size=self.args.per_device_train_batch_size, collate_fn=self.data_collator)


def rows_of(batches: list[Batch]) -> list[dict[str, Any]]:
    """Single rows without their padding, as a tokenized data set holds them."""
    rows = []
    for batch in batches:
        for row, mask in enumerate(batch["attention_mask"].bool()):
            columns = {name: batch[name][row][mask].tolist() for name in batch if batch[name].ndim == 2}
            rows.append({**columns, "labels": int(batch["labels"][row])})
    return rows


def of_trainer(model: nn.Module, rows: list[dict[str, Any]], tokenizer: Any, options: TrainOptions) -> list[float]:
    """Times of the steps of a Trainer over ``rows``."""
    times = StepTimes()
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
        Ordered(model, arguments, data_collator=collate, train_dataset=rows, callbacks=[times]).train()
    return times.seconds()


def of_train(model: nn.Module, config: RunConfig, task: Task, steps: int) -> list[float]:
    """Times of as many steps of ``train``."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(config, Path(folder), task, model, Accelerator(mixed_precision="no", cpu=True))
        run.progress = Progress(enabled=False, steps=steps, description="")
        run.metrics = MetricsFile(Path(folder))
        run.begin(None)
        return [timed(lambda: take_step(run)) for _ in range(steps)][1:]


def plain_step(model: nn.Module) -> Step:
    """A step as a tutorial would write it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5, weight_decay=0.0)

    def step(batch: Batch) -> None:
        loss: Any = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def extras(model: nn.Module, batch: Batch) -> dict[str, Callable[[], None]]:
    """A step, the parts of it that a constraint makes longer, and what a penalty adds to it."""
    copies = [copy.deepcopy(model).train() for _ in range(3)]
    optimizers = [torch.optim.AdamW(one.parameters(), lr=3e-5, weight_decay=0.0) for one in copies]
    wp.constrain_(copies[1], optimizers[1], roles=("query", "key"))
    for one in copies[:2]:
        one(**batch).loss.backward()

    def of_penalty(**roles: bool) -> Callable[[], None]:
        penalty = wp.OrthogonalityPenalty(copies[2], **wp.presets.mcgrath2024(**roles, strength=1e-2))
        return lambda: penalty().backward()

    step = plain_step(copy.deepcopy(model).train())
    return {
        "a whole step": lambda: step(batch),
        "AdamW": optimizers[0].step,
        "AdamW, query and key held orthogonal": optimizers[1].step,
        "penalty on the key": of_penalty(key=True),
        "penalty on key and query": of_penalty(key=True, query=True),
    }


def attention_alone(model: Any, shape: tuple[int, int]) -> dict[str, Callable[[], None]]:
    """One layer's attention, forward and backward, by every implementation."""
    heads, width = model.config.num_attention_heads, model.config.hidden_size // model.config.num_attention_heads
    leaves = [torch.randn(shape[0], shape[1], heads, width, requires_grad=True) for _ in range(3)]

    def call(name: str) -> Callable[[], None]:
        def run() -> None:
            query, key, value = (leaf.transpose(1, 2) for leaf in leaves)
            module = nn.Module()
            module.is_causal = False
            joined, _ = hf.AttentionInterface()[name](module, query, key, value, None, scaling=width**-0.5, dropout=0.0)
            joined.sum().backward()

        return run

    return {name: call(name) for name in ("sdpa", *register_attention())}


def table(sides: dict[str, Callable[[], None]], rounds: int) -> None:
    """Print each side over the first, medians of paired rounds."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        names = list(sides)
        for place in range(len(names)):
            name = names[(place + number) % len(names)]
            times[name].append(timed(sides[name]))
    base, *others = times
    print(f"  {base}: {1000 * statistics.median(times[base][1:]):.1f} ms")
    for name in others:
        ratios = sorted(ours / plain for ours, plain in zip(times[name][1:], times[base][1:], strict=True))
        low, middle, high = statistics.quantiles(ratios)
        print(f"  {name}: {middle:.3f} [{low:.3f}, {high:.3f}]", flush=True)


def main() -> None:
    """Print a row for every comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="model", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--max-length", type=int, default=64)
    options = parser.parse_args()
    torch.set_num_threads(1)
    hf.logging.set_verbosity_error()
    data = {"data": options.data, "tokenizer": f"hf:{options.model}", "max_length": options.max_length}
    train = TrainOptions(steps=10_000, batch_size=options.batch_size, learning_rate=3e-5, schedule="linear")
    config = RunConfig("text_classification", data, train=train, start=StartOptions(options.model))
    task = build_task(config.task, config.task_options)
    first: Any = build_run_model(config, task)
    batches = MicroBatches(task, options.batch_size, 0).take(options.rounds + 1)
    columns = ("input_ids", "attention_mask", "labels")
    batches = [{name: batch[name] for name in columns} for batch in batches]
    print(f"torch {torch.__version__}, transformers {hf.__version__}, batch {tuple(batches[0]['input_ids'].shape)}")

    print("a step of train over one of the Trainer (blocks)")
    tokenizer = hf.AutoTokenizer.from_pretrained(options.model)
    ours, theirs, steps = [], [], 8
    models = copy.deepcopy(first), copy.deepcopy(first)
    rows = rows_of(MicroBatches(task, options.batch_size, 0).take(steps))
    for _ in range(options.blocks):
        theirs.append(statistics.median(of_trainer(models[0], rows, tokenizer, train)))
        ours.append(statistics.median(of_train(models[1], config, task, steps)))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    milliseconds = 1000 * statistics.median(theirs)
    print(
        f"  {statistics.median(ratios):.3f} [{min(ratios):.3f}, {max(ratios):.3f}] of {milliseconds:.0f} ms", flush=True
    )

    print("parts over a whole step")
    table(extras(first, batches[0]), options.rounds)

    print("a step with another attention over sdpa")
    copies = {name: copy.deepcopy(first).train() for name in ("sdpa", *register_attention())}
    for name, model in copies.items():
        model.set_attn_implementation(name)
    taken = {name: plain_step(model) for name, model in copies.items()}
    queues = {name: iter(batches) for name in copies}
    table({name: lambda name=name: taken[name](next(queues[name])) for name in copies}, options.rounds)
    print("attention alone, forward and backward, over sdpa")
    table(attention_alone(first, (options.batch_size, options.max_length)), 3 * options.rounds)


if __name__ == "__main__":
    main()
