"""Labelled sentences that ship with every CPython: is a docstring about code or about networks?

They are the first paragraphs of docstrings in the standard library, labelled by the module that
they stand in: a task for trying things out, not a benchmark. The sentences depend on the Python
version alone.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import re
from typing import Any

from wellposed.errors import DataError
from wellposed.tasks.data.labelled import LabelledTexts
from wellposed.tasks.data.prose import library_docstrings

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
