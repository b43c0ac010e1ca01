"""English that ships with every CPython: prose of the topics of ``help()`` and library docstrings,
and sentences of docstrings labelled by what their modules are about, to try things out with.

Docstrings are parsed out of the source files, so no module is executed. The text depends on the
Python version alone; its sha256 is in the task's description.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import platform
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wellposed.errors import DataError
from wellposed.tasks.data.labelled import LabelledTexts

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
    """Return the prose, byte for byte the same for the same Python version, and what identifies
    it.

    Documents (a topic, or the docstrings of one module) are ordered by the hash of their names, so
    that a contiguous cut into train, valid and test gives each a mixture.
    """
    library = Path(sysconfig.get_paths()["stdlib"])
    sources = {module: library / f"{module}.py" for module in _MODULES.split()}
    missing = [module for module, source in sources.items() if not source.is_file()]
    documents = dict(_topics())
    for module, source in sources.items():
        text = "" if module in missing else "\n\n".join(_docstrings(source))
        documents |= {f"module {module}": text} if text else {}
    if not documents:
        raise DataError(
            f"builtin prose: {library} holds no library source and pydoc_data is absent; give"
            " data=FILE instead"
        )
    names = sorted(documents, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    text = "\n\n\n".join(documents[name].strip() for name in names) + "\n"
    return text, {
        "python": platform.python_version(),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "documents": len(names),
        "missing_modules": missing,
        "generator_version": GENERATOR_VERSION,
    }


def _topics() -> Iterator[tuple[str, str]]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return
    for name in sorted(topics):
        yield f"topic {name}", topics[name]


def library_docstrings(name: str) -> Iterator[tuple[str, str]]:
    """Yield place and text of the docstrings of a module or package of the standard library."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for source in [library / f"{name}.py", *sorted((library / name).rglob("*.py"))]:
        if source.is_file() and not {"test", "tests"} & {*source.parts}:
            place = source.relative_to(library).as_posix()
            yield from ((place, text) for text in _docstrings(source))


def _docstrings(source: Path) -> Iterator[str]:
    """Yield docstrings in the order of the source; statements alone are visited, as expressions
    hold none."""
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
    """Return lower-case sentences of 5 to 40 words with their topics, and what identifies them.

    The order is that of the hashes of the sentences, so that a contiguous cut is a random one.

    Raises:
        DataError: this Python comes without the source of its library.
    """
    found: dict[str, tuple[str, str]] = {}
    for topic, modules in TOPICS.items():
        for module in modules.split():
            for place, text in library_docstrings(module):
                words = re.findall(r"[\w']+", text.strip().split("\n\n")[0].lower())
                if len(words) in WORDS:
                    found.setdefault(" ".join(words), (topic, place))
    if not found:
        raise DataError("builtin sentences: Python's library has no source here; give data=FILE")
    texts = sorted(found, key=lambda text: hashlib.sha256(text.encode()).digest())
    labels, places = zip(*(found[text] for text in texts), strict=True)
    table = LabelledTexts("builtin", texts, labels, places, "docstring and topic of its module")
    digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
    return table, {"python": platform.python_version(), "sha256": digest, "rows": len(texts)}
