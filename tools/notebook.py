"""Run the cells of a notebook in one process and keep what they print, as a notebook server would.

    python -m tools.notebook docs/quickstart.ipynb    # writes the outputs into the file

Only text is kept: pictures are drawn where the notebook is opened. No notebook package is needed.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def code_cells(notebook: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the cells of code, in order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run_cell(source: str, names: dict[str, Any]) -> str:
    """Run a cell in ``names``; return what it prints, and its last line if that is a value."""
    tree = ast.parse(source)
    printed = io.StringIO()
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
            if value is not None:
                print(repr(value))  # noqa: T201
    return printed.getvalue()


def run_notebook(path: Path) -> list[str]:
    """Return what each cell of code of a notebook prints."""
    names: dict[str, Any] = {"__name__": "__main__"}
    cells = code_cells(json.loads(path.read_text("utf-8")))
    return [run_cell("".join(cell["source"]), names) for cell in cells]


def main() -> None:
    """Run a notebook and write its outputs."""
    path = Path(sys.argv[1])
    notebook = json.loads(path.read_text("utf-8"))
    printed = run_notebook(path)
    for count, (cell, text) in enumerate(zip(code_cells(notebook), printed, strict=True), start=1):
        # A temporary folder has another name each time, and is gone when somebody reads this.
        text = re.sub(rf"{re.escape(tempfile.gettempdir())}/\w+", "...", text)
        lines = text.splitlines(keepends=True)
        cell["execution_count"] = count
        cell["outputs"] = (
            [{"name": "stdout", "output_type": "stream", "text": lines}] if text else []
        )
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
