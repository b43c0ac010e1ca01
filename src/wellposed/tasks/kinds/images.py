"""What tasks of images share: where images come from, and their pixels as sequences of values 0 to
255, or as the pixel values of a model's processor."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from wellposed.errors import ConfigError
from wellposed.tasks.batches import Ragged, Rows, bucketed_batches, shuffle_key
from wellposed.tasks.data.images import Images, load_images, shrink, to_gray
from wellposed.tasks.data.pixel_values import pixel_values, stack_values
from wellposed.tasks.data.splits import SPLITS, Split
from wellposed.tasks.generators.shapes import GENERATOR_VERSION, SHAPES, draw_shapes
from wellposed.tasks.kinds.classification import ClassificationTask, LabelledExamples, LabelTask
from wellposed.tasks.task import Example, Kind
from wellposed.tasks.text.tokenizers import NUM_SPECIAL, WordEncoder

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

BUILTIN_SIZES: dict[Split, int] = {"train": 1000, "valid": 200, "test": 200}
BUILTIN_SIDE = 32
KEPT_BYTES = 2**29
"""Pixel values that are kept once they are made; of larger data the rest is made again in every
epoch."""


def load_images_or_shapes(
    task: str, options: Any, *, prefer: str, stacked: bool = False
) -> tuple[dict[Split, Images], list[str] | None, dict[str, Any]]:
    """Return the images that the options ``data``, ``valid``, ``test`` and ``data_seed`` say:
    `load_images`, or drawn shapes; of train the first ``limit_train``."""
    given = [name for name in ("valid", "test") if getattr(options, name) is not None]
    if options.data != "builtin":
        if options.data_seed is not None:
            raise ConfigError(
                f"{task}: data_seed says what is drawn and has no effect on {options.data}"
            )
        found = load_images(
            task,
            options.data,
            valid=options.valid,
            test=options.test,
            prefer=prefer,
            stacked=stacked,
        )
    elif given:
        raise ConfigError(
            f"{task}: {' and '.join(given)} need data=FILE; the builtin shapes are gray, in splits"
            " of their own"
        )
    else:
        found = _draw(options.data_seed or 0)
    images, names, source = found
    full, limit = len(images["train"]), options.limit_train
    if limit is not None:
        images["train"] = images["train"].select(range(min(full, limit)))
    left_out = {"train_images_left_out_by_limit_train": full - len(images["train"])}
    return images, names, source | left_out


def _draw(seed: int) -> tuple[dict[Split, Images], list[str], dict[str, Any]]:
    images: dict[Split, Images] = {
        split: draw_shapes(count, BUILTIN_SIDE, f"{seed}/{split}")
        for split, count in BUILTIN_SIZES.items()
    }
    described: dict[str, Any] = {
        "source": "builtin: drawn shapes (no benchmark: for trying things out)",
        "generator_version": GENERATOR_VERSION,
        "data_seed": seed,
        "sha256": {split: images[split].sha256() for split in SPLITS},
    }
    return images, list(SHAPES), described


class PixelTask(ClassificationTask):
    """Classification of images read row by row, a token a value, a channel after the other at each
    pixel."""

    def __init__(
        self,
        *,
        images: Mapping[Split, Images],
        labels: Sequence[str],
        source: Mapping[str, Any],
        details: Mapping[str, Any],
    ) -> None:
        examples: dict[Split, LabelledExamples] = {}
        for split in SPLITS:
            pixels = images[split].items
            flat = pixels.reshape(-1).astype(np.int16) + NUM_SPECIAL
            ids = Ragged(flat, np.full(len(pixels), pixels[0].size))
            examples[split] = LabelledExamples(ids, images[split].labels)
        super().__init__(
            encoder=WordEncoder([str(value) for value in range(256)]),
            examples=examples,
            labels=labels,
            source=source,
            details={"image": list(images["train"].items.shape[1:]), **details},
        )


def prepare_images(images: Images, where: str, *, size: int | None, gray: bool = True) -> Images:
    """Return images in gray, where wanted, and shrunk to ``size``, where given."""
    pixels = to_gray(images.items) if gray else images.items
    return Images(pixels if size is None else shrink(pixels, size, where), images.labels)


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
        images: Mapping[Split, Images],
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
            "pixel_values": stack_values(pixels),
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
