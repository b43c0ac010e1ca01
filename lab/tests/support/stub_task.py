"""A task and a model as small as the loop allows; also run as a script, by the tests that signal or
kill a process."""

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import jsonschema
import torch
from torch import nn

from wellposed.errors import WellposedError
from wellposed.model_options import ModelOptions
from wellposed_lab.tasks.batches import pad_examples
from wellposed_lab.tasks.task import Task
from wellposed_lab.training.config import RunConfig, TrainOptions
from wellposed_lab.training.folder.result import result_schema
from wellposed_lab.training.loop.train import train

VOCABULARY = 11


class StubTask(Task):
    """Predict the next of a few tokens; examples differ in length, so targets are spread unevenly
    over batches."""

    name: ClassVar = "stub"
    kind: ClassVar = "causal_lm"
    headline: ClassVar = "nats"
    higher_is_better: ClassVar = False
    sizes: ClassVar[Mapping[str, int]] = {"train": 23, "valid": 6, "test": 5}

    def __init__(self, delay=0.0):
        self.delay = delay
        self.read = []
        generator = torch.Generator().manual_seed(1)

        def example():
            length = int(torch.randint(2, 9, (1,), generator=generator))
            return torch.randint(1, VOCABULARY, (length,), generator=generator)

        self._data = {split: [example() for _ in range(size)] for split, size in self.sizes.items()}

    def _build_tokenizer(self):
        raise NotImplementedError("the stub has token ids and no text")

    def model_kwargs(self):
        return {"vocab_size": VOCABULARY}

    def dataset(self, split):
        return [{"input_ids": tokens.tolist()} for tokens in self._data[split]]

    def lengths(self, split):
        return [len(tokens) for tokens in self._data[split]]

    def collate(self, examples):
        time.sleep(self.delay)
        batch = pad_examples(examples, pad_id=0)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return {**batch, "labels": labels}

    def batches(self, split, batch_size, *, seed, epoch):
        self.read.append(split)
        order = list(range(len(self._data[split])))
        if split == "train":
            generator = torch.Generator().manual_seed(1000 * seed + epoch)
            order = torch.randperm(len(order), generator=generator).tolist()
        return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]

    def loss_sum(self, logits, batch, *, label_smoothing=0.0):
        labels = batch["labels"][:, 1:].reshape(-1)
        wide = logits[:, :-1].to(torch.promote_types(logits.dtype, torch.float32))
        total = nn.functional.cross_entropy(
            wide.reshape(-1, VOCABULARY), labels, reduction="sum", label_smoothing=label_smoothing
        )
        return total, (labels != -100).sum()

    def metric_sums(self, logits, batch):
        total, count = self.loss_sum(logits, batch)
        return {"nats": (float(total), float(count))}

    def reference(self):
        return {"nats": 2.3}

    def description(self):
        return {"source": "stub"}


class Block(nn.Module):
    """x + tanh(W x), with dropout."""

    def __init__(self, width, dropout):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(torch.tanh(self.inner(x)))


class StubModel(nn.Module):
    """Embedding, blocks, and the embedding again as the output layer."""

    def __init__(self, width=8, depth=2, dropout=0.0, extra_draws=0):
        super().__init__()
        torch.rand(extra_draws)
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids, attention_mask):
        del attention_mask
        x = self.embedding(input_ids)
        for block in self.blocks:
            x = block(x)
        return SimpleNamespace(logits=self.head(x))


def make_model(config, task):
    """Build the stub model with the width and dropout of ``config``."""
    return StubModel(config.model.hidden_size, config.model.num_hidden_layers, config.model.dropout)


def make_config(*, dropout=0.0, variant="post_ln", **options):
    """Return a configuration of a few steps."""
    values = {
        "steps": 12, "batch_size": 4, "eval_every": 4, "checkpoint_every": 4, "log_every": 2, "learning_rate": 0.05,
        "schedule": "constant",
    }  # fmt: skip
    model = ModelOptions(hidden_size=8, num_attention_heads=2, num_hidden_layers=2, dropout=dropout)
    train_options = TrainOptions(**{**values, **options})
    return RunConfig("stub", variant=variant, model=model, train=train_options)


def run(config, out, **keywords):
    """Train the stub without a progress bar, and check the form of its result."""
    quiet = {"progress": False, "task": StubTask(), "model": make_model, "command": []}
    result = train(config, out, **{**quiet, **keywords})
    jsonschema.validate(result.result, result_schema())
    return result


if __name__ == "__main__":
    # stub.py OUT STEPS DELAY [DROPOUT RESUME]: train slowly, with time for a signal; or be one of
    # several.
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    steps = int(sys.argv[2])
    delay = float(sys.argv[3])
    dropout, resume = (float(sys.argv[4]), sys.argv[5]) if len(sys.argv) > 4 else (0.1, "auto")
    every = {"log_every": 1, "eval_every": 5, "checkpoint_every": 3}
    config = make_config(steps=steps, dropout=dropout, **every)
    try:
        result = run(config, out, resume=resume, task=StubTask(delay), progress=True)
    except WellposedError as error:
        sys.exit(str(error))
    print(result.status)
    sys.exit(result.exit_code)
