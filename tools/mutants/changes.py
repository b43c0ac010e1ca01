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

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Div,
    ast.Mod: ast.Mult,
    ast.Pow: ast.Mult,
}
SWAPPED = {
    "max": "min",
    "amax": "amin",
    "all": "any",
    "sum": "mean",
    "floor": "ceil",
    "clamp_min": "clamp_max",
}
SWAPPED |= {after: before for before, after in SWAPPED.items()}
REMOVED = {
    "abs",
    "sqrt",
    "rsqrt",
    "square",
    "clamp",
    "exp",
    "log",
    "nextafter",
    "masked_fill",
    "detach",
    "clone",
}
TRANSPOSED = {"T", "mT", "H", "mH"}
TEXT_CALLS = {"warn"}
TEXT_METHODS = {"__repr__", "__str__"}
UNMUTATED_FIELDS = {"annotation", "returns", "decorator_list", "type_params"}


@dataclass(frozen=True)
class Mutant:
    """One change: the `number`-th of its file. Tests that run a line from `first` to `last` can see
    it."""

    module: str
    file: Path
    number: int
    line: int
    first: int
    last: int
    before: str
    after: str

    def describe(self, source: Path) -> str:
        """Return where the change is and what it is."""
        return f"{self.file.relative_to(source)}:{self.line} `{self.before}` -> `{self.after}`"


def short(node: ast.AST) -> str:
    """Return the code of a node in one line of at most 70 characters."""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 70 else f"{text[:67]}..."


def is_number(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, int | float)
        and not isinstance(node.value, bool)
    )


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


def changed_expression(node: ast.expr) -> Iterator[ast.AST]:
    """Yield what may stand in place of an expression."""
    match node:
        case ast.Compare(ops=operators):
            for position, operator in enumerate(operators):
                for other in COMPARISONS[type(operator)]:
                    changed = copy.deepcopy(node)
                    changed.ops[position] = other()
                    yield changed
        case ast.BinOp(left=left, op=operator, right=right) if type(operator) in ARITHMETIC:
            yield ast.BinOp(left, ARITHMETIC[type(operator)](), right)
        case ast.BoolOp(op=operator, values=values):
            yield ast.BoolOp(ast.Or() if isinstance(operator, ast.And) else ast.And(), values)
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            yield ast.UnaryOp(ast.USub(), ast.Constant(value + 1))
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
            yield operand
        case ast.Constant(value=bool() as value):
            yield ast.Constant(not value)
        case ast.Constant(value=value) if is_number(node):
            yield ast.Constant(value + 1)  # pyright: ignore[reportOperatorIssue]
        case ast.IfExp(test=test, body=body, orelse=otherwise) if not isinstance(test, ast.Compare):
            yield ast.IfExp(ast.UnaryOp(ast.Not(), test), body, otherwise)
        case ast.Attribute(value=value, attr=name) if name in TRANSPOSED:
            yield value
        case ast.Call():
            yield from changed_call(node)


def changed_statement(node: ast.stmt) -> Iterator[ast.AST]:
    """Yield what may stand in place of a statement."""
    match node:
        case ast.AugAssign(target=target, op=operator, value=value):
            yield ast.Pass()
            if type(operator) in ARITHMETIC:
                yield ast.AugAssign(target, ARITHMETIC[type(operator)](), value)
        case ast.Return(value=ast.expr() as value) if not (
            isinstance(value, ast.Constant) and value.value is None
        ):
            yield ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.Continue() | ast.Break():
            yield ast.Pass()
        case ast.If(test=test, body=body, orelse=otherwise) if not isinstance(test, ast.Compare):
            yield ast.If(ast.UnaryOp(ast.Not(), test), body, otherwise)


def is_left_alone(node: ast.AST) -> bool:
    match node:
        case ast.JoinedStr():
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.FunctionDef(name=name):
            return name in TEXT_METHODS
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return True
    return False


def children(node: ast.AST) -> Iterator[tuple[str, int | None, ast.AST]]:
    """Yield the field, the position in it and the child, of those children that may change."""
    if isinstance(node, ast.Raise) or (isinstance(node, ast.UnaryOp) and is_number(node.operand)):
        return
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in TEXT_CALLS
    ):
        return
    for field, value in ast.iter_fields(node):
        if field not in UNMUTATED_FIELDS:
            items = enumerate(value) if isinstance(value, list) else [(None, value)]
            yield from (
                (field, position, item) for position, item in items if isinstance(item, ast.AST)
            )


def seen_from(
    statement: ast.stmt | None, function: ast.AST | None, inside: ast.AST
) -> tuple[int, int]:
    """Return the lines of which a test must run one, in a function, to see a change in a statement.

    A statement at the top of a module or class, and the defaults of a function, run at import: any
    line of the module, class or function will do.
    """
    if statement is None or function is None:
        return (
            (inside.lineno, inside.end_lineno) if isinstance(inside, ast.ClassDef) else (1, 10**9)
        )
    if isinstance(statement, ast.FunctionDef):
        return statement.body[0].lineno, statement.end_lineno or 0
    body = getattr(statement, "body", None)
    return statement.lineno, max(
        statement.lineno, body[0].lineno - 1
    ) if body else statement.end_lineno or 0


def sites(
    tree: ast.Module,
) -> Iterator[tuple[ast.AST, str, int | None, ast.AST, ast.AST, tuple[int, int]]]:
    """Yield every change of a file in a fixed order: parent, field, position, node, what replaces
    it, lines to run."""

    def visit(node: ast.AST, statement: ast.stmt | None, function: ast.AST | None, inside: ast.AST):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node
        elif isinstance(node, ast.ClassDef):
            function, inside = None, node
        for field, position, child in children(node):
            if is_left_alone(child):
                continue
            within = child if isinstance(child, ast.stmt) else statement
            lines = seen_from(within, function, inside)
            replacements = changed_statement if isinstance(child, ast.stmt) else changed_expression
            if isinstance(child, ast.stmt | ast.expr):
                yield from (
                    (node, field, position, child, other, lines) for other in replacements(child)
                )
            yield from visit(child, within, function, inside)

    yield from visit(tree, None, None, tree)


def mutants(file: Path, source: Path) -> list[Mutant]:
    """Return every change of a file below ``source``."""
    module = ".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
    return [
        Mutant(module, file, number, node.lineno, *lines, short(node), short(other))
        for number, (_, _, _, node, other, lines) in enumerate(
            sites(ast.parse(file.read_text(encoding="utf-8")))
        )
    ]


def mutated(mutant: Mutant) -> ast.Module:
    """Return the syntax tree of a mutant's file with its change made."""
    tree = ast.parse(mutant.file.read_text(encoding="utf-8"), filename=str(mutant.file))
    parent, field, position, node, other, _ = list(sites(tree))[mutant.number]
    ast.copy_location(other, node)
    if position is None:
        setattr(parent, field, other)
    else:
        getattr(parent, field)[position] = other
    return ast.fix_missing_locations(tree)
