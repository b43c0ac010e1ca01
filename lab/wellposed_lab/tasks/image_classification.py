"""Task ``image_classification``: a Hugging Face model (ViT, DeiT, ...) and its processor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from wellposed.errors import CheckpointError, ConfigError, DataError
from wellposed.lazy import ModuleOnFirstUse
from wellposed_lab.tasks.batches import Example, Rows
from wellposed_lab.tasks.data import images as reading
from wellposed_lab.tasks.data.images import ImageDataOptions, Images
from wellposed_lab.tasks.data.splits import SPLITS, Split, shuffled
from wellposed_lab.tasks.kinds.classification import LabelTask
from wellposed_lab.tasks.task import Kind, register_task

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor
else:
    np = ModuleOnFirstUse("numpy")

FORMS = "data, hf:FOLDER_OR_NAME or config:FOLDER_OR_NAME"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
MEASURED = 10_000
"""Most train images for the mean and standard deviation."""


def load_processor(source: str | Path) -> Any:
    """Return the image processor saved in ``source``, a folder or a hub name. If there is none it
    is a `CheckpointError`, without Pillow a `ConfigError`."""
    reading.require_pillow()
    from transformers import AutoImageProcessor

    from wellposed.models import load_pretrained

    folder = Path(source)
    if folder.is_dir() and not has_processor(folder):
        raise CheckpointError(f"{folder}: no {PROCESSOR_FILES[0]}; copy it from the model's folder")
    return load_pretrained(AutoImageProcessor, source)


def has_processor(folder: Path) -> bool:
    """Return whether ``folder`` has a saved image processor."""
    return any((folder / name).is_file() for name in PROCESSOR_FILES)


def build_processor(name: str, train: Images, where: str) -> Any:
    """Return the processor of the option ``name``, one of `FORMS`. hf: loads it. Otherwise channels
    get mean 0 and deviation 1 over the train images (at most `MEASURED`, by a fixed draw), at the
    size of the model (config:) or of the images (data)."""
    form, _, source = name.partition(":")
    if form == "hf" and source:
        return load_processor(source)

    if form == "config" and source:
        size, count = _size_of_model(source)
    elif name == "data":
        size = _common_size(train, where)
        count = 3
    else:
        raise ConfigError(f"processor = {name!r}, expected {FORMS}")

    if count not in (1, 3):
        raise ConfigError(f"{where}: the model reads images of {count} channels, expected 1 or 3")
    resized = _processor(size, [0.0] * count, [1.0] * count)
    rows = shuffled(range(len(train)))[:MEASURED]
    first = np.zeros(count)
    second = np.zeros(count)
    for row in rows:
        values = pixel_values(resized, train.image(row)).double().numpy()
        first += values.mean((1, 2))
        second += np.square(values).mean((1, 2))

    mean = first / len(rows)
    std = np.sqrt(np.maximum(second / len(rows) - mean**2, 0.0))
    if not std.min() > 0:
        raise DataError(f"{where}: every train image has the same pixels; give images that differ")
    return _processor(size, mean.tolist(), std.tolist())


def pixel_values(processor: Any, image: NDArray[np.uint8]) -> Tensor:
    """Return an image (h, w) or (h, w, 3) as (channels, height, width), in gray or colour as the
    model needs. One that the processor cannot read is a `DataError`."""
    count = channels(processor)
    if count == 1 and image.ndim == 3:
        image = reading.to_gray(image[None])[0]

    shaped = image[..., None].repeat(count, axis=-1) if image.ndim == 2 else image
    settings = {"return_tensors": "pt", "input_data_format": "channels_last"}
    try:
        return processor(shaped, **settings)["pixel_values"][0]
    except (ValueError, TypeError, KeyError) as error:
        height, width = image.shape[:2]
        raise DataError(
            f"{type(processor).__name__} makes no pixel_values of an image of {width} x {height}"
            f" pixels: {error}"
        ) from error


def stack_values(images: Sequence[Tensor]) -> Tensor:
    """Return a tensor (images, channels, height, width); different shapes are a `DataError`."""
    import torch

    shapes = {tuple(image.shape) for image in images}
    if len(shapes) > 1:
        raise DataError(
            "the processor gives images of different shapes,"
            f" {', '.join(map(str, sorted(shapes)))}; give a processor with a fixed height and"
            " width, or one that crops"
        )
    return torch.stack(list(images))


def channels(processor: Any) -> int:
    """Return the number of channels of a processor: 1 if its mean has one number, else 3."""
    mean = processor.image_mean
    return 1 if isinstance(mean, list | tuple) and len(mean) == 1 else 3


def _size_of_model(source: str) -> tuple[tuple[int, int], int]:
    """Return height, width and channels that the model of a configuration reads."""
    from wellposed.models import start_config

    config: Any = start_config(source)
    size = getattr(config, "image_size", None)
    size = (size, size) if isinstance(size, int) else size
    if not isinstance(size, list | tuple) or len(size) != 2:
        raise ConfigError(
            f"{source}: a {config.model_type} configuration has no image_size; expected a model of"
            " images; for one that reads any size give --processor data, or hf:FOLDER with a"
            " preprocessor_config.json"
        )
    return (int(size[0]), int(size[1])), int(getattr(config, "num_channels", 3))


def _common_size(train: Images, where: str) -> tuple[int, int]:
    sizes = {train.image(row).shape[:2] for row in range(len(train))}
    if len(sizes) > 1:
        listed = ", ".join(f"{width} x {height}" for height, width in sorted(sizes)[:3])
        raise DataError(
            f"{where}: images of {len(sizes)} sizes ({listed}, ...); give --processor config:FOLDER"
            " to bring them to the size of a model, or hf:FOLDER for its own processor"
        )
    height, width = sizes.pop()
    return height, width


def _processor(size: tuple[int, int], mean: list[float], std: list[float]) -> Any:
    reading.require_pillow()
    from wellposed.models import quiet_transformers

    with quiet_transformers():  # the import prints which of two processors it uses
        from transformers import ViTImageProcessor

        return ViTImageProcessor(
            size=dict(zip(("height", "width"), size, strict=True)),
            image_mean=mean,
            image_std=std,
            do_convert_rgb=len(mean) == 3,
        )


KEPT_BYTES = 2**29
"""Most bytes of pixel values that are cached; the rest is computed again in every epoch."""


@dataclass(frozen=True)
class ImageClassificationOptions(ImageDataOptions):
    """Options of the task `image_classification`."""

    processor: str = "data"
    """hf:FOLDER: its preprocessor_config.json; config:FOLDER: the size of that model, with mean and
    deviation of train; data: the images' own size (default with --from: the model's)."""


@dataclass(frozen=True)
class NumberedImages(Rows[Example]):
    """Row i is image ``first + i`` and its label."""

    first: int
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def _row(self, index: int) -> Example:
        row = range(len(self))[index]
        return {"image": [self.first + row], "labels": [int(self.labels[row])]}


@register_task(
    "image_classification",
    ImageClassificationOptions,
    "the class of an image, by a Hugging Face model of images: with --from (accuracy)",
    own_models=False,
)
class ImageClassificationTask(LabelTask):
    """Classification of images by a Hugging Face model of images.

    Folders of classes are read as by torchvision's ``ImageFolder``: labels are folder names in
    alphabetical order, images at any depth. Gray and colour become the model's channels, and alpha
    channels are dropped. Every file is decoded once at the start; all bad ones are listed.

    >>> from wellposed_lab.tasks.task import TASKS
    >>> TASKS.get("image_classification").summary
    'the class of an image, by a Hugging Face model of images: with --from (accuracy)'
    """

    kind: ClassVar[Kind] = "image_classification"

    def __init__(self, options: ImageClassificationOptions) -> None:
        self.options = options
        images, self._source = reading.load_images(options)
        self.labels = tuple(reading.label_names(images, options.data))
        self._images = images
        train = images["train"]
        where = options.data
        self._processor = build_processor(options.processor, train, where)
        self._rows: list[tuple[Images, int]] = []
        self._first: dict[Split, int] = {}
        for split in SPLITS:
            self._first[split] = len(self._rows)
            self._rows += [(images[split], row) for row in range(len(images[split]))]
        self._cached_pixels: dict[int, Tensor] = {}

    @property
    def processor(self) -> Any:
        return self._processor

    def _build_tokenizer(self) -> NoReturn:
        raise ConfigError(f"{self.name} has no tokenizer: its model reads images with a processor")

    def split_labels(self, split: Split) -> NDArray[np.integer]:
        return self._images[split].labels

    def dataset(self, split: Split) -> Sequence[Example]:
        return NumberedImages(self._first[split], self._images[split].labels)

    def lengths(self, split: Split) -> Sequence[int]:
        return [1] * len(self._images[split])

    def collate(self, examples: Sequence[Example]) -> dict[str, Tensor]:
        import torch

        pixels = [self._pixels(row["image"][0]) for row in examples]
        labels = torch.tensor([row["labels"][0] for row in examples])
        return {"pixel_values": stack_values(pixels), "labels": labels}

    def description(self) -> dict[str, Any]:
        return {
            "task": self.name,
            **self._source,
            "examples": {split: len(self._images[split]) for split in SPLITS},
            "labels": {split: self.label_counts(split) for split in SPLITS},
            "processor": self._processor.to_dict(),
        }

    def _pixels(self, number: int) -> Tensor:
        pixels = self._cached_pixels.get(number)
        if pixels is None:
            images, row = self._rows[number]
            pixels = pixel_values(self._processor, images.image(row))
            if pixels.nbytes * len(self._cached_pixels) < KEPT_BYTES:
                self._cached_pixels[number] = pixels
        return pixels
