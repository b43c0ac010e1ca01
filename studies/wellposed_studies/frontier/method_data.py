"""The numbers and the data of a training of `frontier/methods` or `frontier/classifiers`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor, nn

KINDS = ("ours", "llama")
"""Language models whose methods are compared."""
CLASSIFIER = "classifier"
OUR_MODELS = ("ours", CLASSIFIER)
"""Those that take the options of a method."""
NANOGPT = "gpt2"
"""The architecture of nanoGPT, by Hugging Face: the public loss is of this model."""
TRAIN = 0.9
"""Part of the text that trains; the rest is valid, and there is no test, as in nanoGPT."""
Batch = Mapping[str, "Tensor"]
Split = Literal["train", "valid"]


@dataclass(frozen=True)
class Training:
    """Everything that a run depends on, apart from the text."""

    model: str
    """One of `KINDS`, `CLASSIFIER` or `NANOGPT`."""
    method: str
    rate: float
    seed: int
    steps: int
    layers: int
    width: int
    heads: int
    block: int
    batch: int
    warmup: int
    decay: float
    dropout: float = 0.0


class Data(Protocol):
    """Batches drawn by the seed alone, so that all methods read the same, and the loss on valid."""

    @property
    def vocabulary(self) -> int: ...

    @property
    def num_labels(self) -> int:
        """Classes of a classifier; 0 for a language model."""
        ...

    @property
    def constant_loss(self) -> float:
        """The least loss on valid of a predictor that reads nothing."""
        ...

    @property
    def pairs_loss(self) -> float | None:
        """The loss on valid of a table of pairs of tokens, which blocks that return their inputs can
        learn; None for a classifier."""
        ...

    @property
    def read(self) -> str:
        """How much of train is read, in words."""
        ...

    def batches(self, training: Training, split: Split = "train") -> Iterator[Batch]:
        """Yield a batch for each step."""
        ...

    def valid_batches(self, training: Training) -> Iterator[Batch]:
        """Yield all of valid, once."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss of a batch, in nats."""
        ...


@dataclass(frozen=True)
class Text:
    """Token ids of a text, cut as nanoGPT cuts it: the first nine tenths train."""

    train: Tensor
    valid: Tensor
    vocabulary: int
    num_labels: int = 0

    @property
    def read(self) -> str:
        return f"{len(self.train):,} characters"

    @property
    def constant_loss(self) -> float:
        """The entropy of the tokens of valid."""
        return _entropy(self.valid)

    @property
    def pairs_loss(self) -> float:
        """The loss of the counts of pairs in train, each increased by one."""
        import torch

        size = self.vocabulary
        pairs = self.train[:-1] * size + self.train[1:]
        counts = 1.0 + torch.bincount(pairs, minlength=size * size).double().view(size, size)
        logs = (counts / counts.sum(1, keepdim=True)).log()
        return -float(logs[self.valid[:-1], self.valid[1:]].mean())

    def batches(self, training: Training, split: Split = "train") -> Iterator[Batch]:
        """Yield random windows of the text."""
        import torch

        tokens = self.train if split == "train" else self.valid
        generator = torch.Generator().manual_seed(training.seed)
        window = torch.arange(training.block + 1)
        for _ in range(training.steps):
            high = len(tokens) - training.block
            first = torch.randint(high, (training.batch, 1), generator=generator)
            yield _predicted(tokens[first + window])

    def valid_batches(self, training: Training) -> Iterator[Batch]:
        """Yield the windows of valid, one after the other."""
        import torch

        rows = (len(self.valid) - 1) // training.block
        starts = torch.arange(rows)[:, None] * training.block
        windows = self.valid[starts + torch.arange(training.block + 1)]
        yield from map(_predicted, windows.split(8 * training.batch))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the cross-entropy of the next character."""
        from torch.nn import functional as F

        logits = model(input_ids=batch["input_ids"]).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten())


def _predicted(windows: Tensor) -> Batch:
    """Return the batch of windows (rows, T + 1): T characters, and those that follow them."""
    return {"input_ids": windows[:, :-1], "labels": windows[:, 1:]}


def read_text(data: str | None, limit: int | None) -> Text:
    """Return the characters of a text of the task ``char_lm``."""
    import torch

    from wellposed_lab.tasks.task import build_task

    options = {"data": data, "limit_chars": limit}
    task: Any = build_task("char_lm", {name: value for name, value in options.items() if value})
    splits = (torch.as_tensor(task.dataset(split).tokens) for split in ("train", "valid", "test"))
    stream = torch.cat([tokens.long() for tokens in splits])
    cut = int(TRAIN * len(stream))
    return Text(stream[:cut], stream[cut:], int(stream.max()) + 1)


@dataclass(frozen=True)
class LabelledTexts:
    """Texts with labels, of the task ``text_classification``."""

    task: Any
    pairs_loss: None = None

    @property
    def vocabulary(self) -> int:
        return self.task.model_kwargs()["vocab_size"]

    @property
    def num_labels(self) -> int:
        return self.task.model_kwargs()["num_labels"]

    @property
    def read(self) -> str:
        return f"{len(self.task.dataset('train')):,} texts"

    @property
    def constant_loss(self) -> float:
        """The entropy of the labels of valid."""
        import torch

        return _entropy(torch.as_tensor(self.task.split_labels("valid")).long())

    def batches(self, training: Training, split: Split = "train") -> Iterator[Batch]:
        """Yield random texts, padded to the longest of the batch."""
        import torch

        examples = self.task.dataset(split)
        generator = torch.Generator().manual_seed(training.seed)
        for _ in range(training.steps):
            chosen = torch.randint(len(examples), (training.batch,), generator=generator)
            yield self.task.collate([examples[index] for index in chosen.tolist()])

    def valid_batches(self, training: Training) -> Iterator[Batch]:
        """Yield the texts of valid in their order."""
        valid = self.task.dataset("valid")
        size = 4 * training.batch
        for start in range(0, len(valid), size):
            stop = min(start + size, len(valid))
            yield self.task.collate([valid[index] for index in range(start, stop)])

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the cross-entropy of the labels."""
        from torch.nn import functional as F

        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        return F.cross_entropy(model(**inputs).logits.float(), batch["labels"])


def read_labelled(data: str | None, limit: int | None, block: int) -> LabelledTexts:
    """Return the texts of the task ``text_classification``, cut to ``block`` words."""
    from wellposed_lab.tasks.task import build_task

    options: dict[str, Any] = {"data": data or "builtin", "max_length": block}
    if limit is not None:
        options["limit_train"] = limit
    return LabelledTexts(build_task("text_classification", options))


def _entropy(tokens: Tensor) -> float:
    import torch

    shares = torch.bincount(tokens).double() / len(tokens)
    return float(torch.special.entr(shares).sum())
