"""English prose that ships with every CPython: the language reference of ``help()`` and docstrings of the library.

Docstrings are parsed out of the source files, so no module is executed. The text depends on the Python version alone;
its sha256 is in the task's description.
"""

from __future__ import annotations

import ast
import hashlib
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from wellposed.errors import DataError

GENERATOR_VERSION = 1

_MODULES = """
argparse ast asyncio/base_events asyncio/events asyncio/streams asyncio/tasks base64 bdb bisect calendar cmd codecs
collections/__init__ concurrent/futures/_base configparser contextlib copy csv datetime decimal difflib dis doctest
email/message email/header enum fractions functools ftplib gettext glob gzip heapq html/parser http/client http/server
http/cookiejar imaplib importlib/abc inspect io ipaddress json/__init__ json/decoder json/encoder locale
logging/__init__ logging/config logging/handlers mailbox mimetypes multiprocessing/managers numbers optparse os pathlib
pdb pickle pickletools pkgutil platform plistlib pprint profile pstats pydoc random re/__init__ sched secrets selectors
shelve shlex shutil smtplib socket socketserver ssl statistics string subprocess sysconfig tarfile tempfile textwrap
threading timeit trace traceback tracemalloc turtle types typing unittest/case unittest/loader unittest/mock
unittest/runner urllib/parse urllib/request urllib/robotparser uuid wave weakref webbrowser wsgiref/handlers
xml/dom/minidom xml/etree/ElementTree xmlrpc/client zipfile zoneinfo/_zoneinfo
"""


@dataclass(frozen=True)
class Prose:
    """The text and what identifies it."""

    text: str
    sha256: str
    documents: int
    missing_modules: tuple[str, ...]
    python: str


def gather_prose() -> Prose:
    """Gather the prose: the same text, byte for byte, for the same Python version.

    Documents (a topic, or the docstrings of one module) are ordered by the hash of their names, so that a contiguous
    cut into train, valid and test gives each a mixture.

    Raises:
        DataError: this Python ships neither its documentation topics nor the source of its library.
    """
    documents = dict(_topics())
    missing = []
    library = Path(sysconfig.get_paths()["stdlib"])
    for module in _MODULES.split():
        source = library / f"{module}.py"
        if not source.is_file():
            missing.append(module)
            continue
        text = "\n\n".join(_docstrings(source))
        if text:
            documents[f"module {module}"] = text
    if not documents:
        raise DataError(
            f"builtin prose: {library} holds no library source and pydoc_data is absent; give data=FILE instead"
        )
    names = sorted(documents, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    text = "\n\n\n".join(documents[name].strip() for name in names) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    return Prose(text, digest, len(names), tuple(missing), platform.python_version())


def _topics() -> Iterator[tuple[str, str]]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return
    for name in sorted(topics):
        yield f"topic {name}", topics[name]


def _docstrings(source: Path) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source.read_bytes())) if isinstance(node, documented)]
    for node in sorted(nodes, key=lambda node: getattr(node, "lineno", 0)):
        text = ast.get_docstring(node)
        if text:
            yield text
