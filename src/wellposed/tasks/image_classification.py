"""Task ``image_classification``: the class of an image, for a Hugging Face model that reads pixels
(ViT, DeiT, ...)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from wellposed.options import CheckedOptions, Size
from wellposed.tasks.data.images import label_names
from wellposed.tasks.data.pixel_values import build_processor
from wellposed.tasks.kinds.images import PixelValuesTask, load_images_or_shapes
from wellposed.tasks.task import register_task


@dataclass(frozen=True)
class ImageClassificationOptions(CheckedOptions):
    """Options of the task `image_classification`."""

    data: str = "builtin"
    """builtin (drawn shapes), a folder with a folder of images for each class (in train, valid and
    test folders, or cut), CIFAR-10 (binary version), an npz file or folder, or hf:name[:config]."""
    valid: str | None = None
    """npz file of the valid split; found beside the train file, or cut from it, where not given."""
    test: str | None = None
    """npz file of the test split; found beside the train file, or cut from it, where not given."""
    processor: str = "data"
    """How images become numbers. hf:FOLDER: by its preprocessor_config.json; config:FOLDER: at the
    size of that model, with mean and deviation of train; data: at their own size. With --from, that
    of the model."""
    flip: bool = False
    """Turn train images left to right, each with probability 1/2."""
    limit_train: Size | None = None
    """Keep only the first images of train."""
    data_seed: int | None = None
    """Seed of the drawn shapes; 0 where not given."""


class ImageClassificationTask(PixelValuesTask):
    """Classification of images by a Hugging Face model of images.

    A folder of classes is read as torchvision's ``ImageFolder`` reads it: labels are the names of
    the folders in alphabetical order, images lie at any depth. Gray images become colour, or colour
    gray, as the model has channels; an alpha channel is left out. Every file is decoded once at the
    start, and those that cannot be are named at once.

    >>> from wellposed.tasks import build_task
    >>> task = build_task("image_classification", {"limit_train": 40})
    >>> task.labels, task.collate([task.dataset("train")[0]])["pixel_values"].shape
    (('disc', 'ring', 'square', 'cross'), torch.Size([1, 3, 32, 32]))
    """

    name: ClassVar[str] = "image_classification"

    def __init__(self, options: ImageClassificationOptions) -> None:
        self.options = options
        images, names, source = load_images_or_shapes(self.name, options, prefer="rgb")
        super().__init__(
            images=images,
            labels=label_names(images, names, options.data),
            processor=build_processor(options.processor, images["train"], options.data),
            source=source,
            details={},
            flip=options.flip,
        )


register_task(
    ImageClassificationTask,
    ImageClassificationOptions,
    "the class of an image, by a Hugging Face model of images: with --from (accuracy)",
    own_models=False,
)
