"""The tokenizer of a Hugging Face encoder-decoder for both sides of a pair, with the start token of
its decoder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from wellposed.errors import CheckpointError, ConfigError
from wellposed.tasks.batches.ragged import Ragged
from wellposed.tasks.text.pretrained import PretrainedEncoder
from wellposed.tasks.text.tokenizers import describe_unknown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class PretrainedPairEncoder:
    """Sources through the tokenizer, targets through its ``text_target``; every target must end
    with its end token.

    The decoder starts with the ``decoder_start_token_id`` of the model whose folder the tokenizer
    is in; where that names none, with the tokenizer's beginning or else padding token.
    """

    def __init__(self, name: str) -> None:
        self._encoder = PretrainedEncoder(name)
        self.vocab_size, self.pad_id = self._encoder.vocab_size, self._encoder.pad_id
        self.bos_id: int | None = self._encoder.bos_id
        self._tokenizer: Any = self._encoder.tokenizer()
        end = self._encoder.eos_id
        if end is None or self._targets([""])[0][-1:] != [end]:
            raise ConfigError(
                f"tokenizer {self._encoder.kind!r} puts no end token behind a target, so a decoder"
                " would never stop; give that of an encoder-decoder such as T5, BART or Marian"
            )
        self.eos_id: int = end
        start = _decoder_start(name)
        self.start_id: int = next(
            number for number in (start, self.bos_id, self.pad_id) if number is not None
        )

    def encode(self, texts: Sequence[str]) -> Ragged:
        """Return the ids of many source texts, special tokens included."""
        return self._encoder.encode(texts).ids

    def encode_targets(self, texts: Sequence[str]) -> Ragged:
        """Return the ids of many target texts, special tokens included."""
        return Ragged.from_lists(self._targets(texts))

    def unknown(self, texts: Iterable[str]) -> dict[str, Any]:
        """Return how many tokens of ``texts`` the vocabulary does not hold."""
        return describe_unknown(self._encoder.encode(list(texts)).unknown)

    def tokenizer(self, *, max_length: int) -> PreTrainedTokenizerFast:
        """Return the tokenizer that is saved beside the model."""
        return self._encoder.tokenizer(max_length=max_length)

    def description(self) -> dict[str, Any]:
        """Return kind, vocabulary size and the start token of the decoder."""
        return {**self._encoder.description(), "decoder_start_token_id": self.start_id}

    def _targets(self, texts: Sequence[str]) -> list[list[int]]:
        return self._tokenizer(text_target=list(texts), verbose=False)["input_ids"] if texts else []


def _decoder_start(name: str) -> int | None:
    from wellposed.models import start_config

    try:
        return getattr(start_config(name), "decoder_start_token_id", None)
    except CheckpointError:
        return None
