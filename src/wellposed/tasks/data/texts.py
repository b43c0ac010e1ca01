"""Running text of every split, for language models: files, the prose that ships with Python, or the
hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wellposed.errors import DataError
from wellposed.tasks.data import column_files
from wellposed.tasks.data.files import read_text
from wellposed.tasks.data.prose import gather_prose
from wellposed.tasks.data.splits import cut_missing_text, load_splits, refuse_split_files
from wellposed.tasks.task import Split
from wellposed.tasks.text.spaced import looks_spaced, unspace

SUFFIXES = (".txt", ".text", ".raw", ".tokens", ".md", *column_files.SUFFIXES)


def load_texts(
    data: str, *, valid: str | None, test: str | None, text_format: str = "plain"
) -> tuple[dict[Split, str], dict[str, Any]]:
    """Return the text of each split and the description of where it came from."""
    if data == "builtin":
        refuse_split_files("builtin prose brings its own splits", valid=valid, test=test)
        prose = gather_prose()
        source = "builtin: documentation topics and library docstrings of CPython"
        described = {"source": source, **prose.description()}
        texts, cut = cut_missing_text({"train": prose.text}, "builtin prose")
        return texts, described | cut
    spaced: list[Path] = []

    def read_file(path: Path) -> tuple[str, dict[str, Any]]:
        if column_files.has_columns(path):
            rows, described = column_files.read_columns(path)
            return _join_rows(rows, str(path)), described | {"columns": "text"}
        file = read_text(path)
        if text_format == "plain" or (text_format == "auto" and not looks_spaced(file.text)):
            return file.text, file.description()
        spaced.append(path)
        return unspace(file.text, str(path)), file.description()

    texts, described = load_splits(
        data, valid=valid, test=test, suffixes=SUFFIXES, read_file=read_file, read_hub=_join_rows
    )
    if spaced:
        named = [
            split for split, file in described["files"].items() if Path(file["path"]) in spaced
        ]
        described["spaced_format"] = (
            f"space between characters removed, _ read as a space, in: {', '.join(named)}"
        )
    texts, cut = cut_missing_text(texts, data)
    return texts, described | cut


def _join_rows(rows: Any, where: str) -> str:
    if "text" not in rows.column_names:
        raise DataError(f"{where}: no column 'text'; it has {', '.join(rows.column_names)}")
    lines = column_files.strings(where, "text", rows["text"])
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)
