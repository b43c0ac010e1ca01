"""Labelled images: drawn shapes, npz files, CIFAR-10's binary files, folders by class, or the hub.

Nothing is unpickled: npz files of objects and CIFAR-10's Python version are refused.
"""

from __future__ import annotations

import hashlib
import random
import warnings
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from wellposed.errors import DataError, import_extra
from wellposed.options import Size
from wellposed.tasks.data import files, splits
from wellposed.tasks.data.splits import SPLITS, DataOptions, Described, Split

SHAPES = ("disc", "ring", "square", "cross")
GENERATOR_VERSION = 1
_NOISE = 24
BUILTIN_SIZES: dict[Split, int] = {"train": 1000, "valid": 200, "test": 200}
BUILTIN_SIDE = 32
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
HUB_IMAGES, HUB_LABELS = ("image", "img"), ("label", "labels", "fine_label")
HOW_TO_SAVE = "numpy.savez_compressed(path, x=uint8 images, y=integer labels)"
CIFAR_WIDTH = 3 * 32 * 32
_LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class ImageDataOptions(DataOptions):
    """Where labelled images are."""

    data: str = "builtin"
    """builtin (drawn shapes), a folder with a folder of images for each class (in train, valid and
    test folders, or cut), CIFAR-10 (binary version), an npz file or folder, or hf:name[:config]."""
    limit_train: Size | None = None
    """Keep only the first images of train."""
    data_seed: int | None = None
    """Seed of the drawn shapes; 0 where not given."""
    drawn: ClassVar[str] = "data_seed"


@dataclass(frozen=True)
class Images:
    """Images and their labels; what is not an array is decoded when it is asked for."""

    items: Any
    """An array (number, height, width) or (number, height, width, 3), uint8, or a list of what
    ``read`` decodes."""
    labels: NDArray[np.int64]
    read: Callable[[Any], NDArray[np.uint8]] = np.asarray
    names: Sequence[str] = ()
    """Names of the labels, where they have names."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def is_array(self) -> bool:
        """Whether the images are one array."""
        return isinstance(self.items, np.ndarray)

    def select(self, rows: Sequence[int]) -> Images:
        """Return the images ``rows``."""
        chosen = list(rows)
        items = self.items[chosen] if self.is_array else [self.items[row] for row in chosen]
        return replace(self, items=items, labels=self.labels[chosen])

    def image(self, row: int) -> NDArray[np.uint8]:
        """Return the pixels of one image, (height, width) or (height, width, 3)."""
        return self.read(self.items[row])

    def sha256(self) -> str:
        """Return the hash of pixels and labels; of files, that of labels and of files as stored."""
        if self.is_array:
            return hashlib.sha256(self.items.tobytes() + self.labels.tobytes()).hexdigest()
        digest = hashlib.sha256(self.labels.tobytes())
        for path in self.items:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()


Loaded: TypeAlias = "splits.Loaded[Images]"


def load_images(options: ImageDataOptions, prefer: str | None, *, stacked: bool = False) -> Loaded:
    """Return the images of every split, of train the first ``limit_train``.

    Splits that are missing are cut from train. Every image is decoded once, and those that cannot
    be are named at once. ``prefer`` is a word that chooses among several npz files; ``stacked``
    says whether images have one size and become one array.
    """
    if options.data == "builtin":
        images, described = _draw(options.data_seed or 0)
    else:
        images, described = _read(options, prefer, stacked=stacked)
    full, limit = len(images["train"]), options.limit_train
    if limit is not None:
        images["train"] = images["train"].select(range(min(full, limit)))
    left_out = {"train_images_left_out_by_limit_train": full - len(images["train"])}
    return images, described | left_out


def label_names(images: dict[Split, Images], where: str) -> list[str]:
    """Return the names of the labels of train; other splits have no others."""
    known = set(images["train"].labels.tolist())
    foreign = {split: sorted(set(images[split].labels.tolist()) - known) for split in SPLITS[1:]}
    if any(foreign.values()):
        raise DataError(f"{where}: labels that train lacks: {foreign}; give another train file")
    if len(known) < 2:
        raise DataError(f"{where}: every image has label {known.pop()}, expected two or more")
    return list(images["train"].names or map(str, range(max(known) + 1)))


def _draw(seed: int) -> Loaded:
    images: dict[Split, Images] = {}
    for split, count in BUILTIN_SIZES.items():
        labels = np.arange(count, dtype=np.int64) % len(SHAPES)
        # By (seed, split, number) alone.
        seeds = (f"shapes/{GENERATOR_VERSION}/{seed}/{split}/{index}" for index in range(count))
        named = zip(labels.tolist(), seeds, strict=True)
        drawn = [
            _draw_shape(SHAPES[label], BUILTIN_SIDE, random.Random(each)) for label, each in named
        ]
        images[split] = Images(np.stack(drawn), labels, names=SHAPES)
    return images, {
        "source": "builtin: drawn shapes (no benchmark: for trying things out)",
        "generator_version": GENERATOR_VERSION,
        "data_seed": seed,
        "sha256": {split: images[split].sha256() for split in SPLITS},
    }


def _read(options: ImageDataOptions, prefer: str | None, *, stacked: bool) -> Loaded:
    """Read images from where the options say, by what is there, and cut the splits that it lacks."""
    root, ready = Path(options.data), stack_images if stacked else checked
    batches = [root] if root.name.startswith("data_batch") else sorted(root.glob("data_batch*.bin"))
    batches = batches or sorted(root.glob("data_batch_[0-9]"))
    if options.data.startswith("hf:"):
        found = _read_hub(options, ready)
    elif not root.exists():
        raise files.missing_file(root)
    elif batches:
        found = _read_cifar(options, batches)
    elif root.is_dir() and not any(root.glob("*.npz")) and any(p.is_dir() for p in root.iterdir()):
        found = _read_class_folders(options, ready)
    else:
        _refuse_loose_images(root)
        found = read_npz_splits(options, prefer=prefer)
    loaded, described = found
    return splits.cut_missing(loaded, options.data, described)


def _read_hub(options: DataOptions, ready: Callable[[Images], Images]) -> Loaded:
    def read_hub(rows: Any, where: str) -> Images:
        image, label = (
            next((name for name in usual if name in rows.column_names), None)
            for usual in (HUB_IMAGES, HUB_LABELS)
        )
        if image is None or label is None:
            raise DataError(
                f"{where}: expected a column of images ({' or '.join(HUB_IMAGES)}) and one of"
                f" labels ({' or '.join(HUB_LABELS)}); it has {', '.join(rows.column_names)}"
            )
        labels = rows[label][:]
        if any(type(each) is not int or each < 0 for each in labels):
            raise DataError(f"{where}: {label!r} holds values that are no whole number from 0")
        names = getattr(rows.features[label], "names", None) or ()

        def read(row: int) -> NDArray[np.uint8]:
            try:
                return _decoded(rows[row][image])
            except Exception as error:  # a damaged image raises whatever its decoder does
                raise DataError(f"{where}:{row + 1}: cannot be decoded: {error}") from None

        return ready(Images(range(len(labels)), np.array(labels, np.int64), read, names))

    require_pillow()
    how = {"suffixes": (), "read_file": read_npz}
    return splits.load_splits(options, read_hub=read_hub, **how)


def _refuse_loose_images(root: Path) -> None:
    """Refuse an image, and a folder of images without a folder for each class."""
    entries = sorted(root.iterdir()) if root.is_dir() else [root]
    loose = [entry for entry in entries if entry.suffix.lower() in IMAGE_SUFFIXES]
    if loose and not any(entry.suffix == ".npz" for entry in entries):
        held = f"holds {len(loose)} images, such as {loose[0].name}"
        raise DataError(
            f"{root}: {'is an image' if loose == [root] else held}, and nothing says of which"
            " class; name a folder that has one folder for each class"
        )


def _read_class_folders(options: DataOptions, ready: Callable[[Images], Images]) -> Loaded:
    """Read ``root/<split>/<class>/``, or ``root/<class>/`` where no folder is named as a split."""
    splits.refuse_split_files(options, "a folder of images by class")
    root = Path(options.data)
    folders = splits.find_split_folders(root)
    if folders and "train" not in folders:
        others = " and ".join(folder.name for folder in folders.values())
        raise DataError(f"{root}: has a folder {others} and no folder train; add it")
    images: dict[Split, Images] = {}
    described: dict[str, Described] = {}
    for split, folder in (folders or {SPLITS[0]: root}).items():
        classes, paths, labels, about = splits.find_class_files(folder, IMAGE_SUFFIXES)
        numbers = np.array(labels, np.int64)
        images[split] = ready(Images(paths, numbers, read_image_file, classes))
        described[split] = about | {"sha256": images[split].sha256()}
        if classes != (names := images["train"].names):
            raise DataError(f"{folder}: classes {classes}, expected those of train: {names}")
    how = "folders" if folders else "one folder"
    return images, {"source": str(root), "files": described, "splits": how}


def _decode(
    images: Images, skipped: list[str] | None = None
) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yield the number and the pixels of each image, and raise `DataError` naming those that cannot
    be decoded, or add them to ``skipped``."""
    problems: list[str] = []
    for row in range(len(images)):
        try:
            yield row, images.image(row)
        except DataError as error:
            (problems if skipped is None else skipped).append(str(error))
    _refuse_images(problems)


def checked(images: Images) -> Images:
    """Return ``images`` once each was decoded, or raise `DataError` naming those that cannot be."""
    deque(_decode(images), maxlen=0)
    return images


def _refuse_images(problems: Sequence[str]) -> None:
    files.refuse(f"{len(problems)} images that cannot be used; correct or remove them", problems)


def stack_images(images: Images, *, skipped: list[str] | None = None) -> Images:
    """Decode images of one size to an array, all in colour where some are; those that cannot be
    used are named at once.

    Where ``skipped`` is given, images that cannot be decoded are left out and described there.
    """
    decoded = dict(_decode(images, skipped))
    if not decoded:
        raise DataError(f"{images.items[0]}: none of {len(images)} images can be decoded")
    first = min(decoded)
    height, width = decoded[first].shape[:2]
    _refuse_images(
        [
            f"{images.items[row]}: {image.shape[1]} x {image.shape[0]} pixels, expected {width} x"
            f" {height} as {images.items[first]}"
            for row, image in decoded.items()
            if image.shape[:2] != (height, width)
        ]
    )
    pixels = list(decoded.values())
    if len({image.ndim for image in pixels}) > 1:
        pixels = [np.repeat(each[..., None], 3, -1) if each.ndim == 2 else each for each in pixels]
    labels = images.labels[list(decoded)]
    return Images(np.stack(pixels), labels, names=images.names)


def read_image_file(path: Path) -> NDArray[np.uint8]:
    """Decode one image to (h, w) or (h, w, 3) with Pillow: as stored, without its alpha channel.

    Palettes become colours, 16 bits of gray 8; of several pictures in a file the first is taken.
    """
    module = require_pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", module.DecompressionBombWarning)
            with module.open(path) as image:
                return _decoded(image)
    except MemoryError:
        raise
    except (module.DecompressionBombError, module.DecompressionBombWarning):
        raise DataError(f"{path}: over {module.MAX_IMAGE_PIXELS:,} pixels; shrink it") from None
    except Exception as error:  # a damaged file raises whatever its decoder does
        raise DataError(f"{path}: cannot be decoded: {error or type(error).__name__}") from None


def require_pillow() -> Any:
    """Return the module ``PIL.Image``."""
    return import_extra("PIL.Image", "report", "image files", package="pillow")


def _decoded(image: Any) -> NDArray[np.uint8]:
    if image.mode.startswith("I;16"):
        return np.rint(np.asarray(image) / 257).astype(np.uint8)
    if image.mode in ("I", "F"):
        raise ValueError(f"its pixels are {image.mode}, 32 bits a value; save it with 8 or 16")
    return np.asarray(image.convert("L" if image.mode in ("1", "L", "LA", "La") else "RGB"))


def read_npz_splits(options: DataOptions, *, prefer: str | None = None) -> Loaded:
    """Read the npz files of the splits; ``prefer`` is a word that chooses among several train
    files."""
    root, train = Path(options.data), options.data
    if prefer is not None and root.is_dir():
        trains = [path for path in sorted(root.glob("*.npz")) if "train" in path.name.lower()]
        chosen = [path for path in trains if prefer in path.name.lower()]
        train = str(chosen[0]) if len(trains) > 1 and len(chosen) == 1 else train
    images, described = splits.load_splits(
        replace(options, data=train), suffixes=(".npz",), read_file=read_npz
    )
    return images, {**described, "source": options.data}


def read_npz(path: Path) -> tuple[Images, Described]:
    """Read ``x`` (uint8, (n, h, w) or (n, h, w, 3)) and ``y`` (whole numbers, (n,)) of an npz
    file."""
    try:
        with zipfile.ZipFile(path) as archive:
            unpacked = sum(member.file_size for member in archive.infolist())
        files.refuse_bomb(path, path.stat().st_size, unpacked)
        with np.load(path, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
    except DataError:
        raise
    except Exception as error:  # a damaged archive raises whatever its reader meets in it
        raise DataError(
            f"{path}: cannot be read as npz without unpickling ({error}), expected arrays x and y;"
            f" write it with {HOW_TO_SAVE}"
        ) from None
    none = np.empty(0, bool)
    x, y = found.get("x", none), found.get("y", none)
    is_image = x.dtype == np.uint8 and (x.ndim == 3 or (x.ndim == 4 and x.shape[3] == 3))
    if (
        not is_image
        or 0 in x.shape
        or y.dtype.kind not in "iu"
        or y.shape != x.shape[:1]
        or y.min() < 0
    ):
        held = ", ".join(f"{name} {array.dtype} {array.shape}" for name, array in found.items())
        whole = y.dtype.kind in "iu" and y.size
        lowest = f", y from {y.min()}, of image {y.argmin()}" if whole else ""
        raise DataError(
            f"{path}: expected x, uint8 (n, h, w) or (n, h, w, 3), and y, a whole number from 0 for"
            f" each image; it has {held}{lowest}; write it with {HOW_TO_SAVE}"
        )
    return Images(x, y.astype(np.int64)), files.describe_file(path)


def _read_cifar(options: DataOptions, batches: Sequence[Path]) -> Loaded:
    """Read train batches, and of a folder the test batch; the classes have names beside them."""
    splits.refuse_split_files(options, "CIFAR-10")
    folder = batches[0].parent
    test, names = folder / "test_batch.bin", folder / "batches.meta.txt"
    held: dict[Split, Sequence[Path]] = {"train": batches}
    if test.exists() and Path(options.data).is_dir():
        held["test"] = [test]
    images: dict[Split, Images] = {}
    classes = names.read_text(encoding="utf-8").split() if names.exists() else ()
    for split, paths in held.items():
        pixels, labels = zip(*map(_read_cifar_batch, paths), strict=True)
        images[split] = Images(np.concatenate(pixels), np.concatenate(labels), names=classes)
    described = [files.describe_file(path) for paths in held.values() for path in paths]
    return images, {"source": str(folder), "files": described, "splits": "published"}


def _read_cifar_batch(path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Read records of one label and 3 x 1024 bytes, the binary version of CIFAR-10."""
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
    labels, pixels = records[:, 0], records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    wrong = np.flatnonzero(labels > 9).tolist()
    problems = [f"{path}: record {index}: label {labels[index]}" for index in wrong]
    files.refuse("labels of CIFAR-10 are 0 to 9", problems)
    return np.ascontiguousarray(pixels), labels.astype(np.int64)


def to_gray(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return 0.299 R + 0.587 G + 0.114 B, rounded; gray images as they are.

    >>> to_gray(np.array([[[[255, 255, 255], [100, 0, 0]]]], np.uint8)).tolist()
    [[[255, 30]]]
    """
    return pixels if pixels.ndim == 3 else np.rint(pixels @ np.array(_LUMA)).astype(np.uint8)


def shrink(pixels: NDArray[np.uint8], size: int, where: str) -> NDArray[np.uint8]:
    """Return images of ``size`` x ``size``, each pixel the rounded mean of a block; it must divide
    the sides."""
    number, height, width = pixels.shape[:3]
    if height % size or width % size:
        raise DataError(f"{where}: size = {size} does not divide the {width} x {height} pixels")
    blocks = pixels.reshape(number, size, height // size, size, width // size, *pixels.shape[3:])
    return np.rint(blocks.mean((2, 4))).astype(np.uint8)


def _draw_shape(shape: str, size: int, generator: random.Random) -> NDArray[np.uint8]:
    radius = generator.uniform(0.15, 0.3) * size
    centre = [generator.uniform(radius, size - radius) for _ in range(2)]
    level = generator.uniform(100, 200)
    axis = np.arange(size) + 0.5
    x, y = np.abs(axis[None, :] - centre[0]), np.abs(axis[:, None] - centre[1])
    far = np.hypot(x, y)
    inside = {
        "disc": far <= radius,
        "ring": (far <= radius) & (far >= 0.55 * radius),
        "square": np.maximum(x, y) <= 0.85 * radius,
        "cross": (np.maximum(x, y) <= radius) & (np.minimum(x, y) <= 0.3 * radius),
    }[shape]
    noise = np.frombuffer(generator.randbytes(size * size), np.uint8).reshape(size, size)
    return (noise % (2 * _NOISE) + level * inside).astype(np.uint8)
