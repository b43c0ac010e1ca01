"""Pairs of token sequences with one label: rows by index, and batches padded tower by tower."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wellposed.tasks.batches.collate import pad_inputs
from wellposed.tasks.batches.rows import Rows
from wellposed.tasks.task import Example

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from wellposed.tasks.batches.ragged import Ragged


@dataclass(frozen=True)
class PairExamples(Rows[Example]):
    """Row i is documents ``first[i]`` and ``second[i]`` with ``labels[i]``; a document is stored once."""

    documents: Ragged
    first: NDArray[np.integer]
    second: NDArray[np.integer]
    labels: NDArray[np.integer]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row, both documents together."""
        return self.documents.lengths[self.first] + self.documents.lengths[self.second]

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return int(self.documents.lengths.max())

    def __len__(self) -> int:
        return len(self.labels)

    def _row(self, index: int) -> Example:
        return {
            "input_ids": self.documents[int(self.first[index])].tolist(),
            "input_ids_pair": self.documents[int(self.second[index])].tolist(),
            "labels": [int(self.labels[index])],
        }


def collate_pair_classification(examples: Sequence[Example], *, pad_id: int) -> dict[str, Tensor]:
    """Return input_ids, attention_mask, input_ids_pair, attention_mask_pair (batch, tokens) and labels (batch,).

    All int64. The two documents are padded apart, each to the longest of its side.

    >>> examples = [{"input_ids": [5, 6], "input_ids_pair": [7], "labels": [1]}]
    >>> batch = collate_pair_classification(examples, pad_id=0)
    >>> batch["input_ids"].shape, batch["input_ids_pair"].shape, batch["labels"].tolist()
    (torch.Size([1, 2]), torch.Size([1, 1]), [1])
    """
    import torch

    second = pad_inputs([{"input_ids": example["input_ids_pair"]} for example in examples], pad_id=pad_id)
    return {
        **pad_inputs(examples, pad_id=pad_id),
        **{f"{name}_pair": value for name, value in second.items()},
        "labels": torch.tensor([example["labels"][0] for example in examples], dtype=torch.int64),
    }
