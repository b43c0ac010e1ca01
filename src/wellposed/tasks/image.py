"""Task ``image``: the class of an image read as a sequence of pixels, as in the Long Range Arena (CIFAR-10)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from wellposed.errors import ConfigError, DataError
from wellposed.tasks.checks import given_options, require_positive
from wellposed.tasks.data.cifar import read_cifar
from wellposed.tasks.data.files import missing_file
from wellposed.tasks.data.images import Images, read_class_folder
from wellposed.tasks.data.npz import read_npz_splits
from wellposed.tasks.data.splits import cut_missing, find_split_folders
from wellposed.tasks.generators.shapes import GENERATOR_VERSION, SHAPES, draw_shapes
from wellposed.tasks.kinds.pixels import PixelTask, prepare_images
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


class ImageTask(PixelTask):
    """Classification of images from their pixels, row by row; nothing tells the model which pixels are neighbours.

    Tokens are the values 0 to 255. The Long Range Arena's task is CIFAR-10 in gray: 1024 tokens, ten classes. Of its
    two releases the binary one is read record by record; of the pickles of the Python one, nothing that they name is
    imported or called.

    Source: Krizhevsky 2009; Tay et al. 2021.

    >>> from wellposed.tasks import build_task
    >>> task = build_task("image", {"size": 8})
    >>> task.labels, task.lengths("test")[0]
    (('disc', 'ring', 'square', 'cross'), 64)
    """

    name: ClassVar[str] = "image"

    def __init__(self, options: ImageOptions) -> None:
        require_positive("image", options, "size", "limit_train")
        self.options = options
        images, names, source = _load(options)
        full = len(images["train"])
        if options.limit_train is not None:
            images["train"] = images["train"].select(range(min(full, options.limit_train)))
        limited = full - len(images["train"])
        shapes = {split: images[split].pixels.shape[1:] for split in SPLITS}
        if len(set(shapes.values())) > 1:
            raise DataError(f"{options.data}: the splits differ in shape: {shapes}; give files of one shape")
        for split in SPLITS:
            images[split] = _prepared(images[split], options, f"{options.data} ({split})")
        super().__init__(
            images=images,
            labels=_labels(images, names, options.data),
            source=source,
            details={
                "color": options.color,
                "shrunk_to": options.size,
                "train_images_left_out_by_limit_train": limited,
            },
        )


def _labels(images: Mapping[Split, Images], names: list[str] | None, where: str) -> list[str]:
    """Return the names of the labels of train; other splits have no others."""
    known = set(images["train"].labels.tolist())
    foreign = {split: sorted(set(images[split].labels.tolist()) - known) for split in SPLITS[1:]}
    if any(foreign.values()):
        raise DataError(f"{where}: labels that train does not have: {foreign}; give another train file")
    if len(known) < 2:
        raise DataError(f"{where}: every image has the label {known.pop()}, expected two labels or more")
    return names or [str(label) for label in range(max(known) + 1)]


def _prepared(images: Images, options: ImageOptions, where: str) -> Images:
    if options.color == "rgb" and images.pixels.ndim == 3:
        raise ConfigError(f"{where}: color = 'rgb', but the images are gray; give color='gray' or a file in colour")
    return prepare_images(images, where, size=options.size, gray=options.color == "gray")


def _load(options: ImageOptions) -> tuple[dict[Split, Images], list[str] | None, dict[str, Any]]:
    given = " and ".join(given_options(options, ("valid", "test")))
    if options.data == "builtin":
        if given or options.color == "rgb":
            raise ConfigError("image: valid, test and color='rgb' need data=FILE; the builtin shapes are gray")
        return _shapes(options.data_seed or 0)
    if options.data_seed is not None:
        raise ConfigError(f"image: data_seed says what is drawn and has no effect on {options.data}")
    root = Path(options.data)
    if not root.exists() and not options.data.startswith("hf:"):
        raise missing_file(root)
    batches = sorted(root.glob("data_batch*.bin")) or sorted(root.glob("data_batch_[0-9]"))
    of_another_kind = bool(batches) or (root / "train").is_dir()
    if given and of_another_kind:
        raise ConfigError(f"image: {given} name npz files; {root} is a folder of another kind")
    if batches:
        return read_cifar(root, batches, with_test=True)
    if of_another_kind:
        return _read_class_folders(root)
    if root.name.startswith("data_batch"):
        if given:
            raise ConfigError(f"image: {given} name npz files; {root} is a batch of CIFAR-10")
        return read_cifar(root.parent, [root], with_test=False)
    images, described = read_npz_splits(options.data, valid=options.valid, test=options.test, prefer=options.color)
    return images, None, described


def _shapes(seed: int) -> tuple[dict[Split, Images], list[str], dict[str, Any]]:
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


def _read_class_folders(root: Path) -> tuple[dict[Split, Images], list[str], dict[str, Any]]:
    images: dict[Split, Images] = {}
    files: dict[str, Any] = {}
    names: list[str] = []
    for split, folder in find_split_folders(root).items():
        images[split], classes, files[split] = read_class_folder(folder)
        names = names or classes
        if classes != names:
            raise DataError(f"{folder}: classes {classes}, expected those of train: {names}")
    images, cut = cut_missing(images, str(root))
    return images, names, {"source": str(root), "files": files, "splits": "folders", **cut}


TASKS.register("image")(
    TaskSpec("image", ImageOptions, ImageTask, "the class of an image read pixel by pixel (accuracy)")
)
