"""``wellposed predict`` for a classifier: one label a line."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wellposed.errors import CheckpointError, ConfigError, DataError, ShapeError
from wellposed.text_table import printable

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SHOWN = 10


def label_lines(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    lines: Sequence[str],
    batch_size: int,
) -> Iterator[str]:
    """Yield the most probable label of every line and its probability, with a tab between.

    A text that is longer than those the model was trained on is cut as they were; standard error
    says which lines.

    Raises:
        ConfigError: the model gives no label of a text.
        DataError: a line without exactly one tab, for a model that compares pairs.
        ShapeError: a text without a token.
    """
    inputs = _Inputs(model, tokenizer)
    for start in range(0, len(lines), batch_size):
        given = inputs.encode(lines[start : start + batch_size], start)
        yield from label_and_probability(model, given, "text")
    inputs.report()


def label_and_probability(
    model: PreTrainedModel, inputs: Mapping[str, Tensor], kind: str
) -> Iterator[str]:
    """Yield the most probable label of every text or image of a batch and its probability, with a
    tab between.

    Raises:
        ConfigError: the model gives no label.
    """
    import torch

    with torch.inference_mode():
        logits = getattr(model(**inputs), "logits", None)
    if logits is None or logits.dim() != 2:
        raise ConfigError(
            f"wellposed predict: a {type(model).__name__} gives no label of a {kind}; train a"
            f" classifier with `wellposed train {kind}_classification --from`"
        )
    names: dict[int, str] = dict(model.config.id2label or {})  # type: ignore[arg-type]
    for probabilities in logits.float().softmax(-1):
        best = int(probabilities.argmax())
        yield f"{printable(str(names.get(best, best)))}\t{float(probabilities[best]):.4f}"


@dataclass
class _Inputs:
    """What a classifier reads of lines, cut as in training."""

    model: PreTrainedModel
    tokenizer: Any
    cut: list[int] = field(default_factory=list)
    """Numbers of the lines that were cut."""

    @property
    def limit(self) -> int:
        """Most tokens of a text."""
        from wellposed.models import text_positions

        longest = int(self.tokenizer.model_max_length)
        return min(text_positions(self.model.config) or sys.maxsize, longest)

    def encode(self, rows: Sequence[str], start: int) -> dict[str, Tensor]:
        """Return the tensors of lines whose numbers begin behind ``start``."""
        from wellposed.tasks.text.pretrained import PAIRS

        two_inputs = type(self.model).__name__.endswith("PairClassification")
        if not (two_inputs or self.tokenizer.init_kwargs.get(PAIRS)):
            return self._encoded(start, list(rows))
        pairs = [_both_texts(row, start + number) for number, row in enumerate(rows, 1)]
        sides = [[pair[side] for pair in pairs] for side in (0, 1)]
        if not two_inputs:
            return self._encoded(start, *sides)
        first, second = (self._encoded(start, side) for side in sides)
        return first | {f"{name}_pair": value for name, value in second.items()}

    def _encoded(self, start: int, *sides: list[str]) -> dict[str, Tensor]:
        from wellposed.training.loop.batches import TOKEN_TYPES, model_inputs

        lengths = [len(ids) for ids in self.tokenizer(*sides, verbose=False)["input_ids"]]
        self.cut += [
            start + number for number, length in enumerate(lengths, 1) if length > self.limit
        ]
        if 0 in lengths:
            raise ShapeError(
                f"line {start + lengths.index(0) + 1}: no token, expected a text of 1 token or more"
            )
        if self.tokenizer.pad_token is None:
            raise CheckpointError(
                f"{self.tokenizer.name_or_path}: the tokenizer has no padding token, so lines of"
                " different lengths make no batch; name one as pad_token in its"
                " tokenizer_config.json"
            )
        cut = {"truncation": True, "max_length": self.limit}
        found = self.tokenizer(*sides, padding=True, return_tensors="pt", **cut)
        read = ["input_ids", "attention_mask", *([TOKEN_TYPES] if sides[1:] else [])]
        return model_inputs(self.model, {name: found[name] for name in read if name in found})

    def report(self) -> None:
        """Say on standard error which lines were cut."""
        if not self.cut:
            return
        numbers = sorted(set(self.cut))
        shown = ", ".join(map(str, numbers[:SHOWN])) + (", ..." if len(numbers) > SHOWN else "")
        print(
            f"{len(numbers)} lines of more than {self.limit} tokens were cut to their start:"
            f" {shown}",
            file=sys.stderr,
        )


def _both_texts(line: str, number: int) -> list[str]:
    """Return the two texts of a line, which a tab separates."""
    texts = line.split("\t")
    if len(texts) != 2:
        raise DataError(
            f"line {number}: {len(texts)} texts, expected two with a tab between: the model"
            " compares a pair"
        )
    return texts
