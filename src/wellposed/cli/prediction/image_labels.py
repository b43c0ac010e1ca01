"""``wellposed predict`` for a classifier of images: one label an image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellposed.cli.prediction.labels import label_and_probability
from wellposed.cli.prediction.lines import LineSource
from wellposed.errors import ConfigError, DataError, listed
from wellposed.tasks.data.images import IMAGE_SUFFIXES, read_image_file
from wellposed.tasks.data.pixel_values import pixel_values, stack_values
from wellposed.text_table import printable

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel


def find_images(path: Path) -> list[Path]:
    """Return the images that ``path`` names: itself, those in it at any depth, or those on the
    lines of a list.

    Raises:
        DataError: there is none, or a line of the list is no file.
    """
    if path.is_dir():
        found = sorted(entry for entry in path.rglob("*") if entry.suffix.lower() in IMAGE_SUFFIXES)
        if not found:
            raise DataError(
                f"{path}: no image in the folder; expected files named {', '.join(IMAGE_SUFFIXES)}"
            )
        return found
    if path.suffix.lower() in IMAGE_SUFFIXES:
        return [path]
    with LineSource(text=None, path=path) as source:
        named = [(number, Path(line)) for number, line in enumerate(source, 1) if line.strip()]
        name = source.name
    problems = [
        f"{name}:{number}: {image}: no such file" for number, image in named if not image.is_file()
    ]
    if problems or not named:
        raise DataError(
            f"{name}: expected an image ({', '.join(IMAGE_SUFFIXES)}), a folder, or the path of an"
            " image on each line:\n" + listed(problems or ["it is empty"])
        )
    return [image for _, image in named]


def read_pixel_values(processor: Any, images: Sequence[Path]) -> Tensor:
    """Return (images, channels, height, width) of image files, as the model of ``processor`` reads
    them."""
    return stack_values([pixel_values(processor, read_image_file(path)) for path in images])


def image_batch(model: PreTrainedModel, name: str, image: Path) -> dict[str, Tensor]:
    """Return what the model that was loaded from ``name`` reads of one image.

    Raises:
        ConfigError: it reads no images.
    """
    from wellposed.cli.load import load_image_processor
    from wellposed.models import reads_images

    if not reads_images(model):
        raise ConfigError(f"--image: a {type(model).__name__} reads no images; give --text TEXT")
    return {"pixel_values": read_pixel_values(load_image_processor(name), [image])}


def label_images(
    model: PreTrainedModel, processor: Any, images: Sequence[Path], batch_size: int
) -> Iterator[str]:
    """Yield the most probable label of every image, its probability and the path, with tabs
    between.

    Raises:
        ConfigError: the model gives no label of an image.
        DataError: images that cannot be decoded.
    """
    for start in range(0, len(images), batch_size):
        paths = images[start : start + batch_size]
        given = {"pixel_values": read_pixel_values(processor, paths)}
        labels = label_and_probability(model, given, "image")
        for path, label in zip(paths, labels, strict=True):
            yield f"{label}\t{printable(str(path))}"
