"""The rules of the house: what counts as a code line, and which imports reach into a package."""

from pathlib import Path

import pytest
from tools.house import circle, code_lines, private_imports


def test_comments_docstrings_and_blank_lines_are_free():
    assert code_lines('"""Doc\n\nstring."""\n\n# why\nx = (\n    1  # one\n)\n') == 3
    assert code_lines('def f():\n    """Doc."""\n    return """a\nb"""\n') == 3
    assert code_lines("def f():\n    ...\n") == 2


@pytest.mark.parametrize(
    ("file", "line", "is_offence"),
    [
        ("src/wellposed/a/b.py", "from wellposed.a._c import C", False),
        ("src/wellposed/a/deep/b.py", "from wellposed.a._c import C", False),
        ("src/wellposed/a/b.py", "from ._c import C", False),
        ("src/wellposed/a/__init__.py", "from . import _c", False),
        ("src/wellposed/b/d.py", "from wellposed.a._c import C", True),
        ("src/wellposed/b/d.py", "from ..a._c import C", True),
        ("src/wellposed/b/d.py", "from wellposed.a.c import _C", True),
        ("tests/test_a.py", "import wellposed.a._c", True),
        ("tests/test_a.py", "from wellposed.version import __version__", False),
        ("tests/test_a.py", "from torch._dynamo import config", False),
    ],
)
def test_a_private_name_belongs_to_its_package(file, line, is_offence):
    problems = list(private_imports(Path(file), f"def late():\n    {line}\n"))
    assert bool(problems) is is_offence
    assert all(problem.startswith(f"{file}:2: ") for problem in problems)


def test_a_circle_of_imports_is_named():
    assert circle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})[0] in {"a", "b", "c"}
    assert circle({"a": {"a"}}) == ["a", "a"]
