"""Public names of a package that are imported on first use, listed once for Python and for type
checkers."""

from __future__ import annotations

import ast
import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any


def import_on_first_use(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package: every ``x as x`` under its ``if
    TYPE_CHECKING`` is a name.

    Status: exact. Python gives the object that type checkers see, and imports its module when it is
    asked for. A name taken from the package itself (``from wellposed import nn as nn``) is that
    sub-package. ``__all__`` holds the other names, for ``import *``.

    Args:
        package: ``__name__`` of the package, whose `__init__` ends with
            ``else: __getattr__, __dir__ = import_on_first_use(__name__)``.

    Raises:
        AttributeError: from ``__getattr__``, for a name that is not listed.

    Cost: parsing one file at the first use of a name. When not to use: names without a heavy import
    behind them.

    >>> find, names = import_on_first_use("wellposed.integrations")
    >>> find("ConditionMetrics").__module__, names() == sorted(names())
    ('wellposed.integrations._condition', True)
    """

    @functools.cache
    def homes() -> dict[str, str]:
        """Return the module of every listed name."""
        loader: Any = sys.modules[package].__loader__
        tree = ast.parse(loader.get_source(package))
        blocks = [
            node
            for node in tree.body
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        ]
        lines = [
            line for block in blocks for line in block.body if isinstance(line, ast.ImportFrom)
        ]
        return {
            alias.name: str(line.module)
            for line in lines
            for alias in line.names
            if alias.asname == alias.name
        }

    def find(name: str) -> Any:
        if name == "__all__":
            return sorted(listed for listed, home in homes().items() if home != package)
        if name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes()[name] == package:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(homes()[name]), name)

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes()})

    return find, names
