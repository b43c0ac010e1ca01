"""Image processors: a model's own, or one that normalises by the statistics of train."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from wellposed.errors import CheckpointError, ConfigError, DataError
from wellposed.tasks.data.images import Images, require_pillow, to_gray
from wellposed.tasks.data.splits import shuffled

if TYPE_CHECKING:
    from torch import Tensor

FORMS = "data, hf:FOLDER_OR_NAME or config:FOLDER_OR_NAME"
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
MEASURED = 10_000
"""Most train images that mean and standard deviation are taken from."""


def load_processor(source: str | Path) -> Any:
    """Return the image processor that was saved in ``source``, a folder or a name of the hub.

    Raises:
        ConfigError: Pillow is not installed.
        CheckpointError: there is none, or it cannot be loaded.
    """
    require_pillow()
    from transformers import AutoImageProcessor

    from wellposed.models import load_pretrained

    folder = Path(source)
    if folder.is_dir() and not has_processor(folder):
        raise CheckpointError(
            f"{folder}: no {PROCESSOR_FILES[0]}, which says how images become numbers; copy it from"
            " where the model came from"
        )
    return load_pretrained(AutoImageProcessor, source)


def has_processor(folder: Path) -> bool:
    """Return whether an image processor was saved in ``folder``."""
    return any((folder / name).is_file() for name in PROCESSOR_FILES)


def build_processor(name: str, train: Images, where: str) -> Any:
    """Return the processor that the option ``name`` describes, one of `FORMS`.

    hf: is read as it is. Otherwise channels have mean 0 and standard deviation 1 over the train
    images (a fixed draw of `MEASURED` where there are more), after they were brought to the size of
    the model (config:) or all have (data).
    """
    form, _, source = name.partition(":")
    if form == "hf" and source:
        return load_processor(source)
    if form == "config" and source:
        size, channels = _size_of_model(source)
    elif name == "data":
        size, channels = _common_size(train, where), 3
    else:
        raise ConfigError(f"processor = {name!r}, expected {FORMS}")
    return _measured_processor(size, channels, train, where)


def pixel_values(processor: Any, image: NDArray[np.uint8]) -> Tensor:
    """Return (channels, height, width) of an image (h, w) or (h, w, 3); gray and colour become what
    the model has.

    Raises:
        DataError: the processor cannot take it.
    """
    count = channels(processor)
    if count == 1 and image.ndim == 3:
        image = to_gray(image[None])[0]
    shaped = image[..., None].repeat(count, axis=-1) if image.ndim == 2 else image
    how = {"return_tensors": "pt", "input_data_format": "channels_last"}
    try:
        return processor(shaped, **how)["pixel_values"][0]
    except (ValueError, TypeError, KeyError) as error:
        height, width = image.shape[:2]
        raise DataError(
            f"{type(processor).__name__} makes no pixel_values of an image of {width} x {height}"
            f" pixels: {error}"
        ) from error


def stack_values(images: Sequence[Tensor]) -> Tensor:
    """Return one tensor (images, channels, height, width).

    Raises:
        DataError: they have different shapes.
    """
    import torch

    shapes = {tuple(image.shape) for image in images}
    if len(shapes) > 1:
        raise DataError(
            "the processor gives images of different shapes,"
            f" {', '.join(map(str, sorted(shapes)))}, and a model reads one: give a processor whose"
            " size is a height and a width, or that crops"
        )
    return torch.stack(list(images))


def channels(processor: Any) -> int:
    """Return how many channels a processor gives: 1 where its mean has one number, else 3."""
    mean = processor.image_mean
    return 1 if isinstance(mean, list | tuple) and len(mean) == 1 else 3


def _size_of_model(source: str) -> tuple[tuple[int, int], int]:
    """Return height and width, and the channels, that the model of a configuration reads."""
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
        shown = ", ".join(f"{width} x {height}" for height, width in sorted(sizes)[:3])
        raise DataError(
            f"{where}: images of {len(sizes)} sizes ({shown}, ...); give --processor config:FOLDER"
            " to bring them to the size of a model, or hf:FOLDER for its own processor"
        )
    height, width = sizes.pop()
    return height, width


def _measured_processor(size: tuple[int, int], count: int, train: Images, where: str) -> Any:
    if count not in (1, 3):
        raise ConfigError(f"{where}: the model reads images of {count} channels, expected 1 or 3")
    resized = _processor(size, [0.0] * count, [1.0] * count)
    rows = shuffled(range(len(train)))[:MEASURED]
    first, second = np.zeros(count), np.zeros(count)
    for row in rows:
        values = pixel_values(resized, train.image(row)).double().numpy()
        first += values.mean((1, 2))
        second += np.square(values).mean((1, 2))
    mean = first / len(rows)
    std = np.sqrt(np.maximum(second / len(rows) - mean**2, 0.0))
    if not std.min() > 0:
        raise DataError(
            f"{where}: every train image has the same pixels (standard deviation {std.tolist()})"
        )
    return _processor(size, mean.tolist(), std.tolist())


def _processor(size: tuple[int, int], mean: list[float], std: list[float]) -> Any:
    require_pillow()
    from wellposed.models import quiet_transformers

    with quiet_transformers():  # the import itself says which of two processors it takes
        from transformers import ViTImageProcessor

        return ViTImageProcessor(
            size=dict(zip(("height", "width"), size, strict=True)),
            image_mean=mean,
            image_std=std,
            do_convert_rgb=len(mean) == 3,
        )
