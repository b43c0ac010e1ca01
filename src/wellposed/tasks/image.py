"""Task ``image``: classify an image read pixel by pixel, as in the Long Range Arena."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from wellposed.errors import ConfigError, DataError
from wellposed.options import CheckedOptions, Size
from wellposed.tasks.data.images import label_names
from wellposed.tasks.data.splits import SPLITS
from wellposed.tasks.kinds.images import PixelTask, load_images_or_shapes, prepare_images
from wellposed.tasks.task import register_task


@dataclass(frozen=True)
class ImageOptions(CheckedOptions):
    """Options of the task `image`."""

    data: str = "builtin"
    """builtin (drawn shapes), an npz file or folder, CIFAR-10 (binary version), a folder of images
    by class, or hf:name[:config]."""
    valid: str | None = None
    """npz file of the valid split; found beside the train file, or cut from it, where not given."""
    test: str | None = None
    """npz file of the test split; found beside the train file, or cut from it, where not given."""
    color: Literal["gray", "rgb"] = "gray"
    """gray is one token a pixel, 0.299 R + 0.587 G + 0.114 B; rgb is three."""
    size: Size | None = None
    """Side that images are shrunk to by block means; as they are where not given."""
    limit_train: Size | None = None
    """Keep only the first images of train."""
    data_seed: int | None = None
    """Seed of the drawn shapes; 0 where not given."""


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

    name: ClassVar[str] = "image"

    def __init__(self, options: ImageOptions) -> None:
        self.options = options
        if options.data == "builtin" and options.color == "rgb":
            raise ConfigError(
                "image: valid, test and color='rgb' need data=FILE; the builtin shapes are gray"
            )
        images, names, source = load_images_or_shapes(
            "image", options, prefer=options.color, stacked=True
        )
        shapes = {split: images[split].items.shape[1:] for split in SPLITS}
        if len(set(shapes.values())) > 1:
            raise DataError(
                f"{options.data}: the splits differ in shape: {shapes}; give files of one shape"
            )
        if options.color == "rgb" and len(shapes["train"]) < 3:
            raise ConfigError(
                f"{options.data}: color = 'rgb', but the images are gray; give color='gray' or a"
                " file in colour"
            )
        for split in SPLITS:
            where = f"{options.data} ({split})"
            images[split] = prepare_images(
                images[split], where, size=options.size, gray=options.color == "gray"
            )
        super().__init__(
            images=images,
            labels=label_names(images, names, options.data),
            source=source,
            details={"color": options.color, "shrunk_to": options.size},
        )


register_task(ImageTask, ImageOptions, "the class of an image read pixel by pixel (accuracy)")
