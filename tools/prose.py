"""Counts hard English and names that nobody can search for; `make check` runs it.

It reads docstrings, comments, strings with blanks (messages, help) and Markdown outside code blocks.
Patterns and the largest number of hits of each are in `[tool.prose]` of pyproject.toml. A hit is a
sentence to read again: some are right, which is why a few are allowed.

    python tools/prose.py [KIND]    # with a kind: its hits, file by file
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def python_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of every block of comments and every string of several words."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [
        (token.start[0], token.string.lstrip("#: "))
        for token in tokens
        if token.type == tokenize.COMMENT
    ]
    for _, block in groupby(enumerate(comments), lambda numbered: numbered[1][0] - numbered[0]):
        lines = [comment for _, comment in block]
        yield lines[0][0], " ".join(text for _, text in lines)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "x" for part in node.values]
            if " " in (text := "".join(map(str, parts))):  # else a format, not a text
                yield node.lineno, text
        elif isinstance(node, ast.Constant) and str(node.value).count(" ") > 3:
            yield node.lineno, re.sub(r"(?m)^ *(>>>|\.\.\.).*$", "", str(node.value))


def markdown_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and text of every paragraph, heading, item and row outside code blocks."""
    plain = re.sub(
        r"^ *```.*?^ *```", lambda code: "\n" * code[0].count("\n"), source, flags=re.M | re.S
    )
    for block in re.finditer(r"^[ ]*[|#!-].*|(?:^(?![ ]*[|#!-]).*\S.*\n?)+", plain, re.MULTILINE):
        yield plain.count("\n", 0, block.start()) + 1, block[0]


def hits(
    path: Path, rules: dict[str, dict[str, str]], longest: int
) -> Iterator[tuple[str, int, str]]:
    """Yield the kind, line and text of every hit in a file."""
    source = path.read_text(encoding="utf-8")
    for line, text in (markdown_texts if path.suffix == ".md" else python_texts)(source):
        flat = re.sub(r"`[^`]*`", "x", " ".join(text.split()))
        for sentence in re.split(r"(?<=[.!?;:])\s+(?=[A-Z`*(])", flat):
            for kind, pattern in rules["texts"].items():
                if re.search(pattern, sentence):
                    yield kind, line, sentence
            if len(sentence.split()) > longest and "|" not in sentence:
                yield "long", line, sentence
    for node in ast.walk(ast.parse(source)) if path.suffix == ".py" else ():
        match node:
            case (
                ast.Name(id=name, ctx=ast.Store())
                | ast.Attribute(attr=name, ctx=ast.Store())
                | ast.FunctionDef(name=name)
                | ast.arg(arg=name)
            ) if name in rules["names"]:
                yield "name", node.lineno, name


def main(show: str = "") -> int:
    """Print the hits of each kind beside the most allowed; return 1 if there are more."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["prose"]
    files = [f for root in settings["roots"] for f in [ROOT / root, *(ROOT / root).rglob("*")]]
    counts: Counter[str] = Counter()
    for file in files:
        if file.suffix in (".py", ".md"):
            for kind, line, text in hits(file, settings, settings["longest"]):
                counts[kind] += 1
                if kind == show:
                    sys.stdout.write(f"{file.relative_to(ROOT)}:{line}: {text[:200]}\n")
    for kind, most in settings["most"].items():
        sys.stdout.write(f"{kind}: {counts[kind]} of {most}\n")
    return int(any(counts[kind] > most for kind, most in settings["most"].items()))


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
