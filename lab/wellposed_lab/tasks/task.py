"""Tasks: data, batches, loss and metric of one problem. Free of torch until a batch is built.

A new task is a file: frozen options, and a `Task` subclass under a `register_task` line.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeAlias, TypeVar

from wellposed.options import build_options
from wellposed.registry import Registry
from wellposed_lab.tasks.batches import IGNORED_LABEL, Example, bucketed_batches, shuffle_key
from wellposed_lab.tasks.data.splits import Split

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor, nn
    from transformers import PreTrainedTokenizerFast

Kind: TypeAlias = Literal[
    "causal_lm",
    "sequence_classification",
    "seq2seq_lm",
    "sequence_pair_classification",
    "image_classification",
]
Batch: TypeAlias = "Mapping[str, Tensor]"
Sums: TypeAlias = "dict[str, tuple[float, float]]"
"""Sum and count of each metric."""
Examples = TypeVar("Examples", bound="Sequence[Example]")


class Task(ABC):
    """One problem: three splits of examples, deterministic batches, and losses and metrics.

    They are (sum, count) pairs, so totals over batches, micro-batches and processes are exact for
    any padding. Nothing depends on the model or the variant: the same ``(split, batch_size, seed,
    epoch)`` gives every variant the same batches in the same order.
    """

    name: ClassVar[str]
    """Registered name; `register_task` sets it."""
    kind: ClassVar[Kind]
    """Head that the model needs."""
    headline: ClassVar[str]
    """Metric that a table shows first."""
    higher_is_better: ClassVar[bool]
    """Direction of the headline metric."""
    report_headline: ClassVar[str | None] = None
    """Metric of generated text that a report shows first, or None."""

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        """Tokenizer saved with the model; built on first use, as it imports transformers."""
        return self._build_tokenizer()

    @abstractmethod
    def _build_tokenizer(self) -> PreTrainedTokenizerFast: ...

    @property
    def processor(self) -> Any:
        """The tokenizer or image processor, saved with the model to read inputs as in training."""
        return self.tokenizer

    @abstractmethod
    def model_kwargs(self) -> dict[str, Any]:
        """Return what data fixes in a model's config: vocabulary, positions, pad token, labels."""

    @abstractmethod
    def dataset(self, split: Split) -> Sequence[Example]:
        """Return the examples of a split by index, each a dict of lists of integers."""

    @abstractmethod
    def lengths(self, split: Split) -> Sequence[int]:
        """Return the number of tokens of each example of a split, without building them."""

    @abstractmethod
    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        """Return the padded inputs of examples and ``labels``.

        Texts give ``input_ids`` and ``attention_mask`` (batch, tokens), 1 on real tokens. A
        language model's labels are -100 on padding and not shifted. Images give ``pixel_values``
        (batch, channels, height, width).
        """

    def batches(self, split: Split, batch_size: int, *, seed: int, epoch: int) -> list[list[int]]:
        """Return the batches of one pass over a split, as indices into `dataset`: each example
        once, at most one batch smaller. Only train is shuffled, by (seed, epoch)."""
        key = shuffle_key(split, seed, epoch)
        return bucketed_batches(self.lengths(split), batch_size, shuffle=key)

    def loss_sum(
        self, logits: Tensor, batch: Batch, *, label_smoothing: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Return summed float32 cross entropy in nats (causal labels are shifted) and its count."""
        causal = self.kind == "causal_lm"
        loss = causal_cross_entropy_sum if causal else cross_entropy_sum
        return loss(logits, batch["labels"], label_smoothing=label_smoothing)

    def target_count(self, batch: Batch) -> int:
        """Return the number of predictions in `loss_sum`: labels other than -100, without the first
        token of a language model, which nothing predicts."""
        labels = batch["labels"][:, 1:] if self.kind == "causal_lm" else batch["labels"]
        return int((labels != IGNORED_LABEL).sum())

    @abstractmethod
    def metric_sums(self, logits: Tensor, batch: Batch) -> Sums:
        """Return (sum, count) per metric of one batch, to be added up for `summarize`."""

    def summarize(self, totals: Sums) -> dict[str, float]:
        """Return the metrics of added-up (sum, count) pairs; by default their means."""
        return {name: total / count for name, (total, count) in totals.items()}

    def generate_metrics(
        self,
        model: nn.Module,
        split: Split,
        *,
        batch_size: int,
        notify: Callable[[int, int], None] | None = None,
    ) -> dict[str, float]:
        """Return the scores of texts that ``model`` generates for a split; by default none. They
        are computed once, on valid and test, with the final weights.

        Args:
            model: The trained model; its mode is restored.
            split: Valid or test.
            batch_size: Most examples at a time.
            notify: Called after every token with the numbers of finished texts and of all; an
                exception from it ends the generation.
        """
        del model, split, batch_size, notify
        return {}

    def describe_generation(self) -> dict[str, Any]:
        """Return the settings of the search and the scores of `generate_metrics`."""
        return {}

    def watch(self, model: nn.Module) -> dict[str, float]:
        """Return metrics of the weights, logged with each evaluation on *valid*; by default none."""
        del model
        return {}

    @abstractmethod
    def reference(self) -> dict[str, float]:
        """Return the metrics on valid of the best predictor that ignores its input."""

    def train_reference(self, split: Split) -> dict[str, float]:
        """Return the metrics on a split of *train*'s best constant answer; by default none."""
        del split
        return {}

    @abstractmethod
    def description(self) -> dict[str, Any]:
        """Return the source of the data (files, sha256, sizes) and what was cut or mapped."""


class TokenTask(Task, Generic[Examples]):
    """A task whose examples are token ids, computed when it is built. ``encoder`` is like
    `wellposed_lab.tasks.text.tokenizers.TextEncoder`."""

    def __init__(
        self,
        *,
        encoder: Any,
        examples: Mapping[Split, Examples],
        max_length: int,
        described: Mapping[str, Any],
    ) -> None:
        self._encoder = encoder
        self._examples = dict(examples)
        self._max_length = max_length
        self._described = described

    def _build_tokenizer(self) -> PreTrainedTokenizerFast:
        return self._encoder.tokenizer(max_length=self._max_length)

    def model_kwargs(self) -> dict[str, Any]:
        return {
            "vocab_size": self._encoder.vocab_size,
            "max_position_embeddings": self._max_length,
            "pad_token_id": self._encoder.pad_id,
            "bos_token_id": self._encoder.bos_id,
            "eos_token_id": self._encoder.eos_id,
        }

    def dataset(self, split: Split) -> Examples:
        return self._examples[split]

    def description(self) -> dict[str, Any]:
        described = {"task": self.name, **self._described, **self._describe_examples()}
        return {**described, "tokenizer": self._encoder.description()}

    @abstractmethod
    def _describe_examples(self) -> dict[str, Any]:
        """Return the sizes of the splits."""


class TokenLossTask(TokenTask[Examples]):
    """A task that predicts tokens one by one, measured by the mean of -ln p."""

    higher_is_better: ClassVar[bool] = False
    nats_name: ClassVar[str]
    """Name of the sum of -ln p among `metric_sums`."""

    def metric_sums(self, logits: Tensor, batch: Batch) -> Sums:
        total, count = self.loss_sum(logits.detach(), batch)
        return {self.nats_name: (float(total), float(count))}

    def summarize(self, totals: Sums) -> dict[str, float]:
        total, count = totals[self.nats_name]
        return self._metrics(total / count)

    def _metrics(self, nats: float) -> dict[str, float]:
        return {self.nats_name: nats, "perplexity": perplexity(nats)}


@dataclass(frozen=True)
class TaskSpec:
    """A registered task: its options class and the function that builds it."""

    name: str
    options: type[Any]
    build: Callable[[Any], Task]
    summary: str
    own_models: bool = True
    """Whether a wellposed architecture can learn it, or only a model of the user's."""

    @property
    def kind(self) -> str:
        """Head that a model needs; empty if a function builds the task, and its options decide."""
        return getattr(self.build, "kind", "")


AnyTask = TypeVar("AnyTask", bound=Task)
_OF_STUDIES = ["dialogue", "image", "listops", "marked", "minbert", "pathfinder", "retrieval"]
TASKS: Registry[TaskSpec] = Registry(
    "task",
    entry_points="wellposed.tasks",
    elsewhere=dict.fromkeys(_OF_STUDIES, "wellposed-studies"),
)


def register_task(
    name: str, options: type[Any], summary: str, *, own_models: bool = True
) -> Callable[[type[AnyTask]], type[AnyTask]]:
    """Return a decorator that names and registers a task, to be built as ``task(options)``."""

    def register(task: type[AnyTask]) -> type[AnyTask]:
        task.name = name
        TASKS.register(name)(TaskSpec(name, options, task, summary, own_models))
        return task

    return register


def build_task(name: str, options: Mapping[str, Any] | None = None) -> Task:
    """Build the registered task ``name`` from plain values by field name of its options class.

    Raises:
        ConfigError: an unknown task or option (with the nearest three), a wrong type, or a missing
            value; it names every bad option.
        DataError: the data cannot be used; the message has the file and, if known, the line.

    >>> task = build_task("char_lm", {"limit_chars": 20000, "seq_len": 64})
    >>> task.kind, task.headline, len(task.dataset("train"))
    ('causal_lm', 'nats_per_char', 318)
    """
    spec = TASKS.get(name)
    return spec.build(build_options(spec.options, options or {}, where=f"task {name}"))


TARGETS = ("labels", "label_bytes")
"""Entries of a batch that losses and metrics read, and the model does not."""


def cross_entropy_sum(
    logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the sum of ``(1 - s) (-log p[y]) + s mean_c (-log p[c])`` and their number.

    Status: exact, in float32 nats; it carries gradient. ``s`` in [0, 1) is the label smoothing of
    Szegedy et al. 2016. Logits are (..., classes), of any float dtype; labels are (...) integers,
    -100 for none.

    >>> import torch
    >>> total, count = cross_entropy_sum(torch.zeros(2, 4), torch.tensor([1, -100]))
    >>> round(float(total), 4), float(count)
    (1.3863, 1.0)
    """
    import torch

    flat = logits.reshape(-1, logits.shape[-1]).float()
    targets = labels.reshape(-1)
    total = torch.nn.functional.cross_entropy(
        flat, targets, reduction="sum", ignore_index=IGNORED_LABEL, label_smoothing=label_smoothing
    )
    return total, (targets != IGNORED_LABEL).sum().float()


def causal_cross_entropy_sum(
    logits: Tensor, labels: Tensor, *, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return `cross_entropy_sum`, where ``logits[:, t]`` predicts unshifted ``labels[:, t + 1]``.

    Logits are (batch, tokens, classes); labels (batch, tokens), -100 on padding.

    >>> import torch
    >>> total, count = causal_cross_entropy_sum(torch.zeros(1, 3, 4), torch.tensor([[1, 2, -100]]))
    >>> round(float(total), 4), float(count)
    (1.3863, 1.0)
    """
    return cross_entropy_sum(logits[:, :-1], labels[:, 1:], label_smoothing=label_smoothing)


def accuracy_sums(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return the number of rows whose largest logit is on the label, and the number of rows.

    >>> import torch
    >>> accuracy_sums(torch.tensor([[0.0, 1.0], [2.0, 1.0]]), torch.tensor([1, 1]))
    (1.0, 2.0)
    """
    return float((logits.argmax(-1) == labels).sum()), float(labels.numel())


def frequency_entropy(ids: NDArray[np.integer]) -> float:
    """Return the entropy in nats of the frequencies of ``ids``, the smallest loss without input."""
    import numpy as np

    counts = np.bincount(ids)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())


def unigram_nats(train: NDArray[np.integer], ids: NDArray[np.integer], vocab_size: int) -> float:
    """Return the mean of -ln p over ``ids``, with p by the counts in ``train``, plus one each.

    >>> import numpy as np
    >>> round(unigram_nats(np.array([0, 0, 1]), np.array([0, 2]), 3), 4)  # p = 3/6 and 1/6
    1.2425
    """
    import numpy as np

    counts = np.bincount(train, minlength=vocab_size) + 1.0
    return float(-np.log(counts[ids] / counts.sum()).mean())


def perplexity(nats: float) -> float:
    """Return e^nats, infinite if it overflows.

    >>> perplexity(0.0), perplexity(1e6)
    (1.0, inf)
    """
    return math.exp(nats) if nats < 709 else math.inf
