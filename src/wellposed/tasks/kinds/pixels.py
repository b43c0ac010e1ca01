"""What the tasks of images share: gray or colour pixels, shrunk to a size, as sequences of values 0
to 255."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wellposed.tasks.data.images import Images, pixel_encoder, shrink, to_gray
from wellposed.tasks.kinds.classification import ClassificationTask, LabelledExamples
from wellposed.tasks.task import SPLITS, Split


class PixelTask(ClassificationTask):
    """Classification of images read row by row, a token a value."""

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
            examples[split] = LabelledExamples(images[split].tokens(), images[split].labels)
        shape = list(images["train"].pixels.shape[1:])
        super().__init__(
            encoder=pixel_encoder(),
            examples=examples,
            labels=labels,
            source=source,
            details={"image": shape, **details},
        )


def prepare_images(images: Images, where: str, *, size: int | None, gray: bool = True) -> Images:
    """Return images in gray, where wanted, and shrunk to ``size``, where given."""
    pixels = to_gray(images.pixels) if gray else images.pixels
    return Images(pixels if size is None else shrink(pixels, size, where), images.labels)
