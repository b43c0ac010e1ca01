"""Examples to tensors, padded on the right to the longest example of the batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from wellposed.tasks.kinds.objectives import IGNORED_LABEL
from wellposed.tasks.task import Example

if TYPE_CHECKING:
    from torch import Tensor


def collate_causal_lm(examples: Sequence[Example], *, pad_id: int) -> dict[str, Tensor]:
    """Return input_ids, attention_mask and unshifted labels, (batch, tokens) int64; labels are -100
    on padding.

    The label_bytes of examples that have them are returned too, 0 on padding.

    >>> batch = collate_causal_lm([{"input_ids": [5, 6]}, {"input_ids": [7]}], pad_id=0)
    >>> batch["input_ids"].tolist(), batch["labels"].tolist()
    ([[5, 6], [7, 0]], [[5, 6], [7, -100]])
    """
    import torch

    inputs = pad_inputs(examples, pad_id=pad_id)
    batch = {
        **inputs,
        "labels": torch.where(inputs["attention_mask"] == 1, inputs["input_ids"], IGNORED_LABEL),
    }
    return batch | _padded(examples, "label_bytes")


def collate_classification(examples: Sequence[Example], *, pad_id: int) -> dict[str, Tensor]:
    """Return input_ids, attention_mask (batch, tokens) and labels (batch,), all int64.

    Examples with token_type_ids, pairs in one sequence, give those too, 0 on padding. Examples of
    two documents give input_ids_pair and attention_mask_pair too; each side is padded to its own
    longest.

    >>> examples = [{"input_ids": [5, 6], "labels": [1]}, {"input_ids": [7], "labels": [0]}]
    >>> batch = collate_classification(examples, pad_id=0)
    >>> batch["attention_mask"].tolist(), batch["labels"].tolist()
    ([[1, 1], [1, 0]], [1, 0])
    """
    import torch

    batch = pad_inputs(examples, pad_id=pad_id) | _padded(examples, "token_type_ids")
    if "input_ids_pair" in examples[0]:
        second = pad_inputs(
            [{"input_ids": example["input_ids_pair"]} for example in examples], pad_id=pad_id
        )
        batch |= {f"{name}_pair": value for name, value in second.items()}
    return {
        **batch,
        "labels": torch.tensor([example["labels"][0] for example in examples], dtype=torch.int64),
    }


def collate_seq2seq(examples: Sequence[Example], *, pad_id: int, bos_id: int) -> dict[str, Tensor]:
    """Return input_ids, attention_mask (batch, source), decoder_input_ids and labels (batch,
    target), all int64.

    The decoder reads the target moved right by one after ``bos_id``: position t predicts
    ``labels[:, t]``, so nothing is shifted later. Labels are -100 on padding; the decoder's inputs
    need no mask, as padding comes after the end.

    >>> batch = collate_seq2seq([{"input_ids": [5, 3], "labels": [7, 8, 3]}, {"input_ids": [6, 9, 3], "labels": [3]}],
    ...                         pad_id=0, bos_id=2)
    >>> batch["decoder_input_ids"].tolist(), batch["labels"].tolist()
    ([[2, 7, 8], [2, 0, 0]], [[7, 8, 3], [3, -100, -100]])
    """
    import torch

    from wellposed.tasks.batches.ragged import pad_right

    targets = [example["labels"] for example in examples]
    shifted = [[bos_id, *target[:-1]] for target in targets]
    return {
        **pad_inputs(examples, pad_id=pad_id),
        "decoder_input_ids": torch.from_numpy(pad_right(shifted, pad_id)),
        "labels": torch.from_numpy(pad_right(targets, IGNORED_LABEL)),
    }


def _padded(examples: Sequence[Example], name: str) -> dict[str, Tensor]:
    """Return ``name`` of examples that have it, 0 on padding."""
    import torch

    from wellposed.tasks.batches.ragged import pad_right

    return (
        {name: torch.from_numpy(pad_right([row[name] for row in examples], 0))}
        if name in examples[0]
        else {}
    )


def pad_inputs(examples: Sequence[Example], *, pad_id: int) -> dict[str, Tensor]:
    """Return input_ids and attention_mask of examples, padded to the longest."""
    import torch

    from wellposed.tasks.batches.ragged import pad_right

    rows = [example["input_ids"] for example in examples]
    mask = [[1] * len(row) for row in rows]
    return {
        "input_ids": torch.from_numpy(pad_right(rows, pad_id)),
        "attention_mask": torch.from_numpy(pad_right(mask, 0)),
    }
