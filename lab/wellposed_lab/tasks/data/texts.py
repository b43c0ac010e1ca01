"""Running text from files, the hub, or prose of CPython (``help()`` topics and docstrings); and toy
data: docstring sentences labelled by topic.

Source files are parsed, so no module is executed. The prose depends only on the Python version.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import platform
import re
import sysconfig
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wellposed.errors import DataError
from wellposed_lab.tasks.data import files, splits
from wellposed_lab.tasks.data.labelled import LabelledTexts
from wellposed_lab.tasks.data.splits import DataOptions, Described, Loaded

COLUMN_SUFFIXES = (".jsonl", ".parquet")
SUFFIXES = (".txt", ".text", ".raw", ".tokens", ".md", *COLUMN_SUFFIXES)
PROBED_LINES = 50
MEAN_TOKENS = 4


@dataclass(frozen=True)
class TextOptions(DataOptions):
    """Running text."""

    data: str = "builtin"
    """builtin (English prose that ships with Python), a text file (.gz too), a jsonl or parquet
    file with a column text, a folder, or hf:name[:config]."""


def load_texts(options: DataOptions, text_format: str = "plain") -> Loaded[str]:
    """Return the text of each split and a description of its source. ``text_format`` is plain,
    spaced (see `unspace`), or auto, which looks at the first lines."""
    if options.data == "builtin":
        prose, identity = gather_prose()
        source = "builtin: documentation topics and library docstrings of CPython"
        described = {"source": source, **identity}
        return splits.cut_missing_text({"train": prose}, "builtin prose", described)
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
    return splits.cut_missing_text(texts, options.data, described)


def _lines(table: files.Table) -> str:
    if "text" not in table.names:
        table.refuse()
        raise DataError(f"{table.where}: no column 'text'; it has {', '.join(table.names)}")
    lines = table.strings("text")
    return "".join(line if line.endswith("\n") else line + "\n" for line in lines)


def looks_spaced(text: str) -> bool:
    """Return whether the first 50 lines are spaced characters, on average four or more.

    >>> [looks_spaced(text) for text in ("a b c d\\n\\n e f g h \\n", "n o _ w a s n ' t \\n")]
    [True, True]
    >>> [looks_spaced(text) for text in ("plain\\n", "a b c d\\nplain\\n", "a\\nb\\n", "1 2\\n", "")]
    [False, False, False, False, False]
    """
    lines = text.split("\n", PROBED_LINES)[:PROBED_LINES]
    tokens = [line.split() for line in lines if line.strip()]
    count = sum(map(len, tokens))
    single = all(len(token) == 1 for line in tokens for token in line)
    return single and count >= MEAN_TOKENS * len(tokens) > 0


def unspace(text: str, where: str) -> str:
    r"""Undo single spaces between characters and ``_`` for a space; line ends stay.

    >>> unspace("n o _ i t\n a _ b \n ", "file")
    'no it\na b\n'
    """
    lines = [line.strip(" ") for line in text.split("\n")]
    problems = [
        f"{where}:{number}: expected single characters separated by single spaces: {line[:40]!r}"
        for number, line in enumerate(lines, 1)
        if line[1::2].strip(" ") or " " in line[::2]
    ]
    files.refuse("the text is not in the spaced format; give format='plain'", problems)
    return "\n".join(line[::2].replace("_", " ") for line in lines)


GENERATOR_VERSION = 1
_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")

# Library modules of which a fifth or more is docstrings.
_MODULES = """
asyncio/events asyncio/tasks base64 bdb bisect cmd codecs concurrent/futures/_base configparser contextlib copy difflib
doctest email/header email/message fractions ftplib http/server imaplib importlib/abc inspect io ipaddress json/__init__
json/decoder json/encoder logging/__init__ logging/handlers mimetypes numbers os pkgutil random re/__init__ sched
secrets shelve shutil smtplib socket socketserver statistics tempfile textwrap threading timeit traceback turtle typing
unittest/case urllib/parse uuid wave wsgiref/handlers xml/etree/ElementTree
"""


@functools.cache
def gather_prose() -> tuple[str, dict[str, Any]]:
    """Return the prose, the same bytes for each Python version, and its identity. Documents (a
    topic, or a module's docstrings) are ordered by hash, so that contiguous cuts are mixtures."""
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = {module: library / f"{module}.py" for module in _MODULES.split()}
    missing = [module for module, source in sources.items() if not source.is_file()]
    documents: dict[str, str] = {}
    with suppress(ImportError):
        from pydoc_data.topics import topics

        documents = {f"topic {name}": topics[name] for name in sorted(topics)}
    for module, source in sources.items():
        text = "" if module in missing else "\n\n".join(_docstrings(source))
        documents |= {f"module {module}": text} if text else {}
    if not documents:
        raise DataError(f"builtin prose: {library} holds no library source; give data=FILE")
    names = sorted(documents, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    text = "\n\n\n".join(documents[name].strip() for name in names) + "\n"
    return text, {
        "python": platform.python_version(),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "documents": len(names),
        "missing_modules": missing,
        "generator_version": GENERATOR_VERSION,
    }


def library_docstrings(name: str) -> Iterator[tuple[str, str]]:
    """Yield place and text of the docstrings of a standard library module or package."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for source in [library / f"{name}.py", *sorted((library / name).rglob("*.py"))]:
        if source.is_file() and not {"test", "tests"} & {*source.parts}:
            path = source.relative_to(library).as_posix()
            yield from ((path, text) for text in _docstrings(source))


def _docstrings(source: Path) -> Iterator[str]:
    """Yield docstrings in the order of the source; only statements are visited."""
    pending: list[ast.AST] = [ast.parse(source.read_bytes())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text
        children = [child for field in _BLOCKS for child in getattr(node, field, ())]
        pending += reversed(children)


# Labelled sentences: is a docstring about code or about networks?
TOPICS = {
    "code": "abc argparse ast bdb cProfile code copyreg dataclasses dis doctest enum importlib"
    " inspect modulefinder optparse pdb pickle pydoc runpy tokenize trace traceback types typing"
    " unittest",
    "network": "email ftplib html http imaplib ipaddress poplib smtplib socket socketserver ssl"
    " urllib webbrowser wsgiref xmlrpc",
}
WORDS = range(5, 41)


@functools.cache
def labelled_docstrings() -> tuple[LabelledTexts, dict[str, Any]]:
    """Return lower-case sentences of 5 to 40 words with their topics, and their identity, ordered
    by hash, so that a contiguous cut is random. A Python without its source is a `DataError`."""
    labelled: dict[str, tuple[str, str]] = {}
    for topic, modules in TOPICS.items():
        for module in modules.split():
            for path, text in library_docstrings(module):
                words = re.findall(r"[\w']+", text.strip().split("\n\n")[0].lower())
                if len(words) in WORDS:
                    labelled.setdefault(" ".join(words), (topic, path))

    if not labelled:
        raise DataError("builtin sentences: Python's library has no source here; give data=FILE")
    texts = sorted(labelled, key=lambda text: hashlib.sha256(text.encode()).digest())
    labels, places = zip(*(labelled[text] for text in texts), strict=True)
    table = LabelledTexts("builtin", texts, labels, places, "docstring and topic of its module")
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    return table, {"python": platform.python_version(), "sha256": digest, "rows": len(texts)}
