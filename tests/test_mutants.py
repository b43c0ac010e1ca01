"""The mutation check: which changes it makes, that it finds what no test notices, and that a hang
ends."""

import os
import re
import signal
from pathlib import Path

import pytest
from tests.support.words import python
from tools.mutants.__main__ import forked
from tools.mutants.changes import mutants, short

ROOT = Path(__file__).parents[1]
SOURCE = '''"""A toy."""

LIMIT = 3


def largest(a: int, b: int = 0) -> int:
    """Return 1 of 2."""
    if a < b:
        return b
    return a


def limited(x):
    if x > LIMIT:
        raise ValueError(f"{x} is more than {LIMIT + 1}")
    return x * 2


def never_run(x):
    return x + 1
'''
TESTS = """
import pytest
from toy.numbers import largest, limited


def test_largest():
    assert (largest(1, 2), largest(3, 2), largest(-1)) == (2, 3, 0)


def test_limited():
    assert limited(1) == 2
    with pytest.raises(ValueError):
        limited(4)


def test_that_fails_before_any_change():
    assert limited(0) == 1
"""
SURVIVORS = [
    "toy/numbers.py:8 `a < b` -> `a <= b` (1 tests)",
    "toy/numbers.py:14 `x > LIMIT` -> `x >= LIMIT` (1 tests)",
    "toy/numbers.py:20 `return x + 1` -> `return None` (0 tests)",
    "toy/numbers.py:20 `x + 1` -> `x - 1` (0 tests)",
    "toy/numbers.py:20 `1` -> `2` (0 tests)",
]


@pytest.fixture
def toy(tmp_path):
    (tmp_path / "src/toy").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "src/toy/__init__.py").touch()
    (tmp_path / "src/toy/numbers.py").write_text(SOURCE)
    (tmp_path / "tests/test_numbers.py").write_text(TESTS)
    return tmp_path


@pytest.mark.slow
def test_what_no_test_notices_is_listed_and_the_rest_is_killed(toy):
    words = f"--source {toy}/src --packages toy --tests {toy}/tests --sample 99"
    done = python("-m tools.mutants", words, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert re.findall("^- (.*)", done.stdout, re.MULTILINE) == SURVIVORS
    listed = mutants(toy / "src/toy/numbers.py", toy / "src")
    killed = len(listed) - len(SURVIVORS)
    assert f"| toy | {len(listed)} | {len(listed)} | {killed} | {len(SURVIVORS)} | " in done.stdout
    assert "1 of 1 unchanged controls passed" in done.stdout


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("x = a <= b", {"a < b", "a > b"}),
        ("x = not a", {"a"}),
        ("x = a.sum(dim=-1)", {"a.mean(dim=-1)", "-2"}),
        ("x = math.sqrt(a) + b.abs()", {"math.sqrt(a) - b.abs()", "a", "b"}),
        ("x = max(a, b).mT @ c", {"min(a, b)", "max(a, b)"}),
        ("x = True", {"False"}),
        ("x += a", {"pass", "x -= a"}),
        ("f(a)", {"pass"}),
        ("def f(a: int = 1) -> 2: return a", {"2", "return None"}),
        ("raise ValueError('more', 1)", {"pass"}),
        ("if a and b: pass", {"if not (a and b): pass", "a or b"}),
        ('"""A docstring, 1."""\nx: Literal[1] = f"{1}"\n__all__ = ["a"]', set()),
        ('warnings.warn("a", stacklevel=2)', {"pass"}),
        ("if TYPE_CHECKING:\n    x = 1", set()),
    ],
)
def test_changes_of_a_line(tmp_path, code, changes):
    file = tmp_path / "line.py"
    file.write_text(code, encoding="utf-8")
    assert {short(mutant.other) for mutant in mutants(file, tmp_path)} == changes


def process_of(job):
    while job == "hang":
        pass
    if job == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid()


def test_a_child_that_hangs_or_dies_has_no_answer():
    answers = dict(forked(process_of, [(name, 1.0) for name in ("hang", "die", "live")], 2))
    assert answers["hang"] is answers["die"] is None
    assert answers["live"] not in (None, os.getpid())
