"""The help of options: the docstrings below the fields of dataclasses, read from their source."""

from __future__ import annotations

import ast
import inspect
import sys
from functools import lru_cache
from itertools import pairwise
from typing import Any

from docstring_parser.attrdoc import ast_get_attribute, ast_get_constant_value, ast_is_literal_str


def help_of(cls: type[Any]) -> dict[str, str]:
    """Return the docstring below each field of a class and its bases, as one line.

    A field of a base that a class declares again without one keeps its text.
    """
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__[:-1]):
        texts |= _texts_in(base.__module__).get(base.__qualname__, {})
    return texts


@lru_cache(128)
def _texts_in(module: str) -> dict[str, dict[str, str]]:
    """Return the texts of all classes of a module, whose source is parsed once."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError, KeyError):  # without source, as in a console
        return {}
    return dict(_classes(tree.body, ""))


def _classes(body: list[ast.stmt], prefix: str) -> list[tuple[str, dict[str, str]]]:
    rows: list[tuple[str, dict[str, str]]] = []
    for statement in body:
        if isinstance(statement, ast.ClassDef):
            name = prefix + statement.name
            rows += [(name, _texts(statement.body)), *_classes(statement.body, f"{name}.")]
        elif isinstance(statement, ast.FunctionDef):
            rows += _classes(statement.body, f"{prefix}{statement.name}.<locals>.")
    return rows


def _texts(body: list[ast.stmt]) -> dict[str, str]:
    texts: dict[str, str] = {}
    for field, below in pairwise(body):
        attribute = ast_get_attribute(field)
        if attribute and isinstance(below, ast.Expr) and ast_is_literal_str(below):
            texts[attribute[0]] = " ".join(ast_get_constant_value(below.value).split())
    return texts
