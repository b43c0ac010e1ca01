"""Labelled images: folders by class, the hub, or other readers in `SOURCES`."""

from __future__ import annotations

import hashlib
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from wellposed.errors import DataError, import_extra, is_out_of_memory
from wellposed.install_line import install_line
from wellposed.lazy import ModuleOnFirstUse
from wellposed.options import Size
from wellposed_lab.tasks.data import files, splits
from wellposed_lab.tasks.data.splits import SPLIT_WORDS, SPLITS, DataOptions, Described, Split

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
else:
    np = ModuleOnFirstUse("numpy")

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
HUB_IMAGES = ("image", "img")
HUB_LABELS = ("label", "labels", "fine_label")
_LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class ImageDataOptions(DataOptions):
    """Labelled images."""

    data: str
    """A folder with one folder of images per class (perhaps inside train, valid and test folders),
    or hf:name[:config]; with wellposed-studies also npz, CIFAR-10's binary files, and builtin."""
    limit_train: Size | None = None
    """Keep only the first images of train."""


@dataclass(frozen=True)
class Images:
    """Images and their labels, decoded one by one on demand."""

    items: Any
    """Arguments of ``read``."""
    labels: NDArray[np.int64]
    read: Callable[[Any], NDArray[np.uint8]]
    names: Sequence[str] = ()
    """Names of the labels, if they have names."""

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, rows: Sequence[int]) -> Images:
        chosen = list(rows)
        return replace(self, items=[self.items[i] for i in chosen], labels=self.labels[chosen])

    def image(self, row: int) -> NDArray[np.uint8]:
        """Return the pixels of one image, (height, width) or (height, width, 3)."""
        return self.read(self.items[row])


Loaded: TypeAlias = "splits.Loaded[Images]"
SOURCES: list[Callable[[DataOptions], Loaded | None]] = []
"""Readers of other data, appended by installed packages; each returns None for data it cannot read."""


def checked(images: Images) -> Images:
    """Return ``images``, or raise `DataError` with all of them that cannot be decoded."""
    deque(decode(images), maxlen=0)
    return images


def load_images(options: ImageDataOptions, ready: Callable[[Images], Images] = checked) -> Loaded:
    """Return the images of every split, of train the first ``limit_train``; missing splits are cut
    from train. ``ready`` is applied to each split: it decodes every image and reports bad ones."""
    loaded = next((loaded for read in SOURCES if (loaded := read(options))), None)
    images, described = loaded or _read(options, ready)
    images, described = splits.cut_missing(images, options.data, described)
    full = len(images["train"])
    limit = options.limit_train
    if limit is not None:
        images["train"] = images["train"].select(range(min(full, limit)))
    left_out = {"train_images_left_out_by_limit_train": full - len(images["train"])}
    return images, described | left_out


def _read(options: DataOptions, ready: Callable[[Images], Images]) -> Loaded:
    if options.data.startswith("hf:"):
        return _read_hub(options, ready)
    root = Path(options.data)
    if options.data != "builtin" and not root.exists():
        raise files.missing_file(root)
    if root.is_dir() and any(entry.is_dir() for entry in root.iterdir()):
        return _read_class_folders(options, ready)
    raise DataError(
        f"{root}: expected a folder with one folder of images for each class, or hf:NAME; for npz"
        f" files, CIFAR-10's binary files and drawn shapes: {install_line('wellposed-studies')}"
    )


def label_names(images: dict[Split, Images], where: str) -> list[str]:
    """Return the label names of train; other splits may have no others."""
    train_labels = set(images["train"].labels.tolist())
    foreign = {
        split: sorted(set(images[split].labels.tolist()) - train_labels) for split in SPLITS[1:]
    }
    if any(foreign.values()):
        raise DataError(f"{where}: labels that train lacks: {foreign}; give another train file")
    if len(train_labels) < 2:
        raise DataError(
            f"{where}: every image has label {train_labels.pop()}, expected two or more"
        )
    return list(images["train"].names or map(str, range(max(train_labels) + 1)))


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
        if any(type(value) is not int or value < 0 for value in labels):
            raise DataError(f"{where}: {label!r} holds values that are no whole number from 0")
        names = getattr(rows.features[label], "names", None) or ()

        def read(row: int) -> NDArray[np.uint8]:
            try:
                return _decoded(rows[row][image])
            except Exception as error:  # decoders raise many types of errors
                if is_out_of_memory(error):
                    raise
                raise DataError(f"{where}:{row + 1}: cannot be decoded: {error}") from None

        return ready(Images(range(len(labels)), np.array(labels, np.int64), read, names))

    require_pillow()
    return splits.load_hub_splits(options.data, read_hub)


def _read_class_folders(options: DataOptions, ready: Callable[[Images], Images]) -> Loaded:
    """Read ``data/<split>/<class>/``, or ``data/<class>/`` if no folder is named as a split. Files
    may lie at any depth. An empty class is an error; files of other suffixes are counted."""
    splits.refuse_split_files(options, "a folder of images by class")
    root = Path(options.data)
    folders: dict[Split, Path] = {
        split: folders_of[0]
        for split in SPLITS
        if (folders_of := [root / word for word in SPLIT_WORDS[split] if (root / word).is_dir()])
    }
    if folders and "train" not in folders:
        others = " and ".join(folder.name for folder in folders.values())
        raise DataError(f"{root}: has a folder {others} and no folder train; add it")

    images: dict[Split, Images] = {}
    described: dict[Split, Described] = {}
    for split, folder in (folders or {SPLITS[0]: root}).items():
        files, described[split] = _class_files(folder)
        expected = images.get("train", files).names
        if files.names != expected:
            raise DataError(f"{folder}: classes {files.names}, expected those of train: {expected}")
        images[split] = ready(files)
    layout = "folders" if folders else "one folder"

    return images, {"source": options.data, "files": described, "splits": layout}


def _class_files(folder: Path) -> tuple[Images, Described]:
    entries = sorted(folder.iterdir())
    classes = [entry.name for entry in entries if entry.is_dir()]
    lost = [entry for entry in entries if not entry.exists()]
    paths: list[Path] = []
    labels: list[int] = []
    problems = [] if classes else ["it has none"]
    others = 0
    for number, name in enumerate(classes):
        members = sorted((folder / name).rglob("*"))
        lost += [path for path in members if path.is_symlink() and not path.is_file()]
        within = [path for path in members if path.is_file()]
        images = [path for path in within if path.suffix.lower() in IMAGE_SUFFIXES]
        paths += images
        labels += [number] * len(images)
        others += len(within) - len(images)
        if not images:
            problems.append(f"{folder / name}: no file named {', '.join(IMAGE_SUFFIXES)}")

    problems += [f"{path}: a link to no file; links to folders are not followed" for path in lost]
    files.refuse(f"{folder}: expected a folder of files for each class", problems)
    numbers = np.array(labels, np.int64)
    digest = hashlib.sha256(numbers.tobytes())
    for path in paths:
        digest.update(hashlib.sha256(path.read_bytes()).digest())

    unread = {"other_files_not_read": others} if others else {}
    described = {"path": str(folder), "files": len(paths), **unread, "sha256": digest.hexdigest()}
    return Images(paths, numbers, read_image_file, classes), described


def decode(images: Images) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """Yield number and pixels of each image; raise `DataError` with every failure."""
    problems: list[str] = []
    for row in range(len(images)):
        try:
            yield row, images.image(row)
        except DataError as error:
            problems.append(str(error))
    refuse_images(problems)


def refuse_images(problems: Sequence[str]) -> None:
    files.refuse(f"{len(problems)} images that cannot be used; correct or remove them", problems)


def read_image_file(path: Path) -> NDArray[np.uint8]:
    """Decode the first picture of a file to (h, w) or (h, w, 3) with Pillow, without alpha channel.
    Palettes become colours, and 16-bit gray becomes 8-bit."""
    module = require_pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", module.DecompressionBombWarning)
            with module.open(path) as image:
                return _decoded(image)
    except (module.DecompressionBombError, module.DecompressionBombWarning):
        raise DataError(f"{path}: over {module.MAX_IMAGE_PIXELS:,} pixels; shrink it") from None
    except Exception as error:  # decoders raise many types of errors
        if is_out_of_memory(error):
            raise
        raise DataError(f"{path}: cannot be decoded: {error or type(error).__name__}") from None


def require_pillow() -> Any:
    """Return the module ``PIL.Image``."""
    return import_extra("PIL.Image", "images", "image files", package="pillow")


def _decoded(image: Any) -> NDArray[np.uint8]:
    if image.mode.startswith("I;16"):
        return np.rint(np.asarray(image) / 257).astype(np.uint8)
    if image.mode in ("I", "F"):
        raise ValueError(f"its pixels are {image.mode}, 32 bits a value; save it with 8 or 16")
    return np.asarray(image.convert("L" if image.mode in ("1", "L", "LA", "La") else "RGB"))


def to_gray(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return 0.299 R + 0.587 G + 0.114 B, rounded; gray images are unchanged.

    >>> to_gray(np.array([[[[255, 255, 255], [100, 0, 0]]]], np.uint8)).tolist()
    [[[255, 30]]]
    """
    return pixels if pixels.ndim == 3 else np.rint(pixels @ np.array(_LUMA)).astype(np.uint8)
