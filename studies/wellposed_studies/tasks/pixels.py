"""Task ``image`` of the Long Range Arena: images as sequences of pixels.

Reads drawn shapes, folders, npz and CIFAR-10's binary files. Nothing is unpickled: npz files of
objects and CIFAR-10's Python version are refused.
"""

from __future__ import annotations

import hashlib
import random
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellposed.errors import DataError, is_out_of_memory
from wellposed.lazy import ModuleOnFirstUse
from wellposed.options import Size
from wellposed_lab.tasks.batches import Ragged
from wellposed_lab.tasks.data import files, splits
from wellposed_lab.tasks.data import images as reading
from wellposed_lab.tasks.data.images import ImageDataOptions, Images, Loaded
from wellposed_lab.tasks.data.splits import SPLITS, DataOptions, Described, Split
from wellposed_lab.tasks.kinds.classification import ClassificationTask, LabelledExamples
from wellposed_lab.tasks.task import register_task
from wellposed_lab.tasks.text.tokenizers import NUM_SPECIAL, WordEncoder
from wellposed_studies.tasks.drawn import SeededOptions, drawn_facts

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    np = ModuleOnFirstUse("numpy")

SHAPES = ("disc", "ring", "square", "cross")
GENERATOR_VERSION = 1
_NOISE = 24
BUILTIN_SIZES: dict[Split, int] = {"train": 1000, "valid": 200, "test": 200}
BUILTIN_SIDE = 32
HOW_TO_SAVE = "numpy.savez_compressed(path, x=uint8 images, y=integer labels)"
CIFAR_WIDTH = 3 * 32 * 32


def _as_array(image: Any) -> NDArray[np.uint8]:
    return np.asarray(image)


@dataclass(frozen=True)
class ArrayImages(Images):
    """Images in one array, (number, height, width) or (number, height, width, 3), uint8."""

    read: Callable[[Any], NDArray[np.uint8]] = _as_array

    def select(self, rows: Sequence[int]) -> ArrayImages:
        chosen = list(rows)
        return replace(self, items=self.items[chosen], labels=self.labels[chosen])

    def sha256(self) -> str:
        return hashlib.sha256(self.items.tobytes() + self.labels.tobytes()).hexdigest()


@reading.SOURCES.append
def read_source(options: DataOptions) -> Loaded | None:
    """Read drawn shapes, CIFAR-10's binary files and npz files."""
    root = Path(options.data)
    batches = [root] if root.name.startswith("data_batch") else sorted(root.glob("data_batch*.bin"))
    batches = batches or sorted(root.glob("data_batch_[0-9]"))
    if options.data == "builtin":
        return _draw(getattr(options, "data_seed", None) or 0)
    if batches and root.exists():
        return _read_cifar(options, batches)
    if root.exists() and (root.suffix == ".npz" or any(root.glob("*.npz"))):
        gray = isinstance(options, SeededOptions)
        return read_npz_splits(options, prefer="gray" if gray else "rgb")
    return None


def _draw(seed: int) -> Loaded:
    images: dict[Split, ArrayImages] = {}
    for split, count in BUILTIN_SIZES.items():
        labels = np.arange(count, dtype=np.int64) % len(SHAPES)
        # Determined by (seed, split, number).
        drawn = [
            _draw_shape(
                SHAPES[label], random.Random(f"shapes/{GENERATOR_VERSION}/{seed}/{split}/{i}")
            )
            for i, label in enumerate(labels.tolist())
        ]
        images[split] = ArrayImages(np.stack(drawn), labels, names=SHAPES)

    source = "drawn shapes (no benchmark: for trying things out)"
    digests = {split: images[split].sha256() for split in SPLITS}
    return {**images}, drawn_facts(source, GENERATOR_VERSION, seed, digests)


def stack_images(images: Images) -> ArrayImages:
    """Decode images of one size into an array, in colour if any is; list all unusable ones."""
    pixels = [image for _, image in reading.decode(images)]
    height, width = pixels[0].shape[:2]
    reading.refuse_images(
        [
            f"{images.items[row]}: {image.shape[1]} x {image.shape[0]} pixels, expected {width} x"
            f" {height} as {images.items[0]}"
            for row, image in enumerate(pixels)
            if image.shape[:2] != (height, width)
        ]
    )
    if len({image.ndim for image in pixels}) > 1:
        pixels = [np.repeat(item[..., None], 3, -1) if item.ndim == 2 else item for item in pixels]

    return ArrayImages(np.stack(pixels), images.labels, names=images.names)


def read_npz_splits(options: DataOptions, *, prefer: str | None = None) -> Loaded:
    """Read the npz files of the splits; ``prefer`` selects among several train files by name."""
    root = Path(options.data)
    train = options.data
    if prefer is not None and root.is_dir():
        trains = [path for path in sorted(root.glob("*.npz")) if "train" in path.name.lower()]
        chosen = [path for path in trains if prefer in path.name.lower()]
        train = str(chosen[0]) if len(trains) > 1 and len(chosen) == 1 else train
    images, described = splits.load_splits(
        replace(options, data=train), suffixes=(".npz",), read_file=read_npz
    )
    return images, {**described, "source": options.data}


def read_npz(path: Path) -> tuple[Images, Described]:
    """Read ``x`` (uint8, (n, h, w) or (n, h, w, 3)) and ``y`` (integers, (n,)) of an npz file."""
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
        files.refuse_bomb(path, path.stat().st_size, unpacked)
        with np.load(path, allow_pickle=False) as arrays:
            stored = {name: arrays[name] for name in arrays.files}
    except DataError:
        raise
    except Exception as error:  # damaged archives raise errors of many types
        if is_out_of_memory(error):
            raise
        raise DataError(
            f"{path}: cannot be read as npz without unpickling ({error}), expected arrays x and y;"
            f" write it with {HOW_TO_SAVE}"
        ) from None

    none = np.empty(0, bool)
    x = stored.get("x", none)
    y = stored.get("y", none)
    is_image = x.dtype == np.uint8 and (x.ndim == 3 or (x.ndim == 4 and x.shape[3] == 3))
    if (
        not is_image
        or 0 in x.shape
        or y.dtype.kind not in "iu"
        or y.shape != x.shape[:1]
        or y.min() < 0
    ):
        listing = ", ".join(f"{name} {array.dtype} {array.shape}" for name, array in stored.items())
        has_labels = y.dtype.kind in "iu" and y.size
        lowest = f", y from {y.min()}, of image {y.argmin()}" if has_labels else ""
        raise DataError(
            f"{path}: expected x, uint8 (n, h, w) or (n, h, w, 3), and y, a whole number from 0 for"
            f" each image; it has {listing}{lowest}; write it with {HOW_TO_SAVE}"
        )

    return ArrayImages(x, y.astype(np.int64)), files.describe_file(path)


def _read_cifar(options: DataOptions, batches: Sequence[Path]) -> Loaded:
    """Read train batches, the test batch of a folder, and the class names."""
    splits.refuse_split_files(options, "CIFAR-10")
    folder = batches[0].parent
    test = folder / "test_batch.bin"
    names = folder / "batches.meta.txt"
    batches_of: dict[Split, Sequence[Path]] = {"train": batches}
    if test.exists() and Path(options.data).is_dir():
        batches_of["test"] = [test]

    images: dict[Split, Images] = {}
    classes = names.read_text(encoding="utf-8").split() if names.exists() else ()
    for split, paths in batches_of.items():
        pixels, labels = zip(*map(_read_cifar_batch, paths), strict=True)
        images[split] = ArrayImages(np.concatenate(pixels), np.concatenate(labels), names=classes)
    described = [files.describe_file(path) for paths in batches_of.values() for path in paths]
    return images, {"source": str(folder), "files": described, "splits": "published"}


def _read_cifar_batch(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Read records of one label and 3 x 1024 bytes (CIFAR-10, binary version)."""
    if path.suffix != ".bin":
        raise DataError(
            f"{path}: CIFAR-10's Python version is pickles, which are programs and are not loaded;"
            " take the binary version (cifar-10-binary.tar.gz), hf:uoft-cs/cifar10, a folder of"
            " images for each class, or an npz file with arrays x and y"
        )

    stored = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    if not len(stored) or len(stored) % (1 + CIFAR_WIDTH):
        raise DataError(f"{path}: {len(stored)} bytes, expected records of 3073: label and pixels")

    records = stored.reshape(-1, 1 + CIFAR_WIDTH)
    labels = records[:, 0]
    pixels = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    wrong = np.flatnonzero(labels > 9).tolist()
    problems = [f"{path}: record {index}: label {labels[index]}" for index in wrong]
    files.refuse("labels of CIFAR-10 are 0 to 9", problems)

    return np.ascontiguousarray(pixels), labels.astype(np.int64)


def shrink(pixels: NDArray[np.uint8], size: int, where: str) -> NDArray[np.uint8]:
    """Return images of ``size`` x ``size``, each pixel the rounded mean of a block."""
    number, height, width = pixels.shape[:3]
    if height % size or width % size:
        raise DataError(f"{where}: size = {size} does not divide the {width} x {height} pixels")
    blocks = pixels.reshape(number, size, height // size, size, width // size, *pixels.shape[3:])
    return np.rint(blocks.mean((2, 4))).astype(np.uint8)


def _draw_shape(shape: str, generator: random.Random) -> NDArray[np.uint8]:
    size = BUILTIN_SIDE
    radius = generator.uniform(0.15, 0.3) * size
    centre = [generator.uniform(radius, size - radius) for _ in range(2)]
    level = generator.uniform(100, 200)
    axis = np.arange(size) + 0.5
    x = np.abs(axis[None, :] - centre[0])
    y = np.abs(axis[:, None] - centre[1])
    far = np.hypot(x, y)
    inside = {
        "disc": far <= radius,
        "ring": (far <= radius) & (far >= 0.55 * radius),
        "square": np.maximum(x, y) <= 0.85 * radius,
        "cross": (np.maximum(x, y) <= radius) & (np.minimum(x, y) <= 0.3 * radius),
    }[shape]
    noise = np.frombuffer(generator.randbytes(size * size), np.uint8).reshape(size, size)

    return (noise % (2 * _NOISE) + level * inside).astype(np.uint8)


@dataclass(frozen=True)
class ImageOptions(ImageDataOptions, SeededOptions):
    """Options of the task `image`."""

    data: str = "builtin"
    """builtin (drawn shapes), a folder with a folder of images for each class, CIFAR-10 (binary version), an npz
    file or folder, or hf:name[:config]."""
    size: Size | None = None
    """Side that images are shrunk to by block means; None keeps their size."""


class PixelTask(ClassificationTask):
    """Classification of gray images, read row by row with one token a pixel."""

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


def prepare_images(images: Images, where: str, *, size: int | None) -> Images:
    """Return images in gray, shrunk to ``size`` if it is given."""
    pixels = reading.to_gray(images.items)
    return replace(images, items=pixels if size is None else shrink(pixels, size, where))


@register_task("image", ImageOptions, "the class of an image read pixel by pixel (accuracy)")
class ImageTask(PixelTask):
    """Classification of images, one token a pixel, by row; no position tells which are neighbours.

    Tokens are the values 0 to 255, of colours 0.299 R + 0.587 G + 0.114 B. The Long Range Arena's
    task is CIFAR-10 in gray: 1024 tokens, ten classes. Source: Krizhevsky 2009; Tay et al. 2021.

    >>> from wellposed_lab.tasks.task import build_task
    >>> task = build_task("image", {"size": 8})
    >>> task.labels, task.lengths("test")[0]
    (('disc', 'ring', 'square', 'cross'), 64)
    """

    def __init__(self, options: ImageOptions) -> None:
        self.options = options
        images, source = reading.load_images(options, stack_images)
        shapes = {split: images[split].items.shape[1:] for split in SPLITS}
        if len(set(shapes.values())) > 1:
            raise DataError(f"{options.data}: splits of shapes {shapes}; give one shape")

        for split in SPLITS:
            where = f"{options.data} ({split})"
            images[split] = prepare_images(images[split], where, size=options.size)

        super().__init__(
            images=images,
            labels=reading.label_names(images, options.data),
            described={**source, "color": "gray", "shrunk_to": options.size},
        )
