"""Task ``image``: the class of an image read as a sequence of pixels, as in the Long Range Arena
(CIFAR-10)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from wellposed.errors import ConfigError, DataError
from wellposed.options import CheckedOptions, Size
from wellposed.tasks.data.image_sources import label_names, load_images
from wellposed.tasks.data.images import Images, read_class_folder
from wellposed.tasks.kinds.pixels import PixelTask, prepare_images
from wellposed.tasks.task import SPLITS, TASKS, TaskSpec


@dataclass(frozen=True)
class ImageOptions(CheckedOptions):
    """Options of the task `image`."""

    data: str = "builtin"
    """builtin (drawn shapes), an npz file or folder, CIFAR-10 (Python or binary), or a folder of
    images by class."""
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
    ten classes. Of its two releases the binary one is read record by record; of the pickles of the
    Python one, nothing that they name is imported or called.

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
        found, names, source = load_images(
            "image", options, read_folder=read_class_folder, prefer=options.color
        )
        images = dict(found)
        full = len(images["train"])
        if options.limit_train is not None:
            images["train"] = images["train"].select(range(min(full, options.limit_train)))
        limited = full - len(images["train"])
        shapes = {split: images[split].pixels.shape[1:] for split in SPLITS}
        if len(set(shapes.values())) > 1:
            raise DataError(
                f"{options.data}: the splits differ in shape: {shapes}; give files of one shape"
            )
        for split in SPLITS:
            images[split] = _prepared(images[split], options, f"{options.data} ({split})")
        super().__init__(
            images=images,
            labels=label_names(images, names, options.data),
            source=source,
            details={
                "color": options.color,
                "shrunk_to": options.size,
                "train_images_left_out_by_limit_train": limited,
            },
        )


def _prepared(images: Images, options: ImageOptions, where: str) -> Images:
    if options.color == "rgb" and images.pixels.ndim == 3:
        raise ConfigError(
            f"{where}: color = 'rgb', but the images are gray; give color='gray' or a file in"
            " colour"
        )
    return prepare_images(images, where, size=options.size, gray=options.color == "gray")


TASKS.register("image")(
    TaskSpec(
        "image", ImageOptions, ImageTask, "the class of an image read pixel by pixel (accuracy)"
    )
)
