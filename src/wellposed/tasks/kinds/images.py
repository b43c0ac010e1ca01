"""What tasks of models of images share: pixel values by the model's processor, one label an
image."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from wellposed.errors import ConfigError
from wellposed.tasks.batches.batching import bucketed_batches, shuffle_key
from wellposed.tasks.batches.rows import Rows
from wellposed.tasks.data.pixel_values import pixel_values, stack_images
from wellposed.tasks.kinds.labels import LabelTask
from wellposed.tasks.task import SPLITS, Example, Kind, Split

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

    from wellposed.tasks.data.image_sources import LabelledImages

KEPT_BYTES = 2**29
"""Pixel values that are kept once they are made; of larger data the rest is made again in every
epoch."""


@dataclass(frozen=True)
class NumberedImages(Rows[Example]):
    """Row i is image ``first + i`` and its label; row i + n, of n, the same image turned left to
    right."""

    first: int
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def _row(self, index: int) -> Example:
        turned, row = divmod(index + len(self) if index < 0 else index, len(self))
        if turned > 1:
            raise IndexError(f"no row has index {index}")
        return {"image": [self.first + row], "turned": [turned], "labels": [int(self.labels[row])]}


class PixelValuesTask(LabelTask):
    """Classification of images by a model that reads ``pixel_values``; a subclass says where they
    come from.

    With ``flip`` every train image is turned left to right with probability 1/2, drawn by (seed,
    epoch).
    """

    kind: ClassVar[Kind] = "image_classification"

    def __init__(
        self,
        *,
        images: Mapping[Split, LabelledImages],
        labels: Sequence[str],
        processor: Any,
        source: Mapping[str, Any],
        details: Mapping[str, Any],
        flip: bool = False,
    ) -> None:
        self.labels = tuple(labels)
        self._images = dict(images)
        self._processor, self._flip = processor, flip
        self._source, self._details = source, details
        self._rows: list[tuple[LabelledImages, int]] = []
        self._first: dict[Split, int] = {}
        for split in SPLITS:
            self._first[split] = len(self._rows)
            self._rows += [(images[split], row) for row in range(len(images[split]))]
        self._kept: dict[int, Tensor] = {}
        self._kept_bytes = 0

    @property
    def processor(self) -> Any:
        return self._processor

    def _build_tokenizer(self) -> PreTrainedTokenizerFast:
        raise ConfigError(
            f"{self.name} has no tokenizer: its model reads images; use its processor"
        )

    def split_labels(self, split: Split) -> NDArray[np.integer]:
        return self._images[split].labels

    def dataset(self, split: Split) -> Sequence[Example]:
        return NumberedImages(self._first[split], self._images[split].labels)

    def lengths(self, split: Split) -> Sequence[int]:
        """Return 1 for every image."""
        return [1] * len(self._images[split])

    def batches(self, split: Split, batch_size: int, *, seed: int, epoch: int) -> list[list[int]]:
        key, count = shuffle_key(split, seed, epoch), len(self._images[split])
        batches = bucketed_batches(self.lengths(split), batch_size, shuffle=key)
        if not (self._flip and split == "train"):
            return batches
        coin = random.Random(f"flip/{key}")
        return [[row + coin.getrandbits(1) * count for row in batch] for batch in batches]

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        import torch

        pixels = [
            self._pixels(example["image"][0], turned=bool(example["turned"][0]))
            for example in examples
        ]
        labels = [example["labels"][0] for example in examples]
        return {
            "pixel_values": stack_images(pixels),
            "labels": torch.tensor(labels, dtype=torch.int64),
        }

    def description(self) -> dict[str, Any]:
        return {
            "task": self.name,
            **self._source,
            "examples": {split: len(self._images[split]) for split in SPLITS},
            "labels": {split: self.label_counts(split) for split in SPLITS},
            "processor": self._processor.to_dict(),
            "flip": self._flip,
            **self._details,
        }

    def _pixels(self, number: int, *, turned: bool) -> Tensor:
        found = self._kept.get(number)
        if found is None:
            images, row = self._rows[number]
            found = pixel_values(self._processor, images.image(row))
            size = found.numel() * found.element_size()
            if self._kept_bytes + size <= KEPT_BYTES:
                self._kept[number] = found
                self._kept_bytes += size
        return found.flip(-1) if turned else found
