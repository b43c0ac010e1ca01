"""Where data comes from: files and folders on disk, gzip read directly, strict UTF-8, and ``hf:name[:config]``.

Valid and test files are found beside the train file by name; what is not found is cut from train, and said so in the
task's description.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellposed.errors import DataError, listed, missing_extra, nearest_names
from wellposed.tasks.task import SPLITS, Split

SPLIT_WORDS: dict[Split, tuple[str, ...]] = {
    "train": ("train",),
    "valid": ("valid", "validation", "val", "dev"),
    "test": ("test",),
}
BOM = "\ufeff"
_GZIP_MAGIC = b"\x1f\x8b"
# Line ends, tabs, form feeds, ESC and everything from the space on: what UTF-8 and LATIN1 texts are made of.
_TEXT_BYTES = bytes([*range(8, 14), 27, *range(32, 256)])


@dataclass(frozen=True)
class TextFile:
    """A decoded file and what identifies it."""

    path: Path
    text: str
    sha256: str
    """Of the bytes as stored, before gunzip."""
    stored_bytes: int
    byte_order_mark: bool
    """Whether a UTF-8 byte order mark was taken off the start."""

    def description(self) -> dict[str, Any]:
        """Return path, sha256 and size; the byte order mark only where there was one."""
        described: dict[str, Any] = {"path": str(self.path), "sha256": self.sha256, "bytes": self.stored_bytes}
        if self.byte_order_mark:
            described["byte_order_mark_removed"] = True
        return described


def read_text(path: Path) -> TextFile:
    """Read a UTF-8 text file, plain or gzip; line ends stay as they are.

    Raises:
        DataError: missing (near names are listed), empty, a folder, damaged gzip, or not UTF-8 (with file:line).
    """
    stored = _read_bytes(path)
    content = _gunzip(path, stored)
    if not content:
        raise DataError(f"{path}: the file is empty; give a file that holds text")
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(path, content, error) from None
    marked = text.startswith(BOM)
    if marked:
        text = text[1:]
    if not text.strip():
        raise DataError(f"{path}: the file holds white space only; give a file that holds text")
    return TextFile(path, text, hashlib.sha256(stored).hexdigest(), len(stored), marked)


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise missing_file(path) from None
    except IsADirectoryError:
        raise DataError(f"{path}: is a folder, expected a file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


def _gunzip(path: Path, stored: bytes) -> bytes:
    if not stored.startswith(_GZIP_MAGIC):
        if path.suffix == ".gz" and stored:
            raise DataError(f"{path}: is named .gz but is not gzip; take .gz off its name if it is plain text")
        return stored
    try:
        return gzip.decompress(stored)
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path}: the gzip data is damaged or cut short ({error}); copy the file again") from None


def _not_utf8(path: Path, content: bytes, error: UnicodeDecodeError) -> DataError:
    line = content.count(b"\n", 0, error.start) + 1
    column = error.start - content.rfind(b"\n", 0, error.start)
    hint = "convert it with, for example: iconv -f LATIN1 -t UTF-8"
    if content[:2] in (b"\xff\xfe", b"\xfe\xff"):
        hint = "the file looks like UTF-16; convert it with: iconv -f UTF-16 -t UTF-8"
    elif content.translate(None, _TEXT_BYTES):
        hint = "the file holds control bytes, which no text has; give a text file"
    return DataError(
        f"{path}:{line}: not UTF-8: byte 0x{content[error.start]:02x} at byte {column} of the line, "
        f"byte offset {error.start} of the file ({error.reason}); {hint}"
    )


def missing_file(path: Path) -> DataError:
    """Build the error for a path that does not exist, with the nearest names in the deepest folder that does."""
    folder = path.parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    wanted = path.relative_to(folder).parts[0] if path != folder else path.name
    near = nearest_names(wanted, sorted(entry.name for entry in folder.iterdir())) if folder.is_dir() else []
    hint = f"nearest in {folder}: {', '.join(near)}" if near else f"{folder} holds nothing"
    return DataError(f"{path}: no such file or folder; {hint}")


@dataclass(frozen=True)
class SplitFiles:
    """The files of the splits; a split without a file is to be cut from train."""

    paths: Mapping[Split, Path]
    how: str
    """How they were found, for the description."""


def find_split_files(
    data: str, *, valid: str | None = None, test: str | None = None, suffixes: Sequence[str]
) -> SplitFiles:
    """Resolve a train file, or a folder, to the files of the splits.

    A file named like ``ptb.char.train.txt.gz`` has its valid and test files beside it: the same name with ``train``
    replaced by valid, validation, val or dev, and by test, with or without ``.gz``. In a folder the one file with
    ``train`` in its name is taken, and names with one more part, as in ``test_a.tsv.gz``, are accepted too.

    Args:
        data: path of a file or a folder.
        valid, test: explicit paths, which win over what is found.
        suffixes: endings a file in a folder must have, before an optional ``.gz``.

    Raises:
        DataError: nothing at the path, no or several train files in the folder.
    """
    root = Path(data)
    explicit: dict[Split, Path] = {}
    if valid is not None:
        explicit["valid"] = Path(valid)
    if test is not None:
        explicit["test"] = Path(test)
    if root.is_dir():
        train = _train_file(root, suffixes)
    elif root.exists():
        train = root
    else:
        raise missing_file(root)
    for path in explicit.values():
        if not path.exists():
            raise missing_file(path)
    found = _siblings(train, loose=root.is_dir(), skip=explicit)
    how = "found by name" if found else "one file"
    if explicit:
        how += ", " + " and ".join(explicit) + " given"
    paths: dict[Split, Path] = {"train": train, **found, **explicit}
    return SplitFiles({split: paths[split] for split in SPLITS if split in paths}, how)


def _train_file(folder: Path, suffixes: Sequence[str]) -> Path:
    endings = tuple(suffix + gz for suffix in suffixes for gz in ("", ".gz"))
    names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    usable = [name for name in names if name.lower().endswith(endings)]
    trains = [name for name in usable if _split_position(name) is not None]
    if len(trains) == 1:
        return folder / trains[0]
    if trains:
        raise DataError(
            f"{folder}: {len(trains)} train files, expected one; give one of them instead of the folder:\n"
            + listed([str(folder / name) for name in trains])
        )
    looked_for = ", ".join(f"train{suffix}[.gz]" for suffix in suffixes)
    holds = ", ".join(names[:10]) or "nothing"
    raise DataError(
        f"{folder}: no train file; looked for names like {looked_for} (with a prefix such as 'name.train' or "
        f"'name_train'), and found: {holds}; give the file itself"
    )


def _split_position(name: str) -> tuple[int, int] | None:
    """Return where the last word ``train`` stands in a file name."""
    matches = list(re.finditer(r"(?<![A-Za-z])train(?![A-Za-z])", name, re.IGNORECASE))
    return matches[-1].span() if matches else None


def _siblings(train: Path, *, loose: bool, skip: Iterable[Split]) -> dict[Split, Path]:
    position = _split_position(train.name)
    if position is None:
        return {}
    before, after = train.name[: position[0]], train.name[position[1] :]
    names = sorted(entry.name for entry in train.parent.iterdir() if entry.is_file())
    found: dict[Split, Path] = {}
    for split in SPLITS[1:]:
        if split in skip:
            continue
        for word in SPLIT_WORDS[split]:
            matches = _matches(names, before + word, after, loose=loose)
            if len(matches) > 1:
                raise DataError(
                    f"{train.parent}: {len(matches)} files could be the {split} split of {train.name}: "
                    f"{', '.join(matches)}; name one with the option {split!r}"
                )
            if matches:
                found[split] = train.parent / matches[0]
                break
    return found


def _matches(names: Sequence[str], start: str, end: str, *, loose: bool) -> list[str]:
    plain = end.removesuffix(".gz")
    by_lower = {name.lower(): name for name in names}
    wanted = [start + end, start + plain, start + plain + ".gz"]
    exact = [by_lower[name.lower()] for name in wanted if name.lower() in by_lower]
    if exact or not loose:
        return exact[:1]
    pattern = re.compile(re.escape(start) + r"[._-].*" + re.escape(plain) + r"(\.gz)?", re.IGNORECASE)
    return [name for name in names if pattern.fullmatch(name)]


def load_hub_dataset(data: str) -> dict[Split, Any]:
    """Load ``hf:name[:config]`` with the `datasets` library: the splits it has, by our names.

    Raises:
        ConfigError: `datasets` is not installed.
        DataError: the data set cannot be loaded or has no train split.
    """
    try:
        import datasets
    except ImportError as error:
        raise missing_extra("datasets", "hf", "hf: data sets") from error
    name, _, config = data.removeprefix("hf:").partition(":")
    if not name:
        raise DataError(f"{data!r}: no data set is named; write hf:name or hf:name:config")
    try:
        loaded: Any = datasets.load_dataset(name, config or None)
    except Exception as error:
        raise DataError(f"{data}: cannot be loaded: {type(error).__name__}: {error}") from error
    splits: dict[Split, Any] = {}
    for split, words in SPLIT_WORDS.items():
        for word in words:
            if word in loaded:
                splits[split] = loaded[word]
                break
    if "train" not in splits:
        raise DataError(f"{data}: no split named train; it has {', '.join(map(str, loaded))}")
    return splits
