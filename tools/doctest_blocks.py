"""Griffe extension: doctests in docstrings are shown as code blocks."""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"(?:^[ \t]*>>> .*(?:\n[ \t]*\S.*)*\n?)+", re.MULTILINE)


def fence_doctests(text: str) -> str:
    """Put a code fence around every run of lines that starts with a doctest prompt."""
    return DOCTEST.sub(lambda match: f"```pycon\n{match.group(0).rstrip()}\n```\n", text)


class DoctestBlocks(griffe.Extension):
    """Rewrite the docstring of every object before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:  # noqa: ARG002
        """Fence the doctests of one object."""
        if obj.docstring is not None:
            obj.docstring.value = fence_doctests(obj.docstring.value)
