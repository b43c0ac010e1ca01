"""Labelled images of every split: drawn, from npz files, from CIFAR-10 as released, or from a
folder for each class."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from wellposed.errors import ConfigError, DataError
from wellposed.tasks.checks import given_options
from wellposed.tasks.data.cifar import read_cifar
from wellposed.tasks.data.files import missing_file
from wellposed.tasks.data.images import IMAGE_SUFFIXES, Images
from wellposed.tasks.data.npz import read_npz_splits
from wellposed.tasks.data.splits import Selectable, cut_missing, find_split_folders
from wellposed.tasks.generators.shapes import GENERATOR_VERSION, SHAPES, draw_shapes
from wellposed.tasks.task import SPLITS, Split

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BUILTIN_SIZES: dict[Split, int] = {"train": 1000, "valid": 200, "test": 200}
_BUILTIN_SIDE = 32


class ImageSource(Protocol):
    """The options that say where images are."""

    @property
    def data(self) -> str: ...
    @property
    def valid(self) -> str | None: ...
    @property
    def test(self) -> str | None: ...
    @property
    def data_seed(self) -> int | None: ...


class LabelledImages(Selectable, Protocol):
    """Images by row, and their labels."""

    @property
    def labels(self) -> NDArray[np.int64]: ...

    def image(self, row: int, /) -> NDArray[np.uint8]: ...


Folder = TypeVar("Folder", bound=LabelledImages)


def load_images(
    task: str,
    options: ImageSource,
    *,
    read_folder: Callable[[Path], tuple[Folder, list[str], dict[str, Any]]],
    prefer: str | None = None,
) -> tuple[Mapping[Split, Images | Folder], list[str] | None, dict[str, Any]]:
    """Return the images of every split, the names of the labels where they have names, and a
    description.

    ``read_folder`` reads a folder that holds a folder of images for each class; ``prefer`` is a
    word that chooses among several npz files. Splits that are missing are cut from train.
    """
    given = " and ".join(given_options(options, ("valid", "test")))
    if options.data == "builtin":
        if given:
            raise ConfigError(
                f"{task}: {given} need data=FILE; the builtin shapes are gray, in splits of"
                " their own"
            )
        return _shapes(options.data_seed or 0)
    if options.data_seed is not None:
        raise ConfigError(
            f"{task}: data_seed says what is drawn and has no effect on {options.data}"
        )
    root = Path(options.data)
    if not root.exists() and not options.data.startswith("hf:"):
        raise missing_file(root)
    batches = sorted(root.glob("data_batch*.bin")) or sorted(root.glob("data_batch_[0-9]"))
    of_another_kind = bool(batches) or _holds_folders(root)
    if given and of_another_kind:
        raise ConfigError(f"{task}: {given} name npz files; {root} is a folder of another kind")
    if batches:
        return read_cifar(root, batches, with_test=True)
    if of_another_kind:
        return _read_class_folders(root, read_folder)
    if root.name.startswith("data_batch"):
        if given:
            raise ConfigError(f"{task}: {given} name npz files; {root} is a batch of CIFAR-10")
        return read_cifar(root.parent, [root], with_test=False)
    _refuse_loose_images(root)
    images, described = read_npz_splits(
        options.data, valid=options.valid, test=options.test, prefer=prefer
    )
    return images, None, described


def label_names(
    images: Mapping[Split, LabelledImages], names: Sequence[str] | None, where: str
) -> list[str]:
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


def _refuse_loose_images(root: Path) -> None:
    """Refuse an image, and a folder of images without a folder for each class."""
    entries = sorted(root.iterdir()) if root.is_dir() else [root]
    loose = [entry for entry in entries if entry.suffix.lower() in IMAGE_SUFFIXES]
    if loose and not any(entry.suffix == ".npz" for entry in entries):
        where = (
            "is an image"
            if loose == [root]
            else f"holds {len(loose)} images, such as {loose[0].name}"
        )
        raise DataError(
            f"{root}: {where}, and nothing says of which class; name a folder that has one folder"
            " for each class"
        )


def _holds_folders(root: Path) -> bool:
    """Whether ``root`` is a folder of folders, with no npz file beside them."""
    return (
        root.is_dir()
        and not any(root.glob("*.npz"))
        and any(entry.is_dir() for entry in root.iterdir())
    )


def _read_class_folders(
    root: Path, read_folder: Callable[[Path], tuple[Folder, list[str], dict[str, Any]]]
) -> tuple[dict[Split, Folder], list[str], dict[str, Any]]:
    """Read ``root/<split>/<class>/``, or ``root/<class>/`` where no folder is named as a split."""
    folders = find_split_folders(root)
    if folders and "train" not in folders:
        others = " and ".join(folder.name for folder in folders.values())
        raise DataError(f"{root}: has a folder {others} and no folder train; add it")
    images: dict[Split, Folder] = {}
    files: dict[str, Any] = {}
    names: list[str] = []
    for split, folder in (folders or {SPLITS[0]: root}).items():
        images[split], classes, files[split] = read_folder(folder)
        names = names or classes
        if classes != names:
            raise DataError(f"{folder}: classes {classes}, expected those of train: {names}")
    images, cut = cut_missing(images, str(root))
    return (
        images,
        names,
        {
            "source": str(root),
            "files": files,
            "splits": "folders" if folders else "one folder",
            **cut,
        },
    )
