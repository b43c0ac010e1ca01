"""The npz files of an image task: found by name beside the train file, missing splits cut from train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wellposed.errors import ConfigError
from wellposed.tasks.data.files import find_split_files
from wellposed.tasks.data.images import Images, read_npz
from wellposed.tasks.kinds.classification import cut_rows
from wellposed.tasks.task import SPLITS, Split


def read_npz_splits(
    data: str, *, valid: str | None = None, test: str | None = None, prefer: str | None = None
) -> tuple[dict[Split, Images], dict[str, Any]]:
    """Read the npz files of the splits and describe them; ``prefer`` is a word that chooses among several train files.

    Raises:
        ConfigError: a data set of the hub.
        DataError: no or several train files, arrays that do not fit.
    """
    if data.startswith("hf:"):
        raise ConfigError(f"{data}: hub data sets of images are not read; save them as npz with arrays x and y")
    found = find_split_files(_preferred(data, prefer), valid=valid, test=test, suffixes=(".npz",))
    images: dict[Split, Images] = {}
    files: dict[Split, Any] = {}
    for split, path in found.paths.items():
        images[split], files[split] = read_npz(path)
    described: dict[str, Any] = {"source": data, "files": files, "splits": found.how}
    return cut_missing_images(images, described, str(found.paths["train"]))


def cut_missing_images(
    images: dict[Split, Images], described: dict[str, Any], where: str
) -> tuple[dict[Split, Images], dict[str, Any]]:
    """Cut the splits that have no images from train by a fixed shuffle."""
    missing: list[Split] = [split for split in SPLITS if split not in images]
    if not missing:
        return images, described
    train = images["train"]
    rows, cut = cut_rows(len(train), missing, where)
    cut_images = dict(images)
    for split, chosen in rows.items():
        cut_images[split] = train.select(chosen)
    return cut_images, {**described, "cut_from_train": cut}


def _preferred(data: str, word: str | None) -> str:
    """Return the one train file of a folder whose name holds ``word``, where there are several train files."""
    root = Path(data)
    if word is None or not root.is_dir():
        return data
    trains = [path for path in sorted(root.glob("*.npz")) if "train" in path.name.lower()]
    chosen = [path for path in trains if word in path.name.lower()]
    return str(chosen[0]) if len(trains) > 1 and len(chosen) == 1 else data
