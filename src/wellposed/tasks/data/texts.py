"""Running text for language models: files, the prose that ships with Python, or the hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from wellposed.errors import DataError
from wellposed.tasks.data import files, splits
from wellposed.tasks.data.prose import gather_prose
from wellposed.tasks.data.splits import DataOptions, Described, Split

COLUMN_SUFFIXES = (".jsonl", ".json", ".parquet")
SUFFIXES = (".txt", ".text", ".raw", ".tokens", ".md", *COLUMN_SUFFIXES)
PROBED_LINES, MEAN_TOKENS = 50, 4


@dataclass(frozen=True)
class TextOptions(DataOptions):
    """Where running text is."""

    data: str = "builtin"
    """builtin (English prose that ships with Python), a text file (.gz too), a jsonl, json or
    parquet file with a column text, a folder, or hf:name[:config]."""


def load_texts(
    options: DataOptions, text_format: str = "plain"
) -> tuple[dict[Split, str], Described]:
    """Return the text of each split and the description of where it came from.

    ``text_format`` is plain, spaced (see `unspace`), or auto, which looks at the first lines.
    """
    if options.data == "builtin":
        prose, identity = gather_prose()
        source = "builtin: documentation topics and library docstrings of CPython"
        texts, cut = splits.cut_missing_text({"train": prose}, "builtin prose")
        return texts, {"source": source, **identity, **cut}
    spaced: list[str] = []

    def read_file(path: Path) -> tuple[str, Described]:
        if files.is_named(path, *COLUMN_SUFFIXES):
            table, described = files.read_table(path)
            return _lines(table), described | {"columns": "text"}
        file = files.read_text(path)
        if text_format == "plain" or (text_format == "auto" and not looks_spaced(file.text)):
            return file.text, file.described
        spaced.append(str(path))
        return unspace(file.text, str(path)), file.described

    texts, described = splits.load_splits(
        options,
        suffixes=SUFFIXES,
        read_file=read_file,
        read_hub=lambda rows, where: _lines(files.hub_table(rows, where)),
    )
    if spaced:
        named = [split for split, file in described["files"].items() if file["path"] in spaced]
        described["spaced_format"] = (
            f"space between characters removed, _ read as a space, in: {', '.join(named)}"
        )
    texts, cut = splits.cut_missing_text(texts, options.data)
    return texts, described | cut


def _lines(table: files.Table) -> str:
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
    files.refuse(
        "the text is not in the spaced format; give format='plain' to read it as it is", problems
    )
    return "\n".join(line[::2].replace("_", " ") for line in lines)
