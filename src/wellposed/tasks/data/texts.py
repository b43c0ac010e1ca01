"""Running text for language models: files, the prose that ships with Python, or the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from wellposed.errors import DataError, listed
from wellposed.tasks.data.files import Table, hub_table, is_named, read_table, read_text
from wellposed.tasks.data.prose import gather_prose
from wellposed.tasks.data.splits import Split, cut_missing_text, load_splits, refuse_split_files

COLUMN_SUFFIXES = (".jsonl", ".json", ".parquet")
SUFFIXES = (".txt", ".text", ".raw", ".tokens", ".md", *COLUMN_SUFFIXES)
PROBED_LINES, MEAN_TOKENS = 50, 4


def load_texts(
    data: str, *, valid: str | None, test: str | None, text_format: str = "plain"
) -> tuple[dict[Split, str], dict[str, Any]]:
    """Return the text of each split and the description of where it came from.

    ``text_format`` is plain, spaced (see `unspace`), or auto, which looks at the first lines.
    """
    if data == "builtin":
        refuse_split_files("builtin prose brings its own splits", valid=valid, test=test)
        prose, identity = gather_prose()
        source = "builtin: documentation topics and library docstrings of CPython"
        described = {"source": source, **identity}
        texts, cut = cut_missing_text({"train": prose}, "builtin prose")
        return texts, described | cut
    spaced: list[str] = []

    def read_file(path: Path) -> tuple[str, dict[str, Any]]:
        if is_named(path, *COLUMN_SUFFIXES):
            table, described = read_table(path)
            return _lines(table), described | {"columns": "text"}
        file = read_text(path)
        if text_format == "plain" or (text_format == "auto" and not looks_spaced(file.text)):
            return file.text, file.description()
        spaced.append(str(path))
        return unspace(file.text, str(path)), file.description()

    texts, described = load_splits(
        data,
        valid=valid,
        test=test,
        suffixes=SUFFIXES,
        read_file=read_file,
        read_hub=lambda rows, where: _lines(hub_table(rows, where)),
    )
    if spaced:
        named = [split for split, file in described["files"].items() if file["path"] in spaced]
        described["spaced_format"] = (
            f"space between characters removed, _ read as a space, in: {', '.join(named)}"
        )
    texts, cut = cut_missing_text(texts, data)
    return texts, described | cut


def _lines(table: Table) -> str:
    if "text" not in table.names:
        table.refuse()
        raise DataError(f"{table.where}: no column 'text'; it has {', '.join(table.names)}")
    lines = table.strings("text")
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)


def looks_spaced(text: str) -> bool:
    """Return whether the first 50 lines are single characters separated by spaces, at least four to
    a line."""
    lines = text.split("\n", PROBED_LINES)[:PROBED_LINES]
    tokens = [line.split() for line in lines if line.strip()]
    count = sum(map(len, tokens))
    single = all(len(token) == 1 for line in tokens for token in line)
    return single and count >= MEAN_TOKENS * len(tokens) > 0


def unspace(text: str, where: str) -> str:
    r"""Map characters separated by single spaces, ``_`` for a space, back to plain text; line ends
    stay.

    >>> unspace("n o _ i t\n a _ b \n ", "file")
    'no it\na b\n'
    """
    lines = [line.strip(" ") for line in text.split("\n")]
    problems = [
        f"{where}:{number}: expected single characters separated by single spaces: {line[:40]!r}"
        for number, line in enumerate(lines, 1)
        if line[1::2].strip(" ") or " " in line[::2]
    ]
    if problems:
        raise DataError(
            "the text is not in the spaced format; give format='plain' to read it as it is:\n"
            + listed(problems)
        )
    return "\n".join(line[::2].replace("_", " ") for line in lines)
