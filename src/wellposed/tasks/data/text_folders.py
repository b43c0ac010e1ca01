"""Texts in folders by class, one file each: the public release of IMDb (``train/pos/0_9.txt`` and so on)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellposed.errors import DataError, listed
from wellposed.tasks.data.files import SPLIT_WORDS
from wellposed.tasks.data.tables import LabelledTexts
from wellposed.tasks.task import Split

UNLABELLED = ("unsup",)


@dataclass(frozen=True)
class FolderTexts(LabelledTexts):
    """Texts of which each is a file; ``files`` are their names below ``path``."""

    files: Sequence[str] = ()

    def where(self, index: int) -> str:
        """Return the file of a text."""
        return f"{self.path}/{self.files[index]}"

    def select(self, indices: Sequence[int]) -> FolderTexts:
        """Return the texts at ``indices``."""
        chosen = super().select(indices)
        return FolderTexts(
            chosen.path, chosen.texts, chosen.labels, chosen.lines, chosen.columns, [self.files[i] for i in indices]
        )


def has_class_folders(data: str) -> bool:
    """Return whether ``data/train`` holds folders.

    Raises:
        DataError: ``data`` is itself a folder of classes, or one class; the message says which folder to give.
    """
    root = Path(data)
    train = root / "train"
    if train.is_dir():
        return any(entry.is_dir() for entry in train.iterdir())
    for split in (root, root.parent):
        if split.name == "train" and root.is_dir() and any(split.glob("*/*.txt")) and not any(root.glob("*train*")):
            raise DataError(
                f"{root}: is part of a folder of texts by class, expected the folder that holds train; "
                f"give {split.parent}"
            )
    return False


def read_text_folders(data: str) -> tuple[dict[Split, LabelledTexts], dict[str, Any]]:
    """Read ``<split>/<class>/<name>.txt``; classes named unsup, which have no label, are left out and described.

    Raises:
        DataError: a class without a text, files that are not UTF-8 or hold nothing, all named.
    """
    root = Path(data)
    tables: dict[Split, LabelledTexts] = {}
    described: dict[str, Any] = {}
    left_out: list[str] = []
    for split, words in SPLIT_WORDS.items():
        folder = next((root / word for word in words if (root / word).is_dir()), None)
        if folder is not None:
            tables[split], described[split] = _read_split(folder)
            left_out += [f"{folder.name}/{name}" for name in UNLABELLED if (folder / name).is_dir()]
    return tables, {"files": described, "left_out_without_label": left_out}


def _read_split(folder: Path) -> tuple[FolderTexts, dict[str, Any]]:
    texts: list[str] = []
    labels: list[str] = []
    files: list[str] = []
    problems: list[str] = []
    digest = hashlib.sha256()
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name not in UNLABELLED)
    for name in classes:
        paths = sorted((folder / name).glob("*.txt"))
        problems += [] if paths else [f"{folder / name}: no .txt file"]
        for path in paths:
            stored = path.read_bytes()
            digest.update(stored)
            try:
                texts.append(stored.decode("utf-8"))
            except UnicodeDecodeError as error:
                problems.append(f"{path}: not UTF-8: byte 0x{stored[error.start]:02x} at offset {error.start}")
                continue
            labels.append(name)
            files.append(f"{name}/{path.name}")
    if problems or not classes:
        raise DataError(
            f"{folder}: expected a folder of .txt files for each class:\n" + listed(problems or ["no class"])
        )
    columns = "one folder a class, one file a text"
    table = FolderTexts(str(folder), texts, labels, [1] * len(texts), columns, files)
    return table, {"path": str(folder), "files": len(files), "sha256": digest.hexdigest(), "columns": columns}
