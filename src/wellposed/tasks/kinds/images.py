"""Base class of tasks that read an image as a sequence of pixels, and where images come from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from wellposed.errors import ConfigError
from wellposed.tasks.batches import Ragged
from wellposed.tasks.data.images import Images, load_images, shrink, to_gray
from wellposed.tasks.data.splits import SPLITS, Split
from wellposed.tasks.generators.shapes import GENERATOR_VERSION, SHAPES, draw_shapes
from wellposed.tasks.kinds.classification import ClassificationTask, LabelledExamples
from wellposed.tasks.text.tokenizers import NUM_SPECIAL, WordEncoder

if TYPE_CHECKING:
    pass

BUILTIN_SIZES: dict[Split, int] = {"train": 1000, "valid": 200, "test": 200}
BUILTIN_SIDE = 32


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
