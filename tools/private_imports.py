"""Names every import of a private module or name from outside the package that owns it;
`make check` runs it.

A name that begins with an underscore belongs to the package or module it stands in: that package
and its sub-packages may import it, nobody else, tests included. So a private file can be renamed or
split by looking at one folder.

    python tools/private_imports.py                 # all Python files of this repository
    python tools/private_imports.py FILE_OR_FOLDER...
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "tests", "benchmarks", "examples", "tools")
OURS = "wellposed"
WHAT_TO_DO = (
    "publish it in that package's __init__, move it to where both may reach it, or use the public"
    " names"
)


def owner(name: str) -> str:
    """Return what a dotted name is private to: all that stands before its first private part; else
    nothing."""
    parts = name.split(".")
    for index, part in enumerate(parts):
        if part.startswith("_") and not part.endswith("__"):
            return ".".join(parts[:index])
    return ""


def package_of(file: Path) -> str:
    """Return the dotted package that a file of ours lies in; nothing for a file outside `src`."""
    folders = file.resolve().parent.parts
    return ".".join(folders[folders.index("src") + 1 :]) if "src" in folders else ""


def imported(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """Yield line and full dotted name of everything of ours that a module imports, relative imports
    resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) + 1 - node.level] if node.level else []
            names = [
                ".".join([*above, *filter(None, [node.module]), alias.name]) for alias in node.names
            ]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == OURS)


def offences(file: Path) -> list[str]:
    """Return one line for every import of a file that reaches into a package which the file does
    not lie in."""
    package = package_of(file)
    tree = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    return [
        f"{file}:{line}: {name} is private to {owner(name)}; {WHAT_TO_DO}"
        for line, name in imported(tree, package)
        if owner(name) and not f"{package}.".startswith(f"{owner(name)}.")
    ]


def main(words: list[str]) -> int:
    """Write every offence and return the exit status: 0 none, 1 some, 2 a path that does not
    exist."""
    paths = [Path(word) for word in words] or [ROOT / name for name in FOLDERS]
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        sys.stderr.write(f"no such file or folder: {', '.join(missing)}\n")
        return 2
    files = sorted(
        file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))
    )
    found = [line for file in files for line in offences(file)]
    sys.stdout.writelines(f"{line}\n" for line in found)
    sys.stdout.write(
        f"{len(found)} imports of another package's private names in {len(files)} files\n"
    )
    return int(bool(found))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
