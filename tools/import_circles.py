"""Names every circle in the import graph of `src`, file by file; `make check` runs it.

Counted are imports at the top of a file and inside its functions, not those under
`if TYPE_CHECKING`. A package's `__init__` points to every file it re-exports from, also where the
names are imported on first use, and a file that imports the package it lies in is a circle at once.
No file of a circle can be read, tested or moved alone.

    python tools/import_circles.py            # the package in src/
    python tools/import_circles.py FOLDER     # any folder that holds packages
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src"
Graph = Mapping[str, set[str]]


def modules(folder: Path) -> dict[str, Path]:
    """Return every module below a folder by its dotted name; a package is its `__init__`."""
    files = sorted(folder.rglob("*.py"))
    return {
        ".".join(file.relative_to(folder).with_suffix("").parts).removesuffix(".__init__"): file
        for file in files
    }


def counted(node: ast.AST, *, also_for_types: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports below a node; those for type checkers alone only where they are asked
    for."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif (
            isinstance(child, ast.If)
            and ast.unparse(child.test) == "TYPE_CHECKING"
            and not also_for_types
        ):
            for other in child.orelse:
                yield from counted(other, also_for_types=also_for_types)
        else:
            yield from counted(child, also_for_types=also_for_types)


def imported(module: str, file: Path, known: Mapping[str, Path]) -> set[str]:
    """Return the known modules that a module imports; `from package import name` means the file,
    where there is one."""
    is_package = file.name == "__init__.py"
    found: set[str] = set()
    for node in counted(
        ast.parse(file.read_text(encoding="utf-8"), filename=str(file)), also_for_types=is_package
    ):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            parts = module.split(".")
            above = parts[: len(parts) + is_package - node.level] if node.level else []
            home = ".".join([*above, *filter(None, [node.module])])
            names = [
                inside if (inside := f"{home}.{alias.name}") in known else home
                for alias in node.names
            ]
        found.update(name for name in names if name in known)
    return found


def import_graph(folder: Path) -> dict[str, set[str]]:
    """Return the modules below a folder, each with those it imports."""
    known = modules(folder)
    graph = {module: imported(module, file, known) for module, file in known.items()}
    for module, names in graph.items():
        for package in filter(lambda name: module.startswith(f"{name}."), names):
            graph[package].add(module)
    return graph


def circles(graph: Graph) -> list[list[str]]:
    """Return the groups of modules that reach each other, largest first; a module that imports
    itself is one."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = list(graph[start])
        while waiting:
            module = waiting.pop()
            if module not in seen:
                seen.add(module)
                waiting += graph[module]
        return seen

    reach = {module: reached(module) for module in graph}
    groups = {
        frozenset(other for other in reach[module] if module in reach[other])
        for module in graph
        if module in reach[module]
    }
    return sorted(map(sorted, groups), key=lambda group: (-len(group), group))


def shortest_circle(graph: Graph, group: list[str]) -> list[str]:
    """Return the shortest way round within a group, from a module back to itself."""
    best: list[str] = []
    for start in group:
        before: dict[str, str] = {}
        waiting = [start]
        while waiting and start not in before:
            module = waiting.pop(0)
            for other in sorted(graph[module] & set(group)):
                if other not in before:
                    before[other] = module
                    waiting.append(other)
        way = [start, before[start]]
        while way[-1] != start:
            way.append(before[way[-1]])
        if not best or len(way) < len(best):
            best = way[::-1]
    return best


def main(words: list[str]) -> int:
    """Write every circle and return the exit status: 0 none, 1 some, 2 a folder that does not
    exist."""
    folder = Path(words[0]) if words else SOURCE
    if not folder.is_dir():
        sys.stderr.write(f"no such folder: {folder}\n")
        return 2
    graph = import_graph(folder)
    found = circles(graph)
    for group in found:
        sys.stdout.write(f"{len(group)} files import each other: {', '.join(group)}\n")
        sys.stdout.write(f"  for instance {' -> '.join(shortest_circle(graph, group))}\n")
    sys.stdout.write(f"{len(found)} circles in the imports of {len(graph)} files\n")
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
