"""The rules of the house: what counts as a code line, which imports reach into a package, and that
docstrings name parameters as they are."""

from pathlib import Path

import pytest
from tools.house import MOST_LINES, code_lines, offences, outward, private_imports, unshown

ROOT = Path(__file__).parents[1]
STARS = {"variadic positional": "*", "variadic keyword": "**"}


def test_comments_docstrings_and_blank_lines_are_free():
    assert code_lines('"""Doc\n\nstring."""\n\n# why\nx = (\n    1  # one\n)\n') == 3
    assert code_lines('def f():\n    """Doc."""\n    return """a\nb"""\n') == 3
    assert code_lines("def f():\n    ...\n") == 2


@pytest.mark.parametrize(("lines", "is_offence"), [(MOST_LINES, False), (MOST_LINES + 1, True)])
def test_a_file_of_too_many_code_lines_is_named(lines, is_offence):
    problems = list(
        offences(Path("tests/test_a.py"), "# why\n\nx = 1\n" + "x += 1\n" * (lines - 1))
    )
    assert bool(problems) is is_offence
    assert all(problem.startswith(f"tests/test_a.py: {lines} code lines") for problem in problems)


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


def test_an_import_of_the_package_around_is_named():
    """Other circles are a contract of import-linter."""
    assert list(outward({"a": {"a.b"}, "a.b": {"a.c", "ab"}, "a.c": set()})) == []
    (line,) = outward({"a": {"a.b"}, "a.b.c": {"a.d", "a"}})
    assert line.startswith("a.b.c: imports a, which holds it")


HEAD = "| what one sees | what to do | shown by |\n|---|---|---|\n"
ROW = "| one sees | one does | {} |\n"


@pytest.mark.parametrize(
    ("page", "problem"),
    [
        (HEAD + ROW.format("`test_a`") + ROW.format("`b.sh`"), None),
        (HEAD + ROW.format("`test_a`"), "findings/b.sh: no row"),
        (HEAD + ROW.format("`test_renamed`") + ROW.format("`b.sh`"), "docs/stack.md:3: "),
        (HEAD + ROW.format("`b.sh`") + ROW.format("nothing"), "docs/stack.md:4: "),
        (HEAD + ROW.format("`b.sh`") + "\n" + ROW.format("`test_a`"), "docs/stack.md:5: "),
    ],
)
def test_each_surprise_is_shown_and_each_script_has_a_row(page, problem):
    problems = list(unshown(page, {"test_a"}, {"b.sh"}))
    assert bool(problems) is (problem is not None)
    assert all(line.startswith(str(problem)) for line in problems)


def misnamed(item):
    """Yield each function and class in a module of griffe whose Args are not its parameters, each
    with its stars, in their order."""
    for member in item.members.values():
        if member.is_alias:
            continue
        sections = member.docstring.parse("google", warnings=False) if member.docstring else []
        parts = [part.value for part in sections if part.kind.value == "parameters"]
        if named := [entry.name for part in parts for entry in part]:
            parameters = [STARS.get(p.kind.value, "") + p.name for p in member.parameters]
            if named != [name for name in parameters if name in named]:
                yield f"{member.path}: {named}"
        yield from misnamed(member)


@pytest.mark.parametrize(
    ("args", "is_offence"),
    [
        (["a", "b", "*c", "d", "**e"], False),
        (["b", "**e"], False),
        (["b", "a"], True),
        (["a, b"], True),
        (["a", "..."], True),
        (["c"], True),
        (["e"], True),
        (["a", "a"], True),
    ],
)
def test_an_entry_under_args_is_one_parameter(args, is_offence):
    griffe = pytest.importorskip("griffe", reason="needs the extra docs")
    entries = "".join(f"        {name}: x.\n" for name in args)
    code = f'def f(a, b, *c, d, **e):\n    """Doc.\n\n    Args:\n{entries}    """\n'
    module = griffe.visit("m", Path("m.py"), code)
    assert bool(list(misnamed(module))) is is_offence


@pytest.mark.parametrize(
    "source", ["src/wellposed", "lab/wellposed_lab", "studies/wellposed_studies"]
)
def test_args_of_docstrings_are_parameters(source):
    griffe = pytest.importorskip("griffe", reason="needs the extra docs")
    folder, package = source.split("/")
    assert list(misnamed(griffe.load(package, search_paths=[ROOT / folder]))) == []
