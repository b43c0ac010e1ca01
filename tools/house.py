"""Check four rules of this repository, and print how large it is; `make check` runs it.

Size: a file holds one concept, in at most `MOST_LINES` code lines. A code line has a token that is
neither comment nor docstring. The code lines and nodes of the syntax tree of each root are printed
beside those of the last release (`[tool.house.released]` in pyproject.toml), and judged by no one.

Privacy: only a package and its sub-packages import its names that begin with an underscore. Tests
do not.

Circles: no module imports a package that holds it, imports for types included. All other circles
are those of the contract `acyclic_siblings` of import-linter.

Surprises: each row of docs/stack.md names a test or a script in findings/, and each script has a row.

    python tools/house.py
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[1]
TEST_ROOTS = ("tests", "lab/tests", "studies/tests")
MOST_LINES = 400
"""Code lines of a file."""


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


def outward(imports: Mapping[str, Collection[str]]) -> Iterator[str]:
    """Yield a line for every module that imports a package around it: its name -> what it imports."""
    for name, targets in imports.items():
        for target in targets:
            if name.startswith(f"{target}."):
                yield f"{name}: imports {target}, which holds it; import the module that defines the name"


def imports_of(package: str) -> dict[str, set[str]]:
    """Return every module of a package with the modules of it that it imports."""
    graph = grimp.build_graph(package, exclude_type_checking_imports=False, cache_dir=None)
    return {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}


def offences(file: Path, text: str) -> Iterator[str]:
    """Yield a line for every rule that one file breaks."""
    yield from private_imports(file, text)

    lines = code_lines(text)
    if lines > MOST_LINES:
        yield f"{file}: {lines} code lines, expected at most {MOST_LINES}: does it hold two concepts?"


def unshown(page: str, tests: Collection[str], scripts: Collection[str]) -> Iterator[str]:
    """Yield a line for every row of the page of surprises that shows nothing, and for every script
    without a row."""
    lines = ["", *page.splitlines()]
    for number, line in enumerate(lines):
        if not line.startswith("| ") or line.startswith("| what"):
            continue
        if not lines[number - 1].startswith("|"):
            yield f"docs/stack.md:{number}: this row has no table above it"
        names = re.findall(r"`([\w.]+)` \|$", line)
        if not names or names[0] not in {*tests, *scripts}:
            yield f"docs/stack.md:{number}: its last column names no test and no script of findings/"
    for script in scripts:
        if f"`{script}`" not in page:
            yield f"findings/{script}: no row of docs/stack.md names it"


def report_surprises() -> bool:
    """Print the rows of the page of surprises that show nothing; return if there are any."""
    files = [file for root in TEST_ROOTS for file in (ROOT / root).rglob("test_*.py")]
    texts = [file.read_text(encoding="utf-8") for file in files]
    tests = {name for text in texts for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)}
    scripts = {path.name for path in (ROOT / "findings").glob("*.sh")}
    page = (ROOT / "docs" / "stack.md").read_text(encoding="utf-8")
    broken = list(unshown(page, tests, scripts))
    sys.stdout.writelines(f"{line}\n" for line in broken)
    return bool(broken)


def report_root(root: str, released: Mapping[str, int]) -> bool:
    """Print the size of a root beside that of the last release; return if it breaks a rule."""
    lines = 0
    nodes = 0
    broken: list[str] = []
    for file in sorted((ROOT / root).rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        lines += code_lines(text)
        nodes += sum(1 for _ in ast.walk(ast.parse(text)))
        broken += offences(file.relative_to(ROOT), text)

    sys.stdout.write(
        f"{root}: {lines} code lines ({released['lines']} at the last release),"
        f" {nodes} nodes ({released['nodes']})\n"
    )
    sys.stdout.writelines(f"{offence}\n" for offence in broken)
    return bool(broken)


def main() -> int:
    """Print every root with its size and all violations; return 1 if there are any."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    failed = False
    for root, released in settings["tool"]["house"]["released"].items():
        failed |= report_root(root, released)
    for package in ("wellposed", "wellposed_lab", "wellposed_studies"):
        circles = list(outward(imports_of(package)))
        sys.stdout.writelines(f"{line}\n" for line in circles)
        failed |= bool(circles)
    failed |= report_surprises()
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
