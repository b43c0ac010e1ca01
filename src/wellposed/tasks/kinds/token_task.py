"""What all tasks of token ids share: the encoder that made them, the examples of each split, the
description."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from wellposed.tasks.task import Example, Split, Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Examples = TypeVar("Examples", bound=Sequence[Example])


class Encoder(Protocol):
    """A vocabulary, and the tokenizer that is saved beside the model."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def pad_id(self) -> int: ...
    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_id(self) -> int | None: ...
    def tokenizer(self, *, max_length: int) -> PreTrainedTokenizerFast: ...
    def description(self) -> dict[str, Any]: ...


class TokenTask(Task, Generic[Examples]):
    """A task whose examples are token ids, all of them made when the task is built."""

    def __init__(
        self,
        *,
        encoder: Encoder,
        examples: Mapping[Split, Examples],
        max_length: int,
        source: Mapping[str, Any],
        details: Mapping[str, Any],
    ) -> None:
        self._encoder = encoder
        self._examples = dict(examples)
        self._max_length = max_length
        self._source, self._details = source, details

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
        described = {"task": self.name, **self._source, "tokenizer": self._encoder.description()}
        return {**described, **self._describe_examples(), **self._details}

    @abstractmethod
    def _describe_examples(self) -> dict[str, Any]:
        """Return the sizes of the splits."""
