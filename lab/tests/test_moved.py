"""What 0.3 had under `wellposed` and the lab has now: one warning, and the same objects."""

import pytest
from tests.support.words import python

from wellposed.errors import extra_line

MOVED = [
    ("wellposed.training", "train", "wellposed_lab.training.loop.train"),
    ("wellposed.training", "RunConfig", "wellposed_lab.training.config"),
    ("wellposed.training.config", "TrainOptions", "wellposed_lab.training.config"),
    ("wellposed.tasks", "TASKS", "wellposed_lab.tasks.task"),
    ("wellposed.tasks.data.splits", "SPLITS", "wellposed_lab.tasks.data.splits"),
    ("wellposed.compare.variants", "VARIANTS", "wellposed_lab.compare.variants"),
    ("wellposed.report", "build_report", "wellposed_lab.report.page"),
    ("wellposed.statistics", "paired_comparison", "wellposed_lab.statistics"),
    ("wellposed.charts", "draw", "wellposed_lab.charts"),
    ("wellposed.plugins", "import_file", "wellposed_lab.plugins"),
    ("wellposed.cli", "main", "wellposed_lab.cli.main"),
]
SCRIPT = """
import sys, warnings
from importlib import import_module
old, name, new = sys.argv[1:]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    moved = getattr(import_module(old), name)
assert moved is getattr(import_module(new), name)
[warning] = [each for each in caught if each.category is FutureWarning]
print(warning.message)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("old", "name", "new"), MOVED)
def test_a_name_of_0_3_is_the_same_object_and_says_where_it_is(old, name, new):
    done = python(["-c", SCRIPT, old, name, new])
    assert done.returncode == 0, done.stderr
    moved = old.split(".")[1]
    assert done.stdout.strip() == f"wellposed.{moved} has moved; import from wellposed_lab.{moved}"


def test_without_the_lab_a_name_of_0_3_says_what_to_install():
    block = "import sys; sys.modules['wellposed_lab'] = None"
    done = python(["-W", "ignore", "-c", f"{block}; import wellposed.training"])
    assert done.returncode == 1
    assert f"run: {extra_line('lab')}" in done.stderr.splitlines()[-1]
