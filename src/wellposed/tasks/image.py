"""Task ``image``: classify an image read pixel by pixel, as in the Long Range Arena."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from wellposed.errors import ConfigError, DataError
from wellposed.options import Size
from wellposed.tasks.batches import Ragged
from wellposed.tasks.data import images as reading
from wellposed.tasks.data.images import ImageDataOptions, Images
from wellposed.tasks.data.splits import SPLITS, Split
from wellposed.tasks.kinds.classification import ClassificationTask, LabelledExamples
from wellposed.tasks.task import register_task
from wellposed.tasks.text.tokenizers import NUM_SPECIAL, WordEncoder


@dataclass(frozen=True)
class ImageOptions(ImageDataOptions):
    """Options of the task `image`."""

    color: Literal["gray", "rgb"] = "gray"
    """gray is one token a pixel, 0.299 R + 0.587 G + 0.114 B; rgb is three."""
    size: Size | None = None
    """Side that images are shrunk to by block means; as they are where not given."""

    def problems(self) -> list[str]:
        """Return one line for each option that does not fit the data."""
        drawn = self.data == "builtin" and self.color == "rgb"
        wrong = ["color='rgb' needs data=FILE; the builtin shapes are gray"] if drawn else []
        return [*super().problems(), *wrong]


class PixelTask(ClassificationTask):
    """Classification of images read row by row, a token a value, a channel after the other at each
    pixel."""

    def __init__(self, *, images: Mapping[Split, Images], described: Any, **parts: Any) -> None:
        examples: dict[Split, LabelledExamples] = {}
        for split in SPLITS:
            pixels = images[split].items
            flat = pixels.reshape(-1).astype(np.int16) + NUM_SPECIAL
            ids = Ragged(flat, np.full(len(pixels), pixels[0].size))
            examples[split] = LabelledExamples(ids, images[split].labels)
        super().__init__(
            encoder=WordEncoder([str(value) for value in range(256)]),
            examples=examples,
            described={**described, "image": list(images["train"].items.shape[1:])},
            **parts,
        )


def prepare_images(images: Images, where: str, *, size: int | None, gray: bool = True) -> Images:
    """Return images in gray, where wanted, and shrunk to ``size``, where given."""
    pixels = reading.to_gray(images.items) if gray else images.items
    return Images(pixels if size is None else reading.shrink(pixels, size, where), images.labels)


@register_task("image", ImageOptions, "the class of an image read pixel by pixel (accuracy)")
class ImageTask(PixelTask):
    """Classification of images from their pixels, row by row; nothing tells the model which pixels
    are neighbours.

    Tokens are the values 0 to 255. The Long Range Arena's task is CIFAR-10 in gray: 1024 tokens,
    ten classes. Its binary release is read record by record; the Python one is pickles, which are
    not loaded.

    Source: Krizhevsky 2009; Tay et al. 2021.

    >>> from wellposed.tasks import build_task
    >>> task = build_task("image", {"size": 8})
    >>> task.labels, task.lengths("test")[0]
    (('disc', 'ring', 'square', 'cross'), 64)
    """

    def __init__(self, options: ImageOptions) -> None:
        self.options = options
        gray = options.color == "gray"
        images, names, source = reading.load_images(options, prefer=options.color, stacked=True)
        shapes = {split: images[split].items.shape[1:] for split in SPLITS}
        if len(set(shapes.values())) > 1:
            raise DataError(
                f"{options.data}: the splits differ in shape: {shapes}; give files of one shape"
            )
        if not gray and len(shapes["train"]) < 3:
            raise ConfigError(
                f"{options.data}: color = 'rgb', but the images are gray; give color='gray' or a"
                " file in colour"
            )
        for split in SPLITS:
            where = f"{options.data} ({split})"
            images[split] = prepare_images(images[split], where, size=options.size, gray=gray)
        super().__init__(
            images=images,
            labels=reading.label_names(images, names, options.data),
            described={**source, "color": options.color, "shrunk_to": options.size},
        )
