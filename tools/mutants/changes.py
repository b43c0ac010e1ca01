"""The changes made to a file, one at a time: comparisons, arithmetic, constants, conditions,
results, statements.

Left alone, as text or types and not behaviour: docstrings and all other strings, f-strings, what
`raise` and `warn` say, `__repr__`, annotations, decorators, `__all__`, blocks for type checkers.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OPERATORS: dict[type[ast.AST], tuple[type[Any], ...]] = {
    getattr(ast, before): tuple(getattr(ast, name) for name in after)
    for before, *after in map(
        str.split,
        (
            *("Lt LtE GtE", "LtE Lt Gt", "Gt GtE LtE", "GtE Gt Lt", "Eq NotEq", "NotEq Eq"),
            *("Is IsNot", "IsNot Is", "In NotIn", "NotIn In", "And Or", "Or And"),
            *("Add Sub", "Sub Add", "Mult Div", "Div Mult", "FloorDiv Div", "Mod Mult", "Pow Mult"),
        ),
    )
}
"""Operators that replace each operator."""
PAIRS = (("max", "min"), ("amax", "amin"), ("all", "any"), ("sum", "mean"), ("floor", "ceil"))
PAIRS += (("clamp_min", "clamp_max"),)
SWAPPED = {before: after for pair in PAIRS for before, after in (pair, pair[::-1])}
REMOVED = {*("abs", "sqrt", "rsqrt", "square", "clamp", "exp", "log", "nextafter")}
REMOVED |= {*("masked_fill", "detach", "clone")}
TRANSPOSED = {"T", "mT", "H", "mH"}
UNMUTATED_FIELDS = {"annotation", "returns", "decorator_list", "type_params"}


@dataclass(frozen=True, eq=False)
class Mutant:
    """One change: `other` in place of `node`, which is `parent[key]`. Tests that run one of `lines`,
    from the first to the last, can see it."""

    module: str
    file: Path
    tree: ast.Module
    parent: Any
    key: int | str
    node: Any
    other: ast.AST
    lines: tuple[int, int]

    def describe(self, source: Path) -> str:
        """Return the line and the text of the change."""
        line = f"{self.file.relative_to(source)}:{self.node.lineno}"
        return f"{line} `{short(self.node)}` -> `{short(self.other)}`"

    def apply(self) -> ast.Module:
        """Make the change in the tree, for good, and return the tree."""
        ast.copy_location(self.other, self.node)
        self.parent[self.key] = self.other
        return ast.fix_missing_locations(self.tree)


def short(node: ast.AST) -> str:
    """Return the code of a node in one line of at most 70 characters."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 70 else f"{text[:67]}..."


def changed_call(call: ast.Call) -> Iterator[ast.AST]:
    """Yield a call of another function in place of `max`, `all`, ...; the argument in place of
    `abs(argument)`."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in SWAPPED:
            other = copy.deepcopy(call)
            setattr(other.func, "id" if isinstance(call.func, ast.Name) else "attr", SWAPPED[name])
            yield other
        case ast.Attribute(value=ast.Name(id="torch" | "math"), attr=name) | ast.Name(id=name) if (
            name in REMOVED
        ):
            yield call.args[0]
        case ast.Attribute(value=value, attr=name) if name in REMOVED:
            yield value


def changed(node: ast.AST) -> Iterator[ast.AST]:  # noqa: C901, PLR0912 (one case a kind of node)
    """Yield what may stand in place of an expression or a statement."""
    match node:
        case ast.Compare(ops=operators):
            for position, operator in enumerate(operators):
                for other in OPERATORS[type(operator)]:
                    compared = copy.deepcopy(node)
                    compared.ops[position] = other()
                    yield compared
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in OPERATORS:
            yield ast.BinOp(left, OPERATORS[type(operator)][0](), right)
        case ast.BoolOp(op=operator, values=values):
            yield ast.BoolOp(OPERATORS[type(operator)][0](), values)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            yield ast.UnaryOp(ast.USub(), ast.Constant(value + 1))
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
            yield operand
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=int() | float() as value):
            yield ast.Constant(value + 1)
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.IfExp() | ast.If() if not isinstance(node.test, ast.Compare):
            turned = copy.copy(node)
            turned.test = ast.UnaryOp(ast.Not(), node.test)
            yield turned
        case ast.Attribute(value=value, attr=name) if name in TRANSPOSED:
            yield value
        case ast.Call():
            yield from changed_call(node)
        case ast.AugAssign(target=target, op=operator, value=value):
            yield ast.Pass()
            if type(operator) in OPERATORS:
                yield ast.AugAssign(target, OPERATORS[type(operator)][0](), value)
        case ast.Return(value=value) if value and getattr(value, "value", 0) is not None:
            yield ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.Continue() | ast.Break():
            yield ast.Pass()


def children(node: ast.AST) -> Iterator[tuple[Any, int | str, ast.AST]]:
    """Yield every child that may change, after its list or the fields of `node`, and its key."""
    match node:
        case ast.JoinedStr() | ast.Raise() | ast.Call(func=ast.Attribute(attr="warn")):
            return
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return
        case ast.FunctionDef(name="__repr__" | "__str__"):
            return
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant()):  # changed with its sign
            return
    for field, value in ast.iter_fields(node):
        if field not in UNMUTATED_FIELDS:
            is_list = isinstance(value, list)
            for key, item in enumerate(value) if is_list else [(field, value)]:
                if isinstance(item, ast.AST):
                    yield value if is_list else vars(node), key, item


def seen_from(
    statement: ast.stmt | None, function: ast.AST | None, inside: ast.AST
) -> tuple[int, int]:
    """Return the lines of which a test must run one, in a function, to see a change in a statement.

    A statement at the top of a module or class, and the defaults of a function, run at import: any
    line of the module, class or function will do.
    """
    if statement is None or function is None:
        is_class = isinstance(inside, ast.ClassDef)
        return (inside.lineno, inside.end_lineno or 0) if is_class else (1, 10**9)
    body = getattr(statement, "body", None)
    if isinstance(statement, ast.FunctionDef) or not body:
        first = body[0].lineno if body else statement.lineno
        return first, statement.end_lineno or 0
    return statement.lineno, max(statement.lineno, body[0].lineno - 1)


def mutants(file: Path, source: Path) -> list[Mutant]:
    """Return every change of a file below ``source``, in a fixed order."""
    module = ".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
    tree = ast.parse(file.read_text(encoding="utf-8"))

    def visit(
        node: ast.AST, statement: ast.stmt | None, function: ast.AST | None, inside: ast.AST
    ) -> Iterator[Mutant]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node
        elif isinstance(node, ast.ClassDef):
            function, inside = None, node
        for parent, key, child in children(node):
            within = child if isinstance(child, ast.stmt) else statement
            lines = seen_from(within, function, inside)
            for other in changed(child):
                yield Mutant(module, file, tree, parent, key, child, other, lines)
            yield from visit(child, within, function, inside)

    return list(visit(tree, None, None, tree))
