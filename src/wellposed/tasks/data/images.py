"""Images as arrays of bytes: decoded from image files, turned gray, shrunk, and as token
sequences."""

from __future__ import annotations

import hashlib
import warnings
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

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
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

    def image(self, row: int) -> NDArray[np.uint8]:
        """Return the pixels of one image."""
        return self.pixels[row]

    def sha256(self) -> str:
        """Return the hash of pixels and labels."""
        return hashlib.sha256(self.pixels.tobytes() + self.labels.tobytes()).hexdigest()

    def tokens(self) -> Ragged:
        """Return each image as one sequence, row by row, a channel after the other at each
        pixel."""
        import numpy as np

        from wellposed.tasks.batches.ragged import Ragged
        from wellposed.tasks.text.tokenizers import NUM_SPECIAL

        flat = self.pixels.reshape(-1).astype(np.int16) + NUM_SPECIAL
        return Ragged(flat, np.full(len(self), self.pixels[0].size))


@dataclass(frozen=True)
class ImageFiles:
    """Image files of any sizes and their labels; each is decoded when it is asked for."""

    paths: tuple[Path, ...]
    labels: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def select(self, rows: Sequence[int]) -> ImageFiles:
        """Return the files ``rows``."""
        return ImageFiles(tuple(self.paths[row] for row in rows), self.labels[list(rows)])

    def image(self, row: int) -> NDArray[np.uint8]:
        """Return the pixels of one image."""
        return read_image_file(self.paths[row])

    def sha256(self) -> str:
        """Return the hash of the files as stored, and of their labels."""
        digest = hashlib.sha256(self.labels.tobytes())
        for path in self.paths:
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()


def pixel_encoder() -> WordEncoder:
    """Return the vocabulary of pixel values; as text, an image is its values between spaces."""
    from wellposed.tasks.text.tokenizers import WordEncoder

    return WordEncoder([str(value) for value in range(256)])


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
    import numpy as np

    if image.mode.startswith("I;16"):
        return np.rint(np.asarray(image) / 257).astype(np.uint8)
    if image.mode in ("I", "F"):
        raise ValueError(
            f"its pixels are {image.mode} (32 bits a value); save it with 8 or 16 bits a channel"
        )
    return np.asarray(image.convert("L" if image.mode in ("1", "L", "LA", "La") else "RGB"))


def read_image_files(
    paths: Sequence[Path], labels: Sequence[int], *, skipped: list[str] | None = None
) -> Images:
    """Decode images of one size, all in colour where some are; those that cannot be used are named
    at once.

    Where ``skipped`` is given, files that cannot be decoded are left out and described there.
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
            f"{path}: {image.shape[1]} x {image.shape[0]} pixels, expected {shape[1]} x {shape[0]}"
            f" as {kept[0][0].name}"
            for (path, _), image in zip(kept, decoded, strict=True)
            if image.shape[:2] != shape
        ]
    if problems:
        raise DataError(
            f"{len(problems)} images that cannot be used; correct or remove them:\n"
            + listed(problems)
        )
    if len({image.ndim for image in decoded}) > 1:
        decoded = [
            np.repeat(image[..., None], 3, -1) if image.ndim == 2 else image for image in decoded
        ]
    return Images(np.stack(decoded), np.array([label for _, label in kept], np.int64))


def find_class_files(folder: Path) -> tuple[ImageFiles, list[str], dict[str, Any]]:
    """Return the images below ``folder/<class>/``, the classes in alphabetical order, and a
    description.

    A class without an image is an error; files that are not named as images are counted.
    """
    import numpy as np

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
    return ImageFiles(tuple(paths), np.array(labels, np.int64)), classes, described


def read_class_folder(folder: Path) -> tuple[Images, list[str], dict[str, Any]]:
    """Decode the images of `find_class_files`, all of one size."""
    files, classes, described = find_class_files(folder)
    images = read_image_files(files.paths, files.labels.tolist())
    return images, classes, {**described, "sha256": images.sha256()}


def to_gray(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return 0.299 R + 0.587 G + 0.114 B, rounded; gray images as they are.

    >>> import numpy as np
    >>> to_gray(np.array([[[[255, 255, 255], [100, 0, 0]]]], np.uint8)).tolist()
    [[[255, 30]]]
    """
    import numpy as np

    return pixels if pixels.ndim == 3 else np.rint(pixels @ np.array(_LUMA)).astype(np.uint8)


def shrink(pixels: NDArray[np.uint8], size: int, where: str) -> NDArray[np.uint8]:
    """Return images of ``size`` x ``size``, each pixel the rounded mean of a block; it must divide
    the sides."""
    import numpy as np

    number, height, width = pixels.shape[:3]
    if height % size or width % size:
        raise DataError(
            f"{where}: images of {width} x {height} pixels; size = {size} does not divide them"
        )
    blocks = pixels.reshape(number, size, height // size, size, width // size, *pixels.shape[3:])
    return np.rint(blocks.mean((2, 4))).astype(np.uint8)
