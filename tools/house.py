"""Check three rules of this repository; `make check` runs it.

Size: each root stays within its budget of code lines, `[tool.house]` in pyproject.toml. A code line
has a token that is neither comment nor docstring. Several folders may share a budget.

Privacy: only a package and its sub-packages import its names that begin with an underscore. Tests
do not.

Circles: no file imports itself through others, imports for types included.

    python tools/house.py
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
import tomllib
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]


def code_lines(text: str) -> int:
    """Return how many lines hold code."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                docstrings.update(range(node.lineno, (node.end_lineno or 0) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {
        line
        for token in tokens
        if token.string.strip() and token.type != tokenize.COMMENT
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - docstrings)


def private_imports(file: Path, text: str) -> Iterator[str]:
    """Yield a line for every private name of ours that a file outside its package imports."""
    root, *folders = file.parent.parts
    home = ".".join(folders) if root in ("src", "lab", "studies") else ""
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in getattr(node, "names", []) if isinstance(alias, ast.alias)]
        if isinstance(node, ast.ImportFrom):
            above = home.split(".")[: len(home.split(".")) + 1 - node.level] if node.level else []
            names = [".".join(filter(None, [*above, node.module, name])) for name in names]
        for name in names:
            owner, private, _ = name.partition("._")
            dunder = name.rpartition(".")[2].endswith("__")
            ours = name.startswith("wellposed")
            if ours and private and not dunder and not f"{home}.".startswith(f"{owner}."):
                yield f"{file}:{getattr(node, 'lineno', 0)}: {name} is private to {owner}"


def circle(imports: Mapping[str, set[str]]) -> list[str]:
    """Return one circle of files that import each other, from a file back to itself, or nothing."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def imports_of(package: str) -> dict[str, set[str]]:
    """Return every module of a package with the modules of it that it imports."""
    graph = grimp.build_graph(package, exclude_type_checking_imports=False, cache_dir=None)
    return {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}


def main() -> int:
    """Print every root with its budget and all violations; return 1 if there are any."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    failed = False
    for root, budget in settings["tool"]["house"]["budget"].items():
        lines, offences = 0, []
        for file in sorted(file for part in root.split() for file in (ROOT / part).rglob("*.py")):
            text = file.read_text(encoding="utf-8")
            lines += code_lines(text)
            offences += private_imports(file.relative_to(ROOT), text)
        over = f": {lines - budget} too many; take something out first" if lines > budget else ""
        sys.stdout.write(f"{root}: {lines} of {budget} code lines{over}\n")
        sys.stdout.writelines(f"{offence}\n" for offence in offences)
        failed |= lines > budget or bool(offences)
    for package in ("wellposed", "wellposed_lab", "wellposed_studies"):
        cycle = circle(imports_of(package))
        sys.stdout.write(f"{package}: {' <- '.join(cycle) or 'no circle of imports'}\n")
        failed |= bool(cycle)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
