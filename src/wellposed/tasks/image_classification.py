"""Task ``image_classification``: classify images with a Hugging Face model (ViT, DeiT, ...)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np
from numpy.typing import NDArray

from wellposed.errors import ConfigError
from wellposed.tasks.batches import Rows, bucketed_batches, shuffle_key
from wellposed.tasks.data import pixel_values
from wellposed.tasks.data.images import ImageDataOptions, Images, label_names, load_images
from wellposed.tasks.data.splits import SPLITS, Split
from wellposed.tasks.kinds.classification import LabelTask
from wellposed.tasks.task import Example, Kind, register_task

if TYPE_CHECKING:
    from torch import Tensor

KEPT_BYTES = 2**29
"""Pixel values that are kept once they are made; of larger data the rest is made again in every
epoch."""


@dataclass(frozen=True)
class ImageClassificationOptions(ImageDataOptions):
    """Options of the task `image_classification`."""

    processor: str = "data"
    """How images become numbers. hf:FOLDER: by its preprocessor_config.json; config:FOLDER: at the
    size of that model, with mean and deviation of train; data: at their own size. With --from, that
    of the model."""
    flip: bool = False
    """Turn train images left to right, each with probability 1/2."""


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


@register_task(
    "image_classification",
    ImageClassificationOptions,
    "the class of an image, by a Hugging Face model of images: with --from (accuracy)",
    own_models=False,
)
class ImageClassificationTask(LabelTask):
    """Classification of images by a Hugging Face model of images.

    A folder of classes is read as torchvision's ``ImageFolder`` reads it: labels are the names of
    the folders in alphabetical order, images lie at any depth. Gray images become colour, or colour
    gray, as the model has channels; an alpha channel is left out. Every file is decoded once at the
    start, and those that cannot be are named at once. With ``flip`` every train image is turned
    left to right with probability 1/2, drawn by (seed, epoch).

    >>> from wellposed.tasks import build_task
    >>> task = build_task("image_classification", {"limit_train": 40})
    >>> task.labels, task.collate([task.dataset("train")[0]])["pixel_values"].shape
    (('disc', 'ring', 'square', 'cross'), torch.Size([1, 3, 32, 32]))
    """

    kind: ClassVar[Kind] = "image_classification"

    def __init__(self, options: ImageClassificationOptions) -> None:
        self.options = options
        images, names, self._source = load_images(options, prefer="rgb")
        self.labels = tuple(label_names(images, names, options.data))
        self._images = images
        train, where = images["train"], options.data
        self._processor = pixel_values.build_processor(options.processor, train, where)
        self._rows: list[tuple[Images, int]] = []
        self._first: dict[Split, int] = {}
        for split in SPLITS:
            self._first[split] = len(self._rows)
            self._rows += [(images[split], row) for row in range(len(images[split]))]
        self._kept: dict[int, Tensor] = {}
        self._kept_bytes = 0

    @property
    def processor(self) -> Any:
        return self._processor

    def _build_tokenizer(self) -> NoReturn:
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
        if not (self.options.flip and split == "train"):
            return batches
        coin = random.Random(f"flip/{key}")
        return [[row + coin.getrandbits(1) * count for row in batch] for batch in batches]

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        import torch

        pixels = [self._pixels(row["image"][0], turned=bool(row["turned"][0])) for row in examples]
        labels = torch.tensor([row["labels"][0] for row in examples])
        return {"pixel_values": pixel_values.stack_values(pixels), "labels": labels}

    def description(self) -> dict[str, Any]:
        return {
            "task": self.name,
            **self._source,
            "examples": {split: len(self._images[split]) for split in SPLITS},
            "labels": {split: self.label_counts(split) for split in SPLITS},
            "processor": self._processor.to_dict(),
            "flip": self.options.flip,
        }

    def _pixels(self, number: int, *, turned: bool) -> Tensor:
        found = self._kept.get(number)
        if found is None:
            images, row = self._rows[number]
            found = pixel_values.pixel_values(self._processor, images.image(row))
            size = found.numel() * found.element_size()
            if self._kept_bytes + size <= KEPT_BYTES:
                self._kept[number] = found
                self._kept_bytes += size
        return found.flip(-1) if turned else found
