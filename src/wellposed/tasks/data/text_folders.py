"""Texts in folders by class, one file each: the public release of IMDb (``train/pos/0_9.txt`` and
so on)."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from wellposed.errors import DataError, listed
from wellposed.tasks.data.splits import find_split_folders
from wellposed.tasks.data.tables import LabelledTexts
from wellposed.tasks.task import Split

UNLABELLED = ("unsup",)


def has_class_folders(data: str) -> bool:
    """Return whether ``data/train`` holds folders; a path inside such a folder is refused, saying
    which to give."""
    root = Path(data)
    train = root / "train"
    if train.is_dir():
        return any(entry.is_dir() for entry in train.iterdir())
    for split in (root, root.parent):
        if (
            split.name == "train"
            and root.is_dir()
            and any(split.glob("*/*.txt"))
            and not any(root.glob("*train*"))
        ):
            raise DataError(
                f"{root}: is part of a folder of texts by class, expected the folder that holds"
                f" train; give {split.parent}"
            )
    return False


def read_text_folders(data: str) -> tuple[dict[Split, LabelledTexts], dict[str, Any]]:
    """Read ``<split>/<class>/<name>.txt``; classes named unsup, which have no label, are left out
    and described."""
    folders = find_split_folders(Path(data))
    read: dict[Split, tuple[LabelledTexts, dict[str, Any]]] = {
        split: _read_split(folder) for split, folder in folders.items()
    }
    left_out = [
        f"{f.name}/{name}" for f in folders.values() for name in UNLABELLED if (f / name).is_dir()
    ]
    described = {
        "files": {split: files for split, (_, files) in read.items()},
        "left_out_without_label": left_out,
    }
    tables: dict[Split, LabelledTexts] = {split: table for split, (table, _) in read.items()}
    return tables, described


def _read_split(folder: Path) -> tuple[LabelledTexts, dict[str, Any]]:
    texts: list[str] = []
    labels: list[str] = []
    files: list[str] = []
    problems: list[str] = []
    digest = hashlib.sha256()
    classes = sorted(
        entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name not in UNLABELLED
    )
    for name in classes:
        paths = sorted((folder / name).glob("*.txt"))
        problems += [] if paths else [f"{folder / name}: no .txt file"]
        for path in paths:
            stored = path.read_bytes()
            digest.update(stored)
            try:
                texts.append(stored.decode("utf-8"))
            except UnicodeDecodeError as error:
                problems.append(
                    f"{path}: not UTF-8: byte 0x{stored[error.start]:02x} at offset {error.start}"
                )
                continue
            labels.append(name)
            files.append(f"{name}/{path.name}")
    if problems or not classes:
        raise DataError(
            f"{folder}: expected a folder of .txt files for each class:\n"
            + listed(problems or ["no class"])
        )
    columns = "one folder a class, one file a text"
    table = LabelledTexts(str(folder), texts, labels, files, columns)
    return table, {
        "path": str(folder),
        "files": len(files),
        "sha256": digest.hexdigest(),
        "columns": columns,
    }
