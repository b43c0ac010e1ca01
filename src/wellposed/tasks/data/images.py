"""Labelled images from npz files, CIFAR-10's binary files, folders by class, or the hub.

Nothing is unpickled: npz files of objects and CIFAR-10's Python version are refused.
"""

from __future__ import annotations

import hashlib
import warnings
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from wellposed.errors import ConfigError, DataError, listed, missing_extra
from wellposed.tasks.data.files import describe_file, hub_table, missing_file, refuse_bomb
from wellposed.tasks.data.splits import (
    SPLITS,
    Split,
    cut_missing,
    find_split_folders,
    load_splits,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
HUB_IMAGES, HUB_LABELS = ("image", "img"), ("label", "labels", "fine_label")
HOW_TO_SAVE = "numpy.savez_compressed(path, x=uint8 images, y=integer labels)"
CIFAR_WIDTH = 3 * 32 * 32
_LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class Images:
    """Images and their labels; what is not an array is decoded when it is asked for."""

    items: Any
    """An array (number, height, width) or (number, height, width, 3), uint8, or a list of what
    ``read`` decodes."""
    labels: NDArray[np.int64]
    read: Callable[[Any], NDArray[np.uint8]] = np.asarray

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, rows: Sequence[int]) -> Images:
        """Return the images ``rows``."""
        chosen = list(rows)
        is_array = isinstance(self.items, np.ndarray)
        items = self.items[chosen] if is_array else [self.items[row] for row in chosen]
        return replace(self, items=items, labels=self.labels[chosen])

    def image(self, row: int) -> NDArray[np.uint8]:
        """Return the pixels of one image, (height, width) or (height, width, 3)."""
        return self.read(self.items[row])

    def sha256(self) -> str:
        """Return the hash of pixels and labels; of files, that of labels and of files as stored."""
        if isinstance(self.items, np.ndarray):
            return hashlib.sha256(self.items.tobytes() + self.labels.tobytes()).hexdigest()
        digest = hashlib.sha256(self.labels.tobytes())
        for path in self.items:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()


def load_images(
    task: str,
    data: str,
    *,
    valid: str | None,
    test: str | None,
    prefer: str | None = None,
    stacked: bool = False,
) -> tuple[dict[Split, Images], list[str] | None, dict[str, Any]]:
    """Return the images of every split, the names of the labels where they have names, and a
    description.

    Splits that are missing are cut from train. Every image is decoded once, and those that cannot
    be are named at once. ``valid`` and ``test`` are npz files; ``prefer`` is a word that chooses
    among several of them; ``stacked`` says whether images have one size and become one array.
    """
    root = Path(data)
    given = " and ".join(n for n, path in (("valid", valid), ("test", test)) if path is not None)
    if data.startswith("hf:"):
        return _from_hub(data, valid=valid, test=test, stacked=stacked)
    if not root.exists():
        raise missing_file(root)
    batches = [root] if root.name.startswith("data_batch") else sorted(root.glob("data_batch*.bin"))
    if not batches:
        batches = sorted(root.glob("data_batch_[0-9]"))
    folders = root.is_dir() and not any(root.glob("*.npz"))
    folders = folders and any(entry.is_dir() for entry in root.iterdir())
    if given and (batches or folders):
        raise ConfigError(f"{task}: {given} name npz files; {root} is data of another kind")
    if batches:
        return _read_cifar(root if root.is_dir() else root.parent, batches, alone=root.is_file())
    if folders:
        return _read_class_folders(root, stacked=stacked)
    _refuse_loose_images(root)
    images, described = read_npz_splits(data, valid=valid, test=test, prefer=prefer)
    return images, None, described


def label_names(images: dict[Split, Images], names: Sequence[str] | None, where: str) -> list[str]:
    """Return the names of the labels of train; other splits have no others."""
    known = set(images["train"].labels.tolist())
    foreign = {split: sorted(set(images[split].labels.tolist()) - known) for split in SPLITS[1:]}
    if any(foreign.values()):
        raise DataError(
            f"{where}: labels that train does not have: {foreign}; give another train file"
        )
    if len(known) < 2:
        raise DataError(
            f"{where}: every image has the label {known.pop()}, expected two labels or more"
        )
    return list(names or map(str, range(max(known) + 1)))


def _from_hub(
    data: str, *, valid: str | None, test: str | None, stacked: bool
) -> tuple[dict[Split, Images], list[str] | None, dict[str, Any]]:
    names: list[str] = []

    def read_hub(rows: Any, where: str) -> Images:
        table = hub_table(rows, where)
        image = next((name for name in HUB_IMAGES if name in table.names), None)
        label = next((name for name in HUB_LABELS if name in table.names), None)
        if image is None or label is None:
            raise DataError(
                f"{where}: expected a column of images ({' or '.join(HUB_IMAGES)}) and one of"
                f" labels ({' or '.join(HUB_LABELS)}); it has {', '.join(table.names)}"
            )
        classes = getattr(rows.features[label], "names", None)
        labels = rows[label][:]
        if any(type(each) is not int or each < 0 for each in labels):
            raise DataError(f"{where}: {label!r} holds values that are no whole number from 0")
        names[:] = names or classes or []

        def read(row: int) -> NDArray[np.uint8]:
            try:
                return _decoded(rows[row][image])
            except Exception as error:  # a damaged image raises whatever its decoder does
                raise DataError(f"{where}:{row + 1}: cannot be decoded: {error}") from None

        found = Images(list(range(len(labels))), np.array(labels, np.int64), read)
        return stack_images(found) if stacked else checked(found)

    def read_file(path: Path) -> tuple[Images, dict[str, Any]]:
        raise AssertionError(path)

    require_pillow()
    images, described = load_splits(
        data, valid=valid, test=test, suffixes=(), read_file=read_file, read_hub=read_hub
    )
    images, cut = cut_missing(images, data)
    return images, names or None, described | cut


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


def _read_class_folders(
    root: Path, *, stacked: bool
) -> tuple[dict[Split, Images], list[str], dict[str, Any]]:
    """Read ``root/<split>/<class>/``, or ``root/<class>/`` where no folder is named as a split."""
    folders = find_split_folders(root)
    if folders and "train" not in folders:
        others = " and ".join(folder.name for folder in folders.values())
        raise DataError(f"{root}: has a folder {others} and no folder train; add it")
    images: dict[Split, Images] = {}
    files: dict[str, Any] = {}
    names: list[str] = []
    for split, folder in (folders or {SPLITS[0]: root}).items():
        found, classes, files[split] = find_class_files(folder)
        images[split] = stack_images(found) if stacked else checked(found)
        files[split]["sha256"] = images[split].sha256()
        names = names or classes
        if classes != names:
            raise DataError(f"{folder}: classes {classes}, expected those of train: {names}")
    images, cut = cut_missing(images, str(root))
    how = "folders" if folders else "one folder"
    return images, names, {"source": str(root), "files": files, "splits": how, **cut}


def find_class_files(folder: Path) -> tuple[Images, list[str], dict[str, Any]]:
    """Return the images below ``folder/<class>/``, at any depth, the classes in alphabetical order,
    as torchvision's ``ImageFolder`` does, and a description.

    A class without an image is an error; files that are not named as images are counted.
    """
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    paths: list[Path] = []
    labels: list[int] = []
    empty = []
    others = 0
    for number, name in enumerate(classes):
        files = sorted(path for path in (folder / name).rglob("*") if path.is_file())
        images = [path for path in files if path.suffix.lower() in IMAGE_SUFFIXES]
        paths += images
        labels += [number] * len(images)
        others += len(files) - len(images)
        empty += [] if images else [f"{folder / name}: no image ({', '.join(IMAGE_SUFFIXES)})"]
    if empty or not classes:
        raise DataError(
            f"{folder}: expected a folder of images for each class:\n"
            + listed(empty or ["it has none"])
        )
    described: dict[str, Any] = {"path": str(folder), "files": len(paths)}
    described |= {"other_files_not_read": others} if others else {}
    return Images(paths, np.array(labels, np.int64), read_image_file), classes, described


def checked(images: Images) -> Images:
    """Return ``images`` once each was decoded, or raise `DataError` naming those that cannot be."""
    problems = []
    for row in range(len(images)):
        try:
            images.image(row)
        except DataError as error:
            problems.append(str(error))
    _refuse_images(problems)
    return images


def _refuse_images(problems: Sequence[str]) -> None:
    if problems:
        raise DataError(
            f"{len(problems)} images that cannot be used; correct or remove them:\n"
            + listed(problems)
        )


def stack_images(images: Images, *, skipped: list[str] | None = None) -> Images:
    """Decode images of one size to an array, all in colour where some are; those that cannot be
    used are named at once.

    Where ``skipped`` is given, images that cannot be decoded are left out and described there.
    """
    decoded: list[NDArray[np.uint8]] = []
    kept: list[int] = []
    problems: list[str] = []
    for row in range(len(images)):
        try:
            decoded.append(images.image(row))
            kept.append(row)
        except DataError as error:
            (problems if skipped is None else skipped).append(str(error))
    _refuse_images(problems)
    if not decoded:
        raise DataError(f"{images.items[0]}: none of {len(images)} images can be decoded")
    height, width = decoded[0].shape[:2]
    _refuse_images(
        [
            f"{images.items[row]}: {image.shape[1]} x {image.shape[0]} pixels, expected {width} x"
            f" {height} as {images.items[kept[0]]}"
            for row, image in zip(kept, decoded, strict=True)
            if image.shape[:2] != (height, width)
        ]
    )
    if len({image.ndim for image in decoded}) > 1:
        decoded = [
            np.repeat(image[..., None], 3, -1) if image.ndim == 2 else image for image in decoded
        ]
    return Images(np.stack(decoded), images.labels[kept])


def read_image_file(path: Path) -> NDArray[np.uint8]:
    """Decode one image to (h, w) or (h, w, 3) with Pillow: as stored, without its alpha channel.

    Palettes become colours, 16 bits of gray 8; of several pictures in a file the first is taken.
    """
    image_module = require_pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", image_module.DecompressionBombWarning)
            with image_module.open(path) as image:
                return _decoded(image)
    except MemoryError:
        raise
    except (image_module.DecompressionBombError, image_module.DecompressionBombWarning):
        raise DataError(
            f"{path}: has more than {image_module.MAX_IMAGE_PIXELS:,} pixels; shrink it first"
        ) from None
    except Exception as error:  # a damaged file raises whatever its decoder does
        raise DataError(f"{path}: cannot be decoded: {error or type(error).__name__}") from None


def require_pillow() -> Any:
    """Return the module ``PIL.Image``."""
    try:
        from PIL import Image
    except ImportError as error:
        raise missing_extra("pillow", "report", "image files") from error
    return Image


def _decoded(image: Any) -> NDArray[np.uint8]:
    if image.mode.startswith("I;16"):
        return np.rint(np.asarray(image) / 257).astype(np.uint8)
    if image.mode in ("I", "F"):
        raise ValueError(
            f"its pixels are {image.mode} (32 bits a value); save it with 8 or 16 bits a channel"
        )
    return np.asarray(image.convert("L" if image.mode in ("1", "L", "LA", "La") else "RGB"))


def read_npz_splits(
    data: str, *, valid: str | None = None, test: str | None = None, prefer: str | None = None
) -> tuple[dict[Split, Images], dict[str, Any]]:
    """Read the npz files of the splits; ``prefer`` is a word that chooses among several train
    files."""
    train, root = data, Path(data)
    if prefer is not None and root.is_dir():
        trains = [path for path in sorted(root.glob("*.npz")) if "train" in path.name.lower()]
        chosen = [path for path in trains if prefer in path.name.lower()]
        train = str(chosen[0]) if len(trains) > 1 and len(chosen) == 1 else data
    images, described = load_splits(
        train, valid=valid, test=test, suffixes=(".npz",), read_file=read_npz
    )
    images, cut = cut_missing(images, described["files"]["train"]["path"])
    return images, {**described, "source": data, **cut}


def read_npz(path: Path) -> tuple[Images, dict[str, Any]]:
    """Read ``x`` (uint8, (n, h, w) or (n, h, w, 3)) and ``y`` (whole numbers, (n,)) of an npz
    file."""
    size = path.stat().st_size
    if not zipfile.is_zipfile(path):
        raise DataError(
            f"{path}: is not an npz file (its {size} bytes are no whole zip archive), expected one"
            f" with arrays x and y; write it with {HOW_TO_SAVE}"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            refuse_bomb(path, size, sum(member.file_size for member in archive.infolist()))
        with np.load(path, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
    except DataError:
        raise
    except Exception as error:  # a damaged archive raises whatever its reader meets in it
        raise DataError(
            f"{path}: cannot be read as npz without unpickling ({error}); save it again with"
            f" {HOW_TO_SAVE}"
        ) from None
    missing = [name for name in ("x", "y") if name not in found]
    if missing:
        raise DataError(
            f"{path}: no array {' and '.join(missing)}; it has {', '.join(found) or 'none'}"
        )
    x, y = found["x"], found["y"]
    problems = []
    shaped = x.ndim == 3 or (x.ndim == 4 and x.shape[3] == 3)
    if x.dtype != np.uint8 or not shaped or 0 in x.shape:
        problems.append(
            f"x is {x.dtype} of shape {x.shape}, expected uint8 of shape (n, h, w) or (n, h, w, 3)"
        )
    if y.dtype.kind not in "iu" or y.ndim != 1:
        problems.append(f"y is {y.dtype} of shape {y.shape}, expected whole numbers of shape (n,)")
    elif len(x) != len(y):
        problems.append(f"{len(x)} images and {len(y)} labels, expected as many of both")
    elif len(y) and y.min() < 0:
        problems.append(f"label {y.min()} of image {int(y.argmin())}, expected 0 or more")
    if problems:
        raise DataError(f"{path}: the arrays do not fit:\n" + listed(problems))
    return Images(x, y.astype(np.int64)), describe_file(path)


def _read_cifar(
    root: Path, batches: Sequence[Path], *, alone: bool
) -> tuple[dict[Split, Images], list[str] | None, dict[str, Any]]:
    """Read train batches, the test batch beside them if wanted, and the names of the classes."""
    read = [read_cifar_binary(path) for path in batches]
    items, labels = ([getattr(images, name) for images, _ in read] for name in ("items", "labels"))
    images: dict[Split, Images] = {"train": Images(np.concatenate(items), np.concatenate(labels))}
    files = [described for _, described in read]
    test, names = root / "test_batch.bin", root / "batches.meta.txt"
    if test.exists() and not alone:
        images["test"], described = read_cifar_binary(test)
        files.append(described)
    classes = names.read_text(encoding="utf-8").split() if names.exists() else None
    images, cut = cut_missing(images, str(root))
    return images, classes, {"source": str(root), "files": files, "splits": "published", **cut}


def read_cifar_binary(path: Path) -> tuple[Images, dict[str, Any]]:
    """Read records of one label and 3 x 1024 bytes, the binary version of CIFAR-10."""
    if path.suffix != ".bin":
        raise DataError(
            f"{path}: CIFAR-10's Python version is pickles, which are programs and are not loaded;"
            " take the binary version (cifar-10-binary.tar.gz), hf:uoft-cs/cifar10, a folder of"
            " images for each class, or an npz file with arrays x and y"
        )
    stored = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    if not len(stored) or len(stored) % (1 + CIFAR_WIDTH):
        raise DataError(
            f"{path}: {len(stored)} bytes, expected records of 3073 (a label and 3 x 32 x 32"
            " values)"
        )
    records = stored.reshape(-1, 1 + CIFAR_WIDTH)
    wrong = np.flatnonzero(records[:, 0] > 9).tolist()
    if wrong:
        problems = [f"{path}: record {index}: label {records[index, 0]}" for index in wrong]
        raise DataError("labels of CIFAR-10 are 0 to 9:\n" + listed(problems))
    pixels = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return Images(np.ascontiguousarray(pixels), records[:, 0].astype(np.int64)), describe_file(path)


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
        raise DataError(
            f"{where}: images of {width} x {height} pixels; size = {size} does not divide them"
        )
    blocks = pixels.reshape(number, size, height // size, size, width // size, *pixels.shape[3:])
    return np.rint(blocks.mean((2, 4))).astype(np.uint8)
