"""Task ``image``: the class of an image read as a sequence of pixels, as in the Long Range Arena (CIFAR-10)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from wellposed.errors import ConfigError, DataError
from wellposed.tasks.data.cifar_pickles import read_cifar_names, read_cifar_pickle
from wellposed.tasks.data.files import missing_file
from wellposed.tasks.data.image_shapes import GENERATOR_VERSION, SHAPES, draw_shapes
from wellposed.tasks.data.images import (
    Images,
    pixel_encoder,
    read_cifar_binary,
    read_class_folder,
    shrink,
    to_gray,
)
from wellposed.tasks.data.npz import cut_missing_images, read_npz_splits
from wellposed.tasks.kinds.classification import ClassificationTask, LabelledExamples, require_positive
from wellposed.tasks.task import SPLITS, TASKS, Split, TaskSpec

BUILTIN_SIZES: dict[Split, int] = {"train": 1000, "valid": 200, "test": 200}
_BUILTIN_SIDE = 32


@dataclass(frozen=True)
class ImageOptions:
    """Options of the task `image`."""

    data: str = "builtin"
    """builtin (drawn shapes), an npz file or folder, CIFAR-10 (Python or binary), or a folder of images by class."""
    valid: str | None = None
    """npz file of the valid split; found beside the train file, or cut from it, where not given."""
    test: str | None = None
    """npz file of the test split; found beside the train file, or cut from it, where not given."""
    color: Literal["gray", "rgb"] = "gray"
    """gray is one token a pixel, 0.299 R + 0.587 G + 0.114 B; rgb is three."""
    size: int | None = None
    """Side that images are shrunk to by block means; as they are where not given."""
    limit_train: int | None = None
    """Keep only the first images of train."""
    data_seed: int | None = None
    """Seed of the drawn shapes; 0 where not given."""


class ImageTask(ClassificationTask):
    """Classification of images from their pixels, row by row; nothing tells the model which pixels are neighbours.

    Tokens are the values 0 to 255. The Long Range Arena's task is CIFAR-10 in gray: 1024 tokens, ten classes. Of its
    two releases the binary one is read record by record; the pickles of the Python one are read as data, without
    unpickling: nothing they name is imported or called.

    Source: Krizhevsky 2009; Tay et al. 2021.

    >>> from wellposed.tasks import build_task
    >>> task = build_task("image", {"size": 8})
    >>> task.labels, task.lengths("test")[0]
    (('disc', 'ring', 'square', 'cross'), 64)
    """

    name: ClassVar[str] = "image"

    def __init__(self, options: ImageOptions) -> None:
        require_positive("image", size=options.size, limit_train=options.limit_train)
        images, names, self._source = _load(options)
        full = len(images["train"])
        if options.limit_train is not None:
            images["train"] = images["train"].select(range(min(full, options.limit_train)))
        self._limited = full - len(images["train"])
        shapes = {split: images[split].pixels.shape[1:] for split in SPLITS}
        if len(set(shapes.values())) > 1:
            raise DataError(f"{options.data}: the splits differ in shape: {shapes}; give files of one shape")
        for split in SPLITS:
            images[split] = _prepared(images[split], options, f"{options.data} ({split})")
        labels = _labels(images, names, options.data)
        examples: dict[Split, LabelledExamples] = {}
        for split in SPLITS:
            examples[split] = LabelledExamples(images[split].tokens(), images[split].labels)
        self._shape = list(images["train"].pixels.shape[1:])
        self.options = options
        super().__init__(encoder=pixel_encoder(), examples=examples, labels=labels)

    def description(self) -> dict[str, Any]:
        return {
            "task": self.name,
            **self._source,
            "tokenizer": self._encoder.description(),
            **self._describe_examples(),
            "image": self._shape,
            "color": self.options.color,
            "shrunk_to": self.options.size,
            "train_images_left_out_by_limit_train": self._limited,
        }


def _labels(images: dict[Split, Images], names: list[str] | None, where: str) -> list[str]:
    """Return the names of the labels of train; other splits have no others."""
    known = set(images["train"].labels.tolist())
    foreign = {split: sorted(set(images[split].labels.tolist()) - known) for split in SPLITS[1:]}
    if any(foreign.values()):
        raise DataError(f"{where}: labels that train does not have: {foreign}; give another train file")
    if len(known) < 2:
        raise DataError(f"{where}: every image has the label {known.pop()}, expected two labels or more")
    return names or [str(label) for label in range(max(known) + 1)]


def _prepared(images: Images, options: ImageOptions, where: str) -> Images:
    pixels = images.pixels
    if options.color == "gray":
        pixels = to_gray(pixels)
    elif pixels.ndim == 3:
        raise ConfigError(f"{where}: color = 'rgb', but the images are gray; give color='gray' or a file in colour")
    return Images(pixels if options.size is None else shrink(pixels, options.size, where), images.labels)


def _load(options: ImageOptions) -> tuple[dict[Split, Images], list[str] | None, dict[str, Any]]:
    given = [name for name in ("valid", "test") if getattr(options, name) is not None]
    if options.data == "builtin":
        if given or options.color == "rgb":
            raise ConfigError("image: valid, test and color='rgb' need data=FILE; the builtin shapes are gray")
        return _shapes(options)
    if options.data_seed is not None:
        raise ConfigError(f"image: data_seed says what is drawn and has no effect on {options.data}")
    root = Path(options.data)
    if not root.exists() and not options.data.startswith("hf:"):
        raise missing_file(root)
    if root.is_dir():
        folders = _read_folder(root)
        if folders is not None:
            if given:
                raise ConfigError(f"image: {' and '.join(given)} name npz files; {root} is a folder of another kind")
            return folders
    if root.name.startswith("data_batch"):
        if given:
            raise ConfigError(f"image: {' and '.join(given)} name npz files; {root} is a batch of CIFAR-10")
        return _read_cifar(root.parent, [root], only=True)
    images, described = read_npz_splits(options.data, valid=options.valid, test=options.test, prefer=options.color)
    return images, None, described


def _shapes(options: ImageOptions) -> tuple[dict[Split, Images], list[str], dict[str, Any]]:
    seed = options.data_seed or 0
    images: dict[Split, Images] = {}
    for split, count in BUILTIN_SIZES.items():
        images[split] = draw_shapes(count, _BUILTIN_SIDE, f"{seed}/{split}")
    described: dict[str, Any] = {
        "source": "builtin: drawn shapes (no benchmark: for trying things out)",
        "generator_version": GENERATOR_VERSION,
        "data_seed": seed,
        "sha256": {split: images[split].sha256() for split in SPLITS},
    }
    return images, list(SHAPES), described


def _read_folder(root: Path) -> tuple[dict[Split, Images], list[str] | None, dict[str, Any]] | None:
    """Read CIFAR-10's binary version or folders of images by class; None where the folder is neither."""
    batches = sorted(root.glob("data_batch*.bin")) or sorted(root.glob("data_batch_[0-9]"))
    if batches:
        return _read_cifar(root, batches)
    trains = root / "train"
    if trains.is_dir():
        return _read_class_folders(root)
    return None


def _read_cifar(
    root: Path, batches: list[Path], *, only: bool = False
) -> tuple[dict[Split, Images], list[str] | None, dict[str, Any]]:
    """Read batches of either release and, unless ``only`` they are asked for, the test batch beside them."""
    import numpy as np

    binary = batches[0].suffix == ".bin"
    test = root / ("test_batch.bin" if binary else "test_batch")
    wanted = [*batches, test] if test.exists() and not only else batches
    read = {path: (read_cifar_binary if binary else read_cifar_pickle)(path) for path in wanted}
    train = [read[path][0] for path in batches]
    images: dict[Split, Images] = {
        "train": Images(np.concatenate([i.pixels for i in train]), np.concatenate([i.labels for i in train]))
    }
    if test in read:
        images["test"] = read[test][0]
    names = root / ("batches.meta.txt" if binary else "batches.meta")
    labels = None
    if names.exists():
        labels = names.read_text(encoding="utf-8").split() if binary else read_cifar_names(names)
    described = {"source": str(root), "files": [entry for _, entry in read.values()], "splits": "published"}
    images, described = cut_missing_images(images, described, str(root))
    return images, labels, described


def _read_class_folders(root: Path) -> tuple[dict[Split, Images], list[str], dict[str, Any]]:
    images: dict[Split, Images] = {}
    files: dict[str, Any] = {}
    names: list[str] = []
    folders: dict[Split, tuple[str, ...]] = {"train": ("train",), "valid": ("valid", "val"), "test": ("test",)}
    for split, words in folders.items():
        folder = next((root / word for word in words if (root / word).is_dir()), None)
        if folder is None:
            continue
        images[split], classes, files[split] = read_class_folder(folder)
        names = names or classes
        if classes != names:
            raise DataError(f"{folder}: classes {classes}, expected those of train: {names}")
    described = {"source": str(root), "files": files, "splits": "folders"}
    images, described = cut_missing_images(images, described, str(root))
    return images, names, described


TASKS.register("image")(
    TaskSpec("image", ImageOptions, ImageTask, "the class of an image read pixel by pixel (accuracy)")
)
