"""Digests that date a result: of its measurement, and of the rules that judged it; no torch.

A module of recipes holds both. Functions named ``judge...``, and the functions and constants that
only they read, judge. All else measures. Of both, a recipe has the part that its function reaches.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

JUDGE = "judge"
"""Prefix of the functions that return a verdict."""
GATE = "unsettled"
"""Rule of verdicts.py that judges every training, whichever recipe asks."""


def numbers_of(source: str) -> list[float]:
    """Return the numbers in a program, in order: not those of its comments and texts."""
    return _numbers(ast.parse(source).body)


def _numbers(statements: Iterable[ast.stmt]) -> list[float]:
    constants = [
        (node.lineno, node.col_offset, node.value)
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float)
    ]
    return [value for *_, value in sorted(constants)]


@dataclass(frozen=True)
class Module:
    """Statements of a module, those that judge apart from those that measure."""

    measures: Sequence[ast.stmt]
    judges: Sequence[ast.stmt]


@lru_cache
def split_module(source: str) -> Module:
    """Return the statements that measure, and those that only judge.

    >>> module = split_module("a = 1\\nb = 2\\ndef judge(x): return x < b\\ndef size(): return a")
    >>> [ast.unparse(line) for line in module.judges]
    ['b = 2', 'def judge(x):\\n    return x < b']
    """
    statements = ast.parse(source).body
    readers = [statement for statement in statements if not _is_text(statement)]
    judges = [statement for statement in statements if _is_judge(statement)]
    grown = True
    while grown:
        inside = _names_read(judges)
        outside = _names_read(one for one in readers if one not in judges)
        added = [
            one
            for one in readers
            if one not in judges and _is_definition(one)
            for names in [_names_defined(one)]
            if names and names <= inside and not names & (outside - _names_read([one]))
        ]
        judges += added
        grown = bool(added)
    measures = [statement for statement in statements if statement not in judges]

    return Module(measures, [statement for statement in statements if statement in judges])


def _is_judge(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.FunctionDef) and statement.name.startswith(JUDGE)


def _is_definition(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.FunctionDef):
        return not statement.decorator_list
    return isinstance(statement, ast.Assign | ast.AnnAssign)


def _is_text(statement: ast.stmt) -> bool:
    """Return whether a statement assigns words; they quote numbers and decide nothing."""
    value = getattr(statement, "value", None)
    return isinstance(value, ast.JoinedStr) or (
        isinstance(value, ast.Constant) and isinstance(value.value, str)
    )


def _names_read(statements: Iterable[ast.stmt]) -> set[str]:
    return {
        node.id
        for statement in statements
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }


def _names_imported(statements: Iterable[ast.stmt]) -> set[str]:
    return {
        alias.asname or alias.name
        for statement in statements
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }


def _names_defined(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    return {
        node.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def measurement_digest(source: str, recipe: str, spent: Sequence[Any]) -> str:
    """Return the digest of what was measured: the numbers that a recipe's function reaches in its
    module, without those that only judge, and its sizes ``spent``."""
    return _digest([_measured_numbers(source, recipe), spent])


@lru_cache
def _measured_numbers(source: str, recipe: str) -> tuple[float, ...]:
    """Return the numbers of a module that a recipe's measurement reaches; the page asks for them often."""
    measures = {ast.unparse(statement) for statement in split_module(source).measures}
    reached = _reached(ast.parse(source).body, {recipe})
    mine = [statement for statement in reached if ast.unparse(statement) in measures]
    return tuple(_numbers(mine))


@lru_cache
def judge_digest(source: str, rules: str, recipe: str, *, trained: bool) -> str:
    """Return the digest of the program that judges a recipe, without its words.

    Args:
        source: the module of the recipe.
        rules: verdicts.py; the functions and constants that the recipe reaches count.
        recipe: name of the recipe's function.
        trained: whether the `GATE` of trainings judges too.
    """
    program = ast.parse(source).body
    reached = _reached(program, {recipe})
    judges = {ast.unparse(statement) for statement in split_module(source).judges}
    mine = [statement for statement in reached if ast.unparse(statement) in judges]
    wanted = (_names_read(reached) & _names_imported(program)) | ({GATE} if trained else set())
    shared = _reached(ast.parse(rules).body, wanted)
    return _digest([_program(statement) for statement in (*mine, *shared)])


def _reached(statements: Sequence[ast.stmt], wanted: set[str]) -> list[ast.stmt]:
    """Return the definitions that the wanted names reach, in order."""
    definitions: Mapping[str, ast.stmt] = {
        name: statement
        for statement in statements
        if not _is_text(statement)
        for name in _names_defined(statement)
    }
    names = wanted & definitions.keys()
    grown = True
    while grown:
        read = _names_read(definitions[name] for name in names)
        added = (read & definitions.keys()) - names
        names |= added
        grown = bool(added)
    reached = [definitions[name] for name in names]

    return [statement for statement in statements if statement in reached]


class _WithoutWords(ast.NodeTransformer):
    """Replaces every text by an empty one."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant("") if isinstance(node.value, str) else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.Constant:
        del node
        return ast.Constant("")


def _program(statement: ast.stmt) -> str:
    copied = ast.parse(ast.unparse(statement))
    return ast.unparse(_WithoutWords().visit(copied))


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()[:16]
