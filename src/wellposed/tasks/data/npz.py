"""Images in npz files, one a split, read without unpickling."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

from wellposed.errors import ConfigError, DataError, listed
from wellposed.tasks.data.files import describe_file, refuse_bomb
from wellposed.tasks.data.images import Images
from wellposed.tasks.data.splits import cut_missing, load_splits
from wellposed.tasks.task import Split

HOW_TO_SAVE = "numpy.savez_compressed(path, x=uint8 images, y=integer labels)"


def read_npz_splits(
    data: str, *, valid: str | None = None, test: str | None = None, prefer: str | None = None
) -> tuple[dict[Split, Images], dict[str, Any]]:
    """Read the npz files of the splits; ``prefer`` is a word that chooses among several train
    files."""
    if data.startswith("hf:"):
        raise ConfigError(
            f"{data}: hub data sets of images are not read; save them as npz with arrays x and y"
        )
    train = _preferred(data, prefer)
    images, described = load_splits(
        train, valid=valid, test=test, suffixes=(".npz",), read_file=read_npz
    )
    images, cut = cut_missing(images, described["files"]["train"]["path"])
    return images, {**described, "source": data, **cut}


def _preferred(data: str, word: str | None) -> str:
    """Return the one train file of a folder whose name holds ``word``, where there are several
    train files."""
    root = Path(data)
    if word is None or not root.is_dir():
        return data
    trains = [path for path in sorted(root.glob("*.npz")) if "train" in path.name.lower()]
    chosen = [path for path in trains if word in path.name.lower()]
    return str(chosen[0]) if len(trains) > 1 and len(chosen) == 1 else data


def _unpacked_size(path: Path) -> int:
    with zipfile.ZipFile(path) as archive:
        return sum(member.file_size for member in archive.infolist())


def read_npz(path: Path) -> tuple[Images, dict[str, Any]]:
    """Read ``x`` (uint8, (n, h, w) or (n, h, w, 3)) and ``y`` (whole numbers, (n,)) of an npz
    file."""
    import numpy as np

    if not zipfile.is_zipfile(path):
        raise DataError(
            f"{path}: is not an npz file (its {path.stat().st_size} bytes are no whole zip"
            f" archive), expected one with arrays x and y; write it with {HOW_TO_SAVE}"
        )
    try:
        refuse_bomb(path, path.stat().st_size, _unpacked_size(path))
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
    if (
        x.dtype != np.uint8
        or x.ndim not in (3, 4)
        or (x.ndim == 4 and x.shape[3] != 3)
        or 0 in x.shape
    ):
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
