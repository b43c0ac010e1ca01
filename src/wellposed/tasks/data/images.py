"""Images as rows of bytes: npz, the binary release of CIFAR-10, folders of images by class; nothing is unpickled."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wellposed.errors import DataError, listed, missing_extra

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from wellposed.tasks.batches.ragged import Ragged
    from wellposed.tasks.text.tokenizers import WordEncoder

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm")
_LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class Images:
    """Images (number, height, width) or (number, height, width, 3), uint8, and their labels."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, rows: Sequence[int]) -> Images:
        """Return the images ``rows``."""
        return Images(self.pixels[list(rows)], self.labels[list(rows)])

    def sha256(self) -> str:
        """Return the hash of pixels and labels."""
        return hashlib.sha256(self.pixels.tobytes() + self.labels.tobytes()).hexdigest()

    def tokens(self) -> Ragged:
        """Return each image as one sequence, row by row, a channel after the other at each pixel."""
        import numpy as np

        from wellposed.tasks.batches.ragged import Ragged
        from wellposed.tasks.text.tokenizers import NUM_SPECIAL

        flat = self.pixels.reshape(-1).astype(np.int16) + NUM_SPECIAL
        return Ragged(flat, np.full(len(self), self.pixels[0].size))


def pixel_encoder() -> WordEncoder:
    """Return the vocabulary of pixel values; as text, an image is its values between spaces."""
    from wellposed.tasks.text.tokenizers import WordEncoder

    return WordEncoder([str(value) for value in range(256)])


def read_npz(path: Path) -> tuple[Images, dict[str, Any]]:
    """Read ``x`` (uint8, (n, h, w) or (n, h, w, 3)) and ``y`` (whole numbers, (n,)) of an npz file.

    Raises:
        DataError: not an npz file, arrays that are missing or do not fit, arrays of Python objects.
    """
    import zipfile
    import zlib

    import numpy as np

    if not zipfile.is_zipfile(path):
        raise DataError(
            f"{path}: is not an npz file (its {path.stat().st_size} bytes are no whole zip archive), expected one with "
            "arrays x and y; write it with numpy.savez_compressed(path, x=uint8 images, y=integer labels)"
        )
    try:
        with np.load(path, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, zipfile.BadZipFile, EOFError, zlib.error) as error:
        raise DataError(
            f"{path}: cannot be read as npz without unpickling ({error}); save it again with "
            "numpy.savez_compressed(path, x=uint8 images, y=integer labels)"
        ) from None
    missing = [name for name in ("x", "y") if name not in found]
    if missing:
        raise DataError(f"{path}: no array {' and '.join(missing)}; it has {', '.join(found) or 'none'}")
    x, y = found["x"], found["y"]
    problems = []
    if x.dtype != np.uint8 or x.ndim not in (3, 4) or (x.ndim == 4 and x.shape[3] != 3) or 0 in x.shape:
        problems.append(f"x is {x.dtype} of shape {x.shape}, expected uint8 of shape (n, h, w) or (n, h, w, 3)")
    if y.dtype.kind not in "iu" or y.ndim != 1:
        problems.append(f"y is {y.dtype} of shape {y.shape}, expected whole numbers of shape (n,)")
    elif len(x) != len(y):
        problems.append(f"{len(x)} images and {len(y)} labels, expected as many of both")
    elif len(y) and y.min() < 0:
        problems.append(f"label {y.min()} of image {int(y.argmin())}, expected 0 or more")
    if problems:
        raise DataError(f"{path}: the arrays do not fit:\n" + listed(problems))
    return Images(x, y.astype(np.int64)), describe_file(path)


def describe_file(path: Path) -> dict[str, Any]:
    """Return path, sha256 and size of a file."""
    stored = path.read_bytes()
    return {"path": str(path), "sha256": hashlib.sha256(stored).hexdigest(), "bytes": len(stored)}


def read_cifar_binary(path: Path) -> tuple[Images, dict[str, Any]]:
    """Read records of one label and 3 x 1024 bytes, the binary version of CIFAR-10.

    Raises:
        DataError: a length that is no multiple of 3073 bytes, a label above 9 (with its record).
    """
    import numpy as np

    stored = np.frombuffer(path.read_bytes(), dtype=np.uint8)
    if not len(stored) or len(stored) % 3073:
        raise DataError(f"{path}: {len(stored)} bytes, expected records of 3073 (a label and 3 x 32 x 32 values)")
    records = stored.reshape(-1, 3073)
    wrong = np.flatnonzero(records[:, 0] > 9)
    if len(wrong):
        problems = [f"{path}: record {index}: label {records[index, 0]}" for index in wrong.tolist()]
        raise DataError("labels of CIFAR-10 are 0 to 9:\n" + listed(problems))
    pixels = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return Images(np.ascontiguousarray(pixels), records[:, 0].astype(np.int64)), describe_file(path)


def read_image_file(path: Path) -> NDArray[np.uint8]:
    """Decode one image to (h, w) or (h, w, 3) with Pillow.

    Raises:
        ConfigError: Pillow is not installed.
        DataError: not an image that Pillow reads.
    """
    import numpy as np

    try:
        from PIL import Image
    except ImportError as error:
        raise missing_extra("pillow", "report", "image files") from error
    try:
        with Image.open(path) as image:
            gray = image.mode in ("1", "L", "I", "I;16", "F", "LA")
            return np.asarray(image.convert("L" if gray else "RGB"))
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{path}: cannot be decoded: {error}") from None


def read_image_files(paths: Sequence[Path], labels: Sequence[int], *, skipped: list[str] | None = None) -> Images:
    """Decode images of one size; where some are in colour, all are.

    Args:
        paths: the files.
        labels: the label of each.
        skipped: where given, files that cannot be decoded are left out, and what is wrong with them is appended here.

    Raises:
        DataError: files that cannot be decoded or differ in size, all named.
    """
    import numpy as np

    decoded: list[NDArray[np.uint8]] = []
    kept: list[tuple[Path, int]] = []
    problems = []
    for path, label in zip(paths, labels, strict=True):
        try:
            decoded.append(read_image_file(path))
            kept.append((path, label))
        except DataError as error:
            (problems if skipped is None else skipped).append(str(error))
    if not problems and not decoded:
        problems = [f"{path}: none of {len(paths)} images can be decoded" for path in paths[:1]]
    if not problems and decoded:
        shape = decoded[0].shape[:2]
        problems = [
            f"{path}: {image.shape[1]} x {image.shape[0]} pixels, expected {shape[1]} x {shape[0]} as {kept[0][0].name}"
            for (path, _), image in zip(kept, decoded, strict=True)
            if image.shape[:2] != shape
        ]
    if problems:
        raise DataError(f"{len(problems)} images that cannot be used; correct or remove them:\n" + listed(problems))
    if len({image.ndim for image in decoded}) > 1:
        decoded = [np.repeat(image[..., None], 3, -1) if image.ndim == 2 else image for image in decoded]
    return Images(np.stack(decoded), np.array([label for _, label in kept], np.int64))


def read_class_folder(folder: Path) -> tuple[Images, list[str], dict[str, Any]]:
    """Read ``folder/<class>/<image>``; classes in alphabetical order.

    Raises:
        DataError: no class, a class without an image, images that cannot be used.
    """
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    paths: list[Path] = []
    labels: list[int] = []
    empty = []
    for number, name in enumerate(classes):
        files = sorted(path for path in (folder / name).iterdir() if path.suffix.lower() in IMAGE_SUFFIXES)
        paths += files
        labels += [number] * len(files)
        empty += [] if files else [f"{folder / name}: no image ({', '.join(IMAGE_SUFFIXES)})"]
    if empty or not classes:
        raise DataError(f"{folder}: expected a folder of images for each class:\n" + listed(empty or ["it has none"]))
    images = read_image_files(paths, labels)
    return images, classes, {"path": str(folder), "files": len(paths), "sha256": images.sha256()}


def to_gray(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return 0.299 R + 0.587 G + 0.114 B, rounded; gray images as they are.

    >>> import numpy as np
    >>> to_gray(np.array([[[[255, 255, 255], [100, 0, 0]]]], np.uint8)).tolist()
    [[[255, 30]]]
    """
    import numpy as np

    return pixels if pixels.ndim == 3 else np.rint(pixels @ np.array(_LUMA)).astype(np.uint8)


def shrink(pixels: NDArray[np.uint8], size: int, where: str) -> NDArray[np.uint8]:
    """Return images of ``size`` x ``size``, each pixel the rounded mean of a block.

    Raises:
        DataError: the size does not divide height and width.
    """
    import numpy as np

    number, height, width = pixels.shape[:3]
    if height % size or width % size:
        raise DataError(f"{where}: images of {width} x {height} pixels; size = {size} does not divide them")
    blocks = pixels.reshape(number, size, height // size, size, width // size, *pixels.shape[3:])
    return np.rint(blocks.mean((2, 4))).astype(np.uint8)
